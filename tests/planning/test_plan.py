"""Whole plans by the TPU compiler: a cut 397B among the slow tests, the published size among those of many minutes."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

import torchqwen_tpu
from custom_ops.cost_model import GIB
from torchqwen_tpu.cli import main
from torchqwen_tpu.planning.html import render
from torchqwen_tpu.planning.report import format_plan

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
LAYERS, HIDDEN, EXPERTS, WIDTH, VOCABULARY, DEVICES = 4, 4096, 64, 1024, 32768, 8

LOAD = {"concurrency": 64, "input_len": 1024, "output_len": 64, "prefill_chunk": 128, "state_dtype": "bfloat16"}


@pytest.fixture(scope="module")
def cut(tmp_path_factory) -> Path:
    """397B with one period of layers, an eighth of the experts and of the vocabulary."""
    config = json.loads((CONFIGS / "Qwen3.5-397B-A17B.json").read_text())
    text = config["text_config"]
    text |= {"num_hidden_layers": LAYERS, "layer_types": text["layer_types"][:LAYERS], "num_experts": EXPERTS}
    text["vocab_size"] = VOCABULARY
    file = tmp_path_factory.mktemp("cut") / "config.json"
    file.write_text(json.dumps(config))
    return file


@pytest.fixture(scope="module")
def planned(cut):
    return torchqwen_tpu.plan(str(cut), **LOAD)


@pytest.mark.slow
def test_memory_agrees_with_a_hand_count(planned):
    memory = planned.best.memory
    assert memory.weights["routed experts"] == LAYERS * EXPERTS * 3 * WIDTH * HIDDEN * 2 // DEVICES
    assert memory.weights["embedding"] == memory.weights["head"] == VOCABULARY * HIDDEN * 2
    assert memory.weights["Gated DeltaNet"] == pytest.approx(3 * 118.0e6 * 2, rel=0.01)
    assert memory.weights["attention"] == pytest.approx(104.9e6 * 2, rel=0.01)
    # Eight sequences a core, their 1,088 tokens in five pages of 256.
    assert memory.states["KV pages"] == 8 * 5 * 256 * 2 * 2 * 256 * 2
    assert memory.states["recurrent states"] == 3 * 8 * 64 * 128 * 128 * 2
    assert memory.padding < 0.02 * memory.used


@pytest.mark.slow
def test_what_is_left_fits(planned):
    memory = planned.best.memory
    assert memory.fits and planned.fits
    assert memory.used + memory.left == memory.capacity == 94.75 * GIB
    more = memory.largest_concurrency
    assert more > 64 and more % DEVICES == 0
    assert memory.largest_context > 1088


@pytest.mark.slow
def test_every_kind_of_step_has_a_time_above_its_roofline(planned):
    steps = planned.best.steps
    assert set(steps) == {"prefill", "mixed", "decode, start", "decode, end"}
    for step in steps.values():
        assert step.seconds > step.roofline.peak > 0
        assert step.seconds == pytest.approx(sum(cost.seconds for cost in step.costs.values()), rel=0.01)
        assert not step.unknown_loops
    assert steps["decode, end"].seconds >= steps["decode, start"].seconds


def exchanges(step) -> dict[str, float]:
    """How often the collectives that move whole rows run."""
    counts: dict[str, float] = {}
    for entry in step.collectives:
        assert entry.devices == DEVICES
        if entry.size > HIDDEN:
            counts[entry.kind] = counts.get(entry.kind, 0) + entry.runs
    return {kind: pytest.approx(runs) for kind, runs in counts.items()}


@pytest.mark.slow
def test_kernels_and_collectives_of_every_layer_are_there(planned):
    step = planned.best.steps["decode, start"]
    assert step.costs["kernel gated_delta_net_decode"].runs == pytest.approx(3)
    assert step.costs["kernel ragged_moe_experts"].runs == pytest.approx(LAYERS)
    assert exchanges(step) == {"all-gather": LAYERS, "kernel reduce_scatter": LAYERS}


@pytest.fixture(scope="module")
def split(cut):
    return torchqwen_tpu.plan(str(cut), layout="tp8", **LOAD).best


@pytest.mark.slow
def test_what_splitting_every_layer_over_all_cores_costs(planned, split):
    whole = planned.best
    assert (whole.name, split.name, whole.key_value_copies, split.key_value_copies) == ("dp8", "tp8", 1, 4)
    assert whole.runs and not split.runs and split.notes
    # Two key-value heads on eight cores: each keeps one of eight, for all 64 sequences.
    assert split.memory.states["KV pages"] == 4 * whole.memory.states["KV pages"]
    assert split.memory.weights["attention"] < 0.3 * whole.memory.weights["attention"]
    assert split.steps["decode, start"].exchanged.waiting > 0


@pytest.mark.slow
def test_a_split_layer_has_two_sums_over_all_cores(split):
    """Of its heads' parts, which the norm before the experts waits for, and of its experts' parts."""
    for kind in ("prefill", "decode, start"):
        assert exchanges(split.steps[kind]) == {"all-reduce": 2 * LAYERS}


class _Balanced(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.tags = [], set()

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.slow
def test_the_report_is_one_file(planned):
    page = render(planned)
    parser = _Balanced()
    parser.feed(page)
    assert not parser.open and {"svg", "table", "style"} <= parser.tags
    assert not re.search(r'(?:src|href)=|url\(|@import|<script', page)
    assert "modelled" in page


@pytest.mark.slow
def test_json_and_text(planned):
    answer = json.loads(json.dumps(planned.to_dict()))
    assert answer["best"] == "dp" and answer["layouts"][0]["fits"]
    assert "modelled" in format_plan(planned)


def test_what_does_not_fit_says_by_how_much_and_what_helps(cut, capsys):
    status = main(["plan", "--model", str(cut), "--concurrency", "64", "--input-len", "8000000"])
    output = capsys.readouterr().out
    assert status == 2
    # Eight sequences a core of 2 KiB a token: 122 GiB of pages, 94.75 GiB of memory.
    assert "does not fit" in output and "12" in output and "a concurrency of" in output and "FP8" in output


def processes_that_name(folder: Path) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(folder) in (process / "cmdline").read_bytes().decode(errors="replace"):
                found.append(int(process.name))
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_plan_leaves_nothing_behind(cut, tmp_path, number):
    command = [sys.executable, "-m", "torchqwen_tpu.cli", "plan", "--model", str(cut)]
    # A shell starts what runs in its background with SIGINT ignored: not so here.
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(
        command, env=os.environ | {"TMPDIR": str(tmp_path)}, stderr=subprocess.PIPE, text=True, preexec_fn=heard
    )
    limit = time.monotonic() + 300
    while not processes_that_name(tmp_path):  # a process that compiles is told its folder
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.01)  # the signal comes while the process starts, where it could be lost from sight
    process.send_signal(number)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 130 and "Traceback" not in error
    assert not list(tmp_path.iterdir()) and not processes_that_name(tmp_path)


@pytest.mark.long
def test_397b_in_fp8_on_one_machine():
    plan = torchqwen_tpu.plan(str(CONFIGS / "Qwen3.5-397B-A17B.json"), dtype="fp8", prefill_chunk=512)
    memory = plan.best.memory
    assert plan.fits
    experts = 60 * 512 * 3 * 1024 * 4096 // DEVICES
    assert memory.weights["routed experts"] == pytest.approx(experts, rel=0.02)
    assert memory.weights["head"] == 248320 * 4096 * 2
    # 36 pages of 256 tokens for each of eight sequences; 15 layers of attention, 45 of Gated DeltaNet.
    pages, states = 15 * 8 * 36 * 256 * 2 * 2 * 256 * 2, 45 * 8 * 64 * 128 * 128 * 2
    assert (memory.states["KV pages"], memory.states["recurrent states"]) == (pages, states)
    counted = experts + 7.9e9 + 2 * 2.034e9 + pages + states
    assert memory.used - memory.temporaries - memory.code == pytest.approx(counted, rel=0.02)
    assert memory.temporaries < 8 * GIB
    decode = plan.best.steps["decode, start"]
    assert exchanges(decode) == {"all-gather": 60, "kernel reduce_scatter": 60}
    assert decode.costs["kernel ragged_moe_experts"].bytes == pytest.approx(34.7e9, rel=0.02)
    assert decode.roofline.peak == pytest.approx(13.1e-3, rel=0.02)
    assert not decode.unknown_loops and decode.seconds < 30e-3
