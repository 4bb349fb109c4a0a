"""The schedule report: reading the compiler's dump, the model, and the command."""

from __future__ import annotations

import dataclasses
import json

import pytest
import toy_schedule_cases as toy

from custom_ops.schedule import __main__ as command
from custom_ops.schedule.bundles import DELAY_SLOTS, Loop, ScheduleError, read_schedule
from custom_ops.schedule.cases import Case, cases_in, module_of, operations
from custom_ops.schedule.measure import CompileError, Kernel, Measurement, measure
from custom_ops.schedule.model import CLOCK, HBM_BYTES_PER_SECOND, row

DELAY = [""] * DELAY_SLOTS
UTILIZATION = "== CAPACTIY:\nMXU, VALU, VLOAD:FILL, VSTORE:SPILL\n    2     4     3     2\n== UTILIZATION:\n"


def dump(*bundles: str) -> str:
    """A dump with these bundles; in each the instruction, and the regions that start there."""
    head = "= control target key start\nLB: loop body\n= control target key end\n\n"
    addresses = ["0", *map(hex, range(1, len(bundles)))]
    return head + "\n".join(f"{address:>6}   : > {{ {text} }}" for address, text in zip(addresses, bundles, strict=True))


def region(number: int, text: str = "") -> str:
    return f"{text} /* Start region {number} :: Start region {number + 100} */"


def exit_test(predicate: str, bound: str) -> str:
    return f"%{predicate} = scmp.ge.s32.totalorder %s1, {bound} /* loop exit test */"


def branch(predicate: str, target: int, negated: bool = True) -> str:
    return f"%9 = sbr.rel ({'!' * negated}%{predicate}) target = $region{target}"


def dma(granules: str, kind: str = "hbm_to_vmem", window: str = "") -> str:
    text = f"%7 = dma.{kind} [thread:$0]  (%p7), /*hbm=*/%s1, /*size_in_granules=*/{granules}, /*vmem=*/%s2 /* note"
    return text + window + " */"


NESTED = dump(
    "%s0 = smov 0",
    region(1, exit_test("p1_p0", "5")),  # 0x1: the outer loop
    region(2),  # 0x2: the inner one
    exit_test("p2_p0", "3"),
    branch("p2_p0", 2),
    *DELAY,  # to 0xa
    "%s4 = sadd.s32 1, %s3",
    branch("p1_p0", 1),
    *DELAY,  # to 0x12
    "%s5 = smov 1",
)


def test_nested_loops():
    program = read_schedule(NESTED)
    outer, inner = list(program.walk())[1:]
    assert (inner.first, inner.last, inner.own, inner.steps) == (2, 10, 9, 3)
    assert (outer.first, outer.last, outer.own, outer.steps) == (1, 18, 9, 5)
    assert program.own == 2
    assert program.bundles() == 2 + 5 * (9 + 3 * 9)


def test_empty_bundles_count():
    assert read_schedule(dump("%s0 = smov 0", "", "", "%s1 = smov 0")).bundles() == 4


@pytest.mark.parametrize("outer, inner, bundles", [(7, None, 2 + 7 * (9 + 3 * 9)), (None, 0, 2 + 5 * 9), (0, None, 2)])
def test_declared_trips_take_the_place_of_constants(outer, inner, bundles):
    declared = {5: outer, 3: inner}
    assert read_schedule(NESTED, trips=lambda loop: declared[loop.steps]).bundles() == bundles


def test_a_bound_that_is_no_constant_needs_a_count():
    text = dump(region(1, exit_test("p1_p0", "%s9")), branch("p1_p0", 1), *DELAY)
    with pytest.raises(ScheduleError, match=r"no constant.*8 bundles at 0x0 \(\? times\)"):
        read_schedule(text)
    assert read_schedule(text, trips=lambda loop: 11).bundles() == 11 * 8


def test_a_branch_forward_is_no_loop():
    text = dump(branch("p1_p0", 3, negated=False), *DELAY, "%s1 = smov 0", region(3))
    program = read_schedule(text)
    assert not program.inner and program.bundles() == 9


def test_a_pipeline_skips_its_body_while_it_fills_and_drains():
    text = dump(
        region(1, "%s1 = sadd.s32 1, %s2 /* iteration index, stage = 2 */"),
        exit_test("p1_p0", "6"),
        branch("p3_p0", 3, negated=False),
        *DELAY,
        *["%v1 = vadd.f32 %v2, %v3"] * 20,
        region(3),
        branch("p1_p0", 1),
        *DELAY,
    )
    (loop,) = read_schedule(text).inner
    assert (loop.steps, loop.extra, loop.own) == (4, 2, 37)
    assert loop.bundles() == 4 * 37 + 2 * 17


def test_notes_over_several_lines_belong_to_their_bundle():
    text = dump("%1 = vld %2 /* note\nsecond line\n 0x99 is no bundle */", "%2 = smov 0")
    assert read_schedule(text).bundles() == 2


def test_bytes_of_dmas():
    once = "\nbase_bounds: (4, 1)\ndynamic_base_bounds: (4, 1)\nwindow_bounds: (4, 1)\n"
    by_step = "\nbase_bounds: (32, 1)\ndynamic_base_bounds: (32, 1)\nwindow_bounds: (4, 1)\n"
    text = dump(
        region(1, exit_test("p1_p0", "5")),
        dma("100", window=by_step),
        "%8 = shalt.err (%p1) /* BoundsCheck for " + dma("100").replace("/*", "").replace("*/", "") + " */",
        dma("50", "vmem_to_hbm"),
        dma("10", window=once),
        dma("1000", "vmem_to_vmem"),
        branch("p1_p0", 1),
        *DELAY,
    )
    program = read_schedule(text)
    assert program.bytes_moved() == 32 * (5 * 150 + 10)
    assert read_schedule(text.replace("granules=*/50", "granules=*/%s5")).bytes_moved() is None


def test_spills_and_the_busiest_unit():
    rows = ["0 0 0 1", *["2 1 1 0"] * 9, "0 0 0 0", *["0 4 0 0"] * 8]
    text = NESTED.rsplit("\n", 1)[0]
    inner = list(read_schedule(text, UTILIZATION + "\n".join(rows)).walk())[2]
    assert inner.vector_spills == 8 and inner.busiest == ("MXU", pytest.approx(8 / 9))
    with pytest.raises(ScheduleError, match="19 bundles, but 2 lines"):
        read_schedule(text, UTILIZATION + "\n".join(rows[:2]))


def test_a_text_that_is_no_schedule():
    with pytest.raises(ScheduleError):
        read_schedule("nothing")


@pytest.mark.parametrize("bundles, moved, longer", [(1000, 4000, "bundles"), (10, 4_000_000, "bytes")])
def test_the_longer_of_bundles_and_bytes_is_modelled(bundles, moved, longer):
    case = Case("case", "pallas_tpu", toy.build, "kernel", hbm_bytes=2000, matrix_flops=1_155_000)
    kernel = Kernel("kernel.1", Loop(0, bundles - 1, own=bundles, hbm_bytes=moved), 512)
    figures = row("op", case, Measurement((kernel, kernel), 7))
    times = {"bundles": 2e6 * bundles / CLOCK, "bytes": 2e6 * moved / HBM_BYTES_PER_SECOND}
    assert figures.time == pytest.approx(times[longer]) == max(times.values())
    assert figures.byte_bound == pytest.approx(1e6 * 2000 / HBM_BYTES_PER_SECOND)
    assert figures.matrix_bound == pytest.approx(1e-3)
    assert figures.over_byte_bound == pytest.approx(figures.time / figures.byte_bound)


@pytest.mark.parametrize(
    "declared, scheduled, expected",
    [(3000, 9000, (3000, "case")), (None, 9000, (9000, "schedule")), (None, None, (2000, "least"))],
)
def test_where_the_bytes_come_from(declared, scheduled, expected):
    case = Case("case", "pallas_tpu", toy.build, "kernel", hbm_bytes=2000, matrix_flops=0, moved_bytes=declared)
    figures = row("op", case, Measurement((Kernel("kernel.1", Loop(0, 9, own=10, hbm_bytes=scheduled), 0),), 0))
    assert (figures.hbm_bytes, figures.hbm_bytes_from) == expected


@pytest.fixture
def toy_operation(monkeypatch):
    """The command with one operation, that of toy_schedule_cases.py."""
    monkeypatch.setattr(command, "operations", lambda: ["toy"])
    monkeypatch.setattr(command, "module_of", lambda name: "toy_schedule_cases")


def test_the_command_measures_says_what_it_left_out_and_what_failed(toy_operation, capsys):
    assert command.main(["--json"]) == 1
    printed = capsys.readouterr()
    answer = json.loads(printed.out)
    (figures,) = answer["cases"]
    assert figures["case"] == "product" and "inferred" in answer["model"]
    (kernel,) = figures["kernels"]
    program, grid = kernel["loops"]
    assert kernel["name"].startswith("toy_product") and grid["times"] == toy.COLUMNS // toy.TILE
    assert figures["bundles"] >= program["bundles"] + grid["times"] * grid["bundles"]
    assert figures["hbm_bytes"] == toy.BYTES and figures["hbm_bytes_from"] == "schedule"
    assert figures["spills_in_loops"] == 0
    # Blocks of two arrays that change are there twice, the one that stays once.
    assert figures["vmem_bytes"] >= 2 * (2 * 2 * toy.TILE * toy.ROWS + toy.ROWS * toy.DEPTH)
    assert len(answer["failed"]) == 1 and "odd tile" in answer["failed"][0]
    assert "no_such_package is not installed" in printed.err


def test_the_table_has_a_line_a_case_and_a_line_a_loop(toy_operation, monkeypatch, capsys):
    monkeypatch.setattr(command, "cases_in", lambda module: toy.CASES[:1])
    assert command.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("product [pallas_tpu]") for line in lines)
    assert any("loop body" in line and f"× {toy.COLUMNS // toy.TILE}" in line for line in lines)


def test_a_kernel_of_another_name_is_an_error():
    with pytest.raises(CompileError, match="no kernel in the HLO is called other_name"):
        measure("toy_schedule_cases", dataclasses.replace(toy.CASES[0], kernel="other_name"))


def test_unknown_operation(capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(["--op", "nothing"])
    assert stopped.value.code == 2
    assert "nothing" in (message := capsys.readouterr().err) and all(name in message for name in operations())


def test_gated_delta_net_declares_its_cases():
    cases = cases_in(module_of("gated_delta_net"))
    ours = [case.name for case in cases if case.implementation == "pallas_tpu"]
    assert len(set(ours)) == len(ours) == 6
    assert {case.name for case in cases if case.requires == "tokamax"} == set(ours)
