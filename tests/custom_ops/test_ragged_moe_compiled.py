"""One layer of 397B (hidden 4096, 512 experts of 1024, top-10, FP8 weights) compiled for eight cores of TPU7x."""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from graphs_for_tpu import compiled_graph
from jax.experimental import pallas as pl
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from custom_ops.implementations import implementation
from custom_ops.ragged_moe.layer import with_experts
from custom_ops.tpu_compiler import compile_jax, device_mesh

HIDDEN, EXPERTS, TOP_K, WIDTH = 4096, 512, 10, 1024
AXES = ("chip", "core")
COLUMNS = {
    "int8": HIDDEN + 4 * (TOP_K + TOP_K // 2 + HIDDEN // 128 // 2),
    "float8_e4m3fn": HIDDEN + 8 * (TOP_K + TOP_K // 2 + 1),
}
"""Bytes of a token by its wire: its row, and the words of its weights, its experts (two in a word) and its scales (int8: of
each 128 columns, two in a word); an int8 byte holds eight bits of a word, an FP8 byte four."""


def experts(rows, expert, weight, gate_up, down, gate_up_scale, down_scale, *, num_experts, row_scale=None):
    """A kernel that stands where the experts do: what is looked at here lies around it."""
    arrays = [rows, expert, weight, gate_up, down, gate_up_scale, down_scale, *([] if row_scale is None else [row_scale])]
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        lambda *refs: None,
        name="experts",
        in_specs=[anywhere] * len(arrays),
        out_specs=anywhere,
        out_shape=jax.ShapeDtypeStruct(rows.shape, jnp.bfloat16),
        # Without it XLA takes the kernel for too short to hide anything behind it.
        cost_estimate=pl.CostEstimate(flops=10**11, bytes_accessed=gate_up.size + down.size, transcendentals=0),
    )(*arrays)


@functools.cache
def compiled(
    tokens: int, micro_batches: int = 1, token_axes: tuple[str, ...] = AXES, real: bool = False, wire: str = "int8"
) -> jax.stages.Compiled:
    """real: with the kernels that the layer has on a TPU."""
    layer = functools.partial(
        implementation("ragged_moe", "tpu") if real else with_experts(experts), top_k=TOP_K, token_axes=token_axes,
        expert_axes=AXES, wire=wire, sum_dtype="bfloat16", micro_batches=micro_batches,
        all_gather=implementation("all_gather", "tpu"), reduce_scatter=implementation("reduce_scatter", "tpu"),
    )  # fmt: skip
    mesh = device_mesh(AbstractMesh((4, 2), AXES))
    rows, split = PartitionSpec(token_axes or None), PartitionSpec(AXES)
    specs = (rows,) * 3 + (split,) * 4
    shapes = [
        ((tokens, HIDDEN), "bfloat16"), ((tokens, EXPERTS), "float32"), ((tokens,), "bool"),
        ((EXPERTS, 2 * WIDTH, HIDDEN), "float8_e4m3fn"), ((EXPERTS, HIDDEN, WIDTH), "float8_e4m3fn"),
        ((EXPERTS, 2 * WIDTH), "float32"), ((EXPERTS, HIDDEN), "float32"),
    ]  # fmt: skip
    arguments = [
        jax.ShapeDtypeStruct(*shape, sharding=NamedSharding(mesh, spec)) for shape, spec in zip(shapes, specs, strict=True)
    ]
    return compile_jax(jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False), *arguments)


def schedule(hlo: str) -> list[str]:
    """Names of the entry computation's instructions, in their order."""
    return re.findall(r"^\s+(?:ROOT )?%(\S+) = ", hlo[hlo.index("\nENTRY ") :], re.MULTILINE)


def collectives(hlo: str) -> dict[str, int]:
    names = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
    found = {name: len(re.findall(rf" {name}(?:-start)?\(", hlo)) for name in names}
    for kernel in ("all_gather", "reduce_scatter"):
        found[f"kernel {kernel}"] = len([name for name in schedule(hlo) if name.startswith(kernel)])
    return {name: count for name, count in found.items() if count}


def check_collectives(hlo: str, tokens: int, packed: str):
    """One all-gather, of packed rows such as 's8[{},4220]', and one reduce-scatter."""
    gather, pattern, rows = {
        64: ("all-gather", r" = (\S+?)\{\S* all-gather\(", "64"),
        8192: ("kernel all_gather", r" %all_gather\S* = (\S+?)\{", "4,2,1024"),
    }[tokens]
    assert collectives(hlo) == {gather: 1, "kernel reduce_scatter": 1}
    assert re.findall(pattern, hlo) == [packed.format(rows)]


@pytest.mark.parametrize(
    ("tokens", "real"),
    [(64, False), (8192, False), (64, True), pytest.param(8192, True, marks=pytest.mark.slow)],
    ids=["64-around", "8192-around", "64-real", "8192-real"],
)
def test_one_all_gather_and_one_reduce_scatter(tokens, real):
    check_collectives(compiled(tokens, real=real).as_text(), tokens, f"s8[{{}},{COLUMNS['int8']}]")


@pytest.mark.parametrize("tokens", [64, pytest.param(8192, marks=pytest.mark.slow)])
def test_fp8_rows_travel_in_one_all_gather_too(tokens):
    program = compiled(tokens, real=True, wire="float8_e4m3fn")
    check_collectives(program.as_text(), tokens, f"f8e4m3fn[{{}},{COLUMNS['float8_e4m3fn']}]")
    assert program.memory_analysis().temp_size_in_bytes < 256 * 2**20


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["around", "real"])
def test_memory_and_no_dense_array(real):
    program = compiled(8192, real=real)
    assert program.memory_analysis().temp_size_in_bytes < 256 * 2**20
    shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"[a-z]\w*\[([\d,]+)\]", program.as_text())}
    weights = {(EXPERTS // 8, 2 * WIDTH, HIDDEN), (EXPERTS // 8, HIDDEN, WIDTH)}
    weights |= {(1, *shape) for shape in weights}  # as a stack of one layer
    assert max(map(math.prod, shapes - weights)) == 8192 * COLUMNS["int8"]


def test_cores_of_a_chip_that_share_tokens_gather_their_halves_from_each_other():
    hlo = compiled(8192, token_axes=("chip",)).as_text()
    assert collectives(hlo) == {"all-gather": 1, "kernel all_gather": 1, "kernel reduce_scatter": 1}
    assert re.findall(r" = (\S+?)\{\S* all-gather\(", hlo) == [f"bf16[2048,{HIDDEN}]"]
    assert re.findall(r" %all_gather\S* = (\S+?)\{", hlo) == [f"s8[4,2,1024,{COLUMNS['int8']}]"]


@pytest.mark.parametrize("wire", COLUMNS)
def test_a_micro_batch_travels_while_the_one_before_is_computed(wire):
    """The first all-gather is a kernel; the second starts after it, before the first experts, and is waited for after them."""
    program = compiled(8192, micro_batches=2, wire=wire)
    names = schedule(program.as_text())
    assert collectives(program.as_text()) == {"all-gather": 1, "kernel all_gather": 1, "kernel reduce_scatter": 2}
    first, second = [number for number, name in enumerate(names) if name.startswith("experts")]
    numbered = list(enumerate(names))
    started, done = (
        max(number for number, name in numbered if re.match(rf"all-gather.*-{what}", name)) for what in ("start", "done")
    )
    kernel = next(number for number, name in numbered if name.startswith("all_gather"))
    assert kernel < started < first < done < second
    assert program.memory_analysis().temp_size_in_bytes < 256 * 2**20


@pytest.mark.spmd
@pytest.mark.parametrize(
    "graph, gathered, gathers",
    [("experts", [f"s8[64,{COLUMNS['int8']}]"], 0), ("experts, prefill", [], 1)],
    ids=["64", "1,024"],
)
def test_the_operation_in_a_graph_of_torch_xla(graph, gathered, gathers):
    """With the wire and the collectives that the model takes by itself on a TPU."""
    graph = compiled_graph(graph)
    assert "ragged_moe" in graph["operations"]
    assert graph["gathered"] == gathered
    kernels = [name.rpartition(".")[0] or name for name in graph["kernels"]]
    assert (kernels.count("all_gather"), kernels.count("reduce_scatter")) == (gathers, 1)
