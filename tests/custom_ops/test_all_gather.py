"""Hierarchical all-gather: plans and model here, the kernel in simulated TPUs, and compiled for TPU7x."""

from __future__ import annotations

import functools
import logging

import jax
import pytest
import simulation
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from custom_ops.all_gather import AllGatherShape, cost, pallas_tpu
from custom_ops.all_gather.plan import ROW_TILE, gains, plan
from custom_ops.hypercube.layout import CHIPS
from custom_ops.tpu_compiler import compile_jax, device_mesh

FP8 = "float8_e4m3fn"
simulate = functools.partial(simulation.simulate, "simulated_all_gather.py")


def case(chips, rows, columns, dtype=FP8, pieces=None, fault=None) -> dict:
    return {"chips": chips, "rows": rows, "columns": columns, "dtype": dtype, "pieces": pieces, "fault": fault}


EIGHT_DEVICES = {
    "a row a device, 4096 and its digits": case(4, 1, 4096 + 128),
    "BF16, 3072 and its digits": case(4, 2, 3072 + 60, "bfloat16"),
    "2048 and its digits": case(4, 8, 2048 + 128),
    "bytes": case(4, 8, 512, "int8"),
    "an uneven end": case(4, 3, 1000),
    "one tile, one stream": case(4, 5, 100),
    "three uneven pieces": case(4, 17, 384, pieces=3),
    "two chips": case(2, 4, 512, pieces=2),
    "one chip": case(1, 4, 512, pieces=2),
}
SIXTEEN_DEVICES = {
    "a row a device, 4096 and its digits": case(8, 1, 4096 + 128),
    "two pieces, 1000": case(8, 4, 1000, pieces=2),
}
FAULTY = {
    fault: case(4, 4, 512, pieces=2, fault=fault) for fault in ("sent on before it has arrived", "one place for both cores")
}
ON_EIGHT_DEVICES = EIGHT_DEVICES | FAULTY
"""In one process."""
LARGE = {
    f"{2 * chips * rows} rows of {columns} on {2 * chips} devices": case(chips, rows, columns)
    for chips, rows, columns in ((4, 128, 4224), (4, 512, 4224), (4, 125, 3200), (8, 64, 2176), (8, 256, 1000))
}


def assert_right(result: dict) -> None:
    assert result["equals all_gather"] and result["equals reference"] and not result["race"]


@pytest.mark.parametrize("name", EIGHT_DEVICES)
def test_eight_devices(name):
    assert_right(simulate(ON_EIGHT_DEVICES, name))


@pytest.mark.parametrize("name", SIXTEEN_DEVICES)
def test_sixteen_devices(name):
    assert_right(simulate(SIXTEEN_DEVICES, name))


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_many_rows(name):
    assert_right(simulate({name: LARGE[name]}, name))


@pytest.mark.parametrize("fault", FAULTY)
def test_a_race_would_be_seen(fault):
    assert simulate(ON_EIGHT_DEVICES, fault)["race"]


# Plans, the choice of implementation, the model of time.


@pytest.mark.parametrize("chips", CHIPS)
@pytest.mark.parametrize("rows", [1, 17, 32, 125, 512, 4099])
def test_pieces_and_streams_cover_everything_once(chips, rows):
    for columns in (100, 1000, 4156, 4224):
        cut = plan(AllGatherShape(chips, 2, rows, columns, FP8))
        for edges, end in ((cut.pieces, rows), (cut.streams, columns)):
            assert edges[0][0] == 0 and edges[-1][1] == end and all(first < last for first, last in edges)
            assert all(one[1] == other[0] for one, other in zip(edges, edges[1:], strict=False))
        assert all(first % ROW_TILE == 0 for first, _ in cut.pieces) and all(first % 128 == 0 for first, _ in cut.streams)


def of_tokens(tokens: int, chips: int = 4, cores: int = 2) -> AllGatherShape:
    return AllGatherShape(chips, cores, tokens // (chips * cores), 4224, FP8)


@pytest.mark.parametrize("tokens", [512, 2048, 8192])
def test_the_hierarchy_wins_and_no_link_carries_more_than_it_can(tokens):
    shape = of_tokens(tokens)
    _, between_chips = cost.wire_bytes(shape)
    least = 2 * between_chips / (shape.dimensions * cost.ICI)
    assert least < plan(shape).time < cost.xla_time(shape)


def test_of_many_rows_the_way_between_the_cores_is_hidden():
    shape = of_tokens(8192)
    _, between_chips = cost.wire_bytes(shape)
    assert plan(shape).time < 1.1 * 2 * between_chips / (shape.dimensions * cost.ICI)


@pytest.mark.parametrize("tokens, expected", [(8, False), (64, False), (512, True), (8192, True)])
def test_few_rows_are_left_to_xla_which_computes_beside_them(tokens, expected):
    assert gains(of_tokens(tokens)) == pallas_tpu.supports(of_tokens(tokens)) == expected


@pytest.mark.parametrize(
    "shape", [of_tokens(8192, 4, 1), of_tokens(8190, 3), of_tokens(8192, 128), of_tokens(0), of_tokens(64)]
)
def test_where_the_kernel_does_not_run_the_log_says_so_once(shape, caplog):
    pallas_tpu.supports.cache_clear()
    with caplog.at_level(logging.INFO):
        assert not pallas_tpu.supports(shape) and not pallas_tpu.supports(shape)
    assert len(caplog.records) == 1 and str(shape) in caplog.text


@pytest.mark.parametrize("dtype, published", [("bfloat16", 559e-6), (FP8, 283e-6)])
def test_the_model_of_xla_gives_the_published_times(dtype, published):
    assert cost.xla_time(AllGatherShape(4, 2, 1024, 4096, dtype)) == pytest.approx(published, rel=0.03)


def test_table_has_a_line_for_each_shape():
    lines = cost.table([of_tokens(64), of_tokens(8192)]).splitlines()
    assert [line.split()[0] for line in lines[-2:]] == ["64", "8,192"]


# The real compiler.


MESH = AbstractMesh((4, 2), ("chip", "core"))
SPEC = PartitionSpec(("chip", "core"))


def sharded(mesh, shape: AllGatherShape, **static):
    function = functools.partial(pallas_tpu.all_gather, shape=shape, **static)
    return jax.shard_map(function, mesh=mesh, in_specs=SPEC, out_specs=PartitionSpec(), check_vma=False)


@pytest.mark.parametrize(
    "rows, columns, dtype", [(1, 4224, FP8), (64, 4156, "bfloat16"), (1024, 4224, FP8), (17, 1000, "int8")]
)
def test_compiles_for_tpu7x(rows, columns, dtype):
    shape = AllGatherShape(4, 2, rows, columns, dtype)
    mesh = device_mesh(MESH)
    own = jax.ShapeDtypeStruct((8 * rows, columns), dtype, sharding=NamedSharding(mesh, SPEC))
    program = compile_jax(sharded(mesh, shape), own)
    assert "%all_gather" in program.as_text() and " all-gather(" not in program.as_text()
    # The result once more: a program's own result is a copy of what a kernel gave.
    assert program.memory_analysis().temp_size_in_bytes <= 1.1 * 8 * rows * 4224 * shape.itemsize


def test_is_lowered_without_a_tpu_as_default_device():
    """As the bridge lowers it, for devices that JAX never sees."""
    shape = AllGatherShape(4, 2, 32, 512, FP8)
    traced = jax.jit(sharded(MESH, shape)).trace(jax.ShapeDtypeStruct((8 * 32, 512), FP8))
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize(
    "rows, static, message",
    [(16, {}, "rows=16.*not.*rows=8"), (8, {"interpret": True}, "use the implementation 'xla'")],
    ids=["another shape", "Pallas' plain interpreter"],
)
def test_refusals(rows, static, message):
    with pytest.raises(ValueError, match=message):
        function = sharded(MESH, AllGatherShape(4, 2, 8, 256, "float32"), **static)
        jax.eval_shape(function, jax.ShapeDtypeStruct((8 * rows, 256), "float32"))


def test_a_mesh_that_the_kernel_does_not_take():
    function = sharded(AbstractMesh((4, 1), ("chip", "core")), AllGatherShape(4, 1, 8, 256, "float32"))
    with pytest.raises(ValueError, match="does not take.*2 cores a chip"):
        jax.eval_shape(function, jax.ShapeDtypeStruct((4 * 8, 256), "float32"))
