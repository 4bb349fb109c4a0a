"""Hierarchical reduce-scatter: index algebra, plans and model here, the kernel in simulated TPUs, and compiled for TPU7x."""

from __future__ import annotations

import functools
import logging

import jax
import numpy as np
import pytest
import simulation
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from custom_ops.hypercube import layout
from custom_ops.hypercube.layout import CHIPS
from custom_ops.reduce_scatter import ReduceScatterShape, cost, pallas_tpu
from custom_ops.reduce_scatter.plan import VMEM_BYTES, buffer_bytes, plan
from custom_ops.tpu_compiler import compile_jax, device_mesh

simulate = functools.partial(simulation.simulate, "simulated_reduce_scatter.py")


def case(chips, rows, hidden, dtype="float32", cut=None, values="integers", fault=None) -> dict:
    return {
        "chips": chips, "rows": rows, "hidden": hidden, "dtype": dtype, "cut": cut, "values": values, "fault": fault,
    }  # fmt: skip


EIGHT_DEVICES = {
    "a row a device, 4096": case(4, 8, 4096),
    "3072": case(4, 16, 3072),
    "2048": case(4, 64, 2048),
    "2056, padded columns": case(4, 8, 2056),
    "1000, a wider stream": case(4, 8, 1000),
    "one tile, an empty stream": case(4, 8, 100),
    "padded rows": case(4, 8 * 17, 256),
    "five micro-batches": case(4, 40, 256, cut=(1, 1)),
    "two calls": case(4, 16, 512, cut=(2, 2)),
    "BF16": case(4, 48, 256, "bfloat16", cut=(2, 1)),
    "two chips": case(2, 16, 512, cut=(1, 1)),
    "one chip": case(1, 8, 256, cut=(1, 1)),
}
SIXTEEN_DEVICES = {
    "a row a device, 4096": case(8, 16, 4096),
    "three micro-batches, 1000": case(8, 48, 1000, cut=(1, 1)),
}
ROUNDED = {
    "float32": case(4, 16, 256, "float32", values="normal"),
    "bfloat16": case(4, 16, 256, "bfloat16", values="normal"),
}
FAULTY = {
    "one region for all steps": case(4, 8, 256, fault="one region for all steps"),
    "one buffer for both phases": case(4, 8, 256, fault="one buffer for both phases"),
    "no credits": case(4, 24, 256, cut=(1, 1), fault="no credits"),
}
ON_EIGHT_DEVICES = EIGHT_DEVICES | ROUNDED | FAULTY
"""In one process."""
LARGE = {
    f"{rows} rows of {hidden} on {2 * chips} devices": case(chips, rows, hidden)
    for chips, rows, hidden in ((4, 1024, 4096), (4, 4096, 4096), (4, 1024, 3072), (4, 2048, 1000), (8, 512, 2048))
}


def assert_right(result: dict) -> None:
    assert result["equals psum_scatter"] and result["equals reference"]
    assert result["calls"] and not result["race"]


@pytest.mark.parametrize("name", EIGHT_DEVICES)
def test_eight_devices(name):
    assert_right(simulate(ON_EIGHT_DEVICES, name))


def test_blocks_of_columns_are_calls():
    assert simulate(ON_EIGHT_DEVICES, "two calls")["calls"] == 2


@pytest.mark.parametrize("name", SIXTEEN_DEVICES)
def test_sixteen_devices(name):
    assert_right(simulate(SIXTEEN_DEVICES, name))


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_many_rows(name):
    assert_right(simulate({name: LARGE[name]}, name))


@pytest.mark.parametrize("dtype, bound", [("float32", 1e-6), ("bfloat16", 2**-8)])
def test_rounding(dtype, bound):
    """FP32 throughout; in BF16 a sum is rounded twice on its way over four chips, and once at the end."""
    result = simulate(ON_EIGHT_DEVICES, dtype)
    assert result["error"] <= bound and not result["race"]


@pytest.mark.parametrize("fault", FAULTY)
def test_a_race_would_be_seen(fault):
    assert simulate(ON_EIGHT_DEVICES, fault)["race"]


# Index algebra, without devices.


@pytest.mark.parametrize("chips", CHIPS)
@pytest.mark.parametrize("hidden", [128, 1024, 4096, 2176])
def test_streams_cover_all_columns_evenly(chips, hidden):
    edges = layout.streams(0, hidden, chips.bit_length() - 1)
    assert edges[0][0] == 0 and edges[-1][1] == hidden
    assert all(one[1] == other[0] for one, other in zip(edges, edges[1:], strict=False))
    widths = [last - first for first, last in edges]
    assert max(widths) - min(widths) <= 128 and all(width % 128 == 0 for width in widths)


@pytest.mark.parametrize("chips", CHIPS[1:])
def test_streams_of_a_step_cross_distinct_dimensions(chips):
    steps = chips.bit_length() - 1
    for step in range(steps):
        assert len({layout.crossed_dimension(stream, step, steps) for stream in range(steps)}) == steps


@pytest.mark.parametrize("chips", CHIPS[1:])
def test_regions_of_steps_do_not_meet(chips):
    regions = [layout.step_slabs(step, chips) for step in range(chips.bit_length() - 1)]
    slabs = [slab for first, count in regions for slab in range(first, first + count)]
    assert slabs == list(range(chips - 1))


@pytest.mark.parametrize("chips", CHIPS)
def test_halving_gives_each_chip_the_sum_of_its_own_slab(chips):
    """The algorithm on numbers: terms[c, t] is chip c's for chip t."""
    steps = chips.bit_length() - 1
    terms = np.random.default_rng(0).integers(0, 1000, (chips, chips))
    for stream in range(max(steps, 1)):
        order = [layout.relative_chip(slab, stream, steps) for slab in range(chips)]
        assert sorted(order) == list(range(chips))
        left = np.stack([terms[chip, chip ^ np.array(order)] for chip in range(chips)])
        for step in range(steps):
            _, half = layout.step_slabs(step, chips)
            neighbour = np.arange(chips) ^ (1 << layout.crossed_dimension(stream, step, steps))
            left = left[:, :half] + left[neighbour, half:]
        np.testing.assert_array_equal(left[:, 0], terms.sum(axis=0))


# Plans, the choice of implementation, the model of time.


@pytest.mark.parametrize("chips", CHIPS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("hidden", [1000, 2048, 3072, 4096])
def test_all_numbers_of_rows_have_a_plan_that_fits(chips, dtype, hidden):
    for rows in (1, 2, 3, 8, 16, 17, 100, 256, 509, 512):
        shape = ReduceScatterShape(chips, 2, 2 * chips * rows, hidden, dtype)
        cut = plan(shape)
        assert buffer_bytes(shape, cut) <= VMEM_BYTES and pallas_tpu.supports(shape)
        assert rows <= cut.padded_rows < rows + 16 and hidden <= cut.padded_hidden < hidden + 128


def test_more_rows_are_cut_into_more_micro_batches():
    counts = [plan(ReduceScatterShape(4, 2, rows, 4096, "bfloat16")).micro_batches for rows in (8, 64, 512, 2048, 8192)]
    assert counts == sorted(counts) and counts[1] == 1 and counts[-1] >= 8


@pytest.mark.parametrize(
    "shape",
    [
        ReduceScatterShape(4, 1, 64, 256, "float32"),
        ReduceScatterShape(3, 2, 66, 256, "float32"),
        ReduceScatterShape(128, 2, 256, 256, "float32"),
        ReduceScatterShape(4, 2, 64, 256, "float16"),
        ReduceScatterShape(4, 2, 0, 256, "float32"),
    ],
)
def test_where_the_kernel_does_not_apply_the_log_says_so_once(shape, caplog):
    pallas_tpu.supports.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert not pallas_tpu.supports(shape) and not pallas_tpu.supports(shape)
    assert len(caplog.records) == 1 and str(shape) in caplog.text


def test_rows_have_to_divide():
    with pytest.raises(ValueError, match="12 rows.*4 chips × 2 cores"):
        ReduceScatterShape(4, 2, 12, 256, "float32")


@pytest.mark.parametrize("dtype, published", [("bfloat16", 559e-6), ("float8_e4m3fn", 283e-6)])
def test_the_model_of_xla_gives_the_published_times(dtype, published):
    assert cost.xla_time(ReduceScatterShape(4, 2, 8192, 4096, dtype)) == pytest.approx(published, rel=0.03)


@pytest.mark.parametrize("rows", [64, 512, 2048, 8192])
def test_the_hierarchy_wins_and_no_link_carries_more_than_it_can(rows):
    shape = ReduceScatterShape(4, 2, rows, 4096, "bfloat16")
    _, between_chips = cost.wire_bytes(shape)
    least = 2 * between_chips / (shape.dimensions * cost.ICI)
    assert least < plan(shape).time < cost.xla_time(shape)


def test_table_has_a_line_for_each_shape():
    shapes = [ReduceScatterShape(4, 2, rows, 4096, "bfloat16") for rows in (64, 8192)]
    assert [line.split()[0] for line in cost.table(shapes).splitlines()[-2:]] == ["64", "8,192"]


# The real compiler.


MESH = AbstractMesh((4, 2), ("chip", "core"))
SPEC = PartitionSpec(("chip", "core"))


def sharded(mesh, shape: ReduceScatterShape):
    function = functools.partial(pallas_tpu.reduce_scatter, shape=shape)
    return jax.shard_map(function, mesh=mesh, in_specs=SPEC, out_specs=SPEC, check_vma=False)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows, hidden", [(8, 4096), (64, 4096), (8192, 4096), (136, 1000)])
def test_compiles_for_tpu7x(rows, hidden, dtype):
    shape = ReduceScatterShape(4, 2, rows, hidden, dtype)
    mesh = device_mesh(MESH)
    all_terms = jax.ShapeDtypeStruct((8 * rows, hidden), dtype, sharding=NamedSharding(mesh, SPEC))
    program = compile_jax(sharded(mesh, shape), all_terms)
    assert "%reduce_scatter" in program.as_text() and "reduce-scatter" not in program.as_text()
    result = shape.rows_per_device * hidden * shape.itemsize
    terms = rows * hidden * shape.itemsize
    # A copy of the result, and of the terms where rows or columns do not fill tiles.
    assert program.memory_analysis().temp_size_in_bytes <= result + (2 * terms if rows == 136 or rows == 8 else 0)


def test_is_lowered_without_a_tpu_as_default_device():
    """As the bridge lowers it, for devices that JAX never sees."""
    shape = ReduceScatterShape(4, 2, 256, 512, "bfloat16")
    traced = jax.jit(sharded(MESH, shape)).trace(jax.ShapeDtypeStruct((8 * 256, 512), "bfloat16"))
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()


def test_a_shape_that_is_not_that_of_the_terms():
    function = sharded(MESH, ReduceScatterShape(4, 2, 64, 256, "float32"))
    with pytest.raises(ValueError, match="rows=32.*not.*rows=64"):
        jax.eval_shape(function, jax.ShapeDtypeStruct((8 * 32, 256), "float32"))


def test_pallas_plain_interpreter_is_refused():
    function = functools.partial(pallas_tpu.reduce_scatter, shape=ReduceScatterShape(4, 2, 64, 256, "float32"), interpret=True)
    mapped = jax.shard_map(function, mesh=MESH, in_specs=SPEC, out_specs=SPEC, check_vma=False)
    with pytest.raises(ValueError, match="use the implementation 'xla'"):
        jax.eval_shape(mapped, jax.ShapeDtypeStruct((8 * 64, 256), "float32"))
