"""The Pallas kernels of paged attention: what they take, and compilation for Ironwood.

The tests of every implementation (`test_ragged_paged_attention.py`) run them in the interpreter.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from attention_cases import arguments, check
from graphs_for_tpu import compiled_graph

from custom_ops.implementations import supports
from custom_ops.ragged_paged_attention.pallas_layout import AttentionShape
from custom_ops.ragged_paged_attention.pallas_tpu import ragged_paged_attention
from custom_ops.tpu_compiler import compile_jax

OP = "ragged_paged_attention"
PUBLISHED = AttentionShape(32, 2, 256, 256, 8, 36, "bfloat16", "bfloat16")
FP8 = "float8_e4m3fn"


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({}, True),
        ({"page_dtype": FP8}, True),
        ({"page_size": 16}, True),
        ({"dtype": "float32", "page_dtype": "float32"}, True),
        ({"query_heads": 6, "heads": 1}, True),
        ({"dim": 64}, False),
        ({"page_size": 16, "page_dtype": FP8}, False),
        ({"page_size": 48}, False),
        ({"sequences": 64, "pages": 4096}, False),
    ],
    ids=str,
)
def test_what_the_kernels_take(change, taken):
    assert supports(OP, "pallas_tpu", dataclasses.replace(PUBLISHED, **change)) == taken


def test_narrow_heads_are_refused_with_their_sizes():
    query, key = jnp.zeros((8, 8, 64)), jnp.zeros((8, 2, 64))
    pages, integers = jnp.zeros((8, 4, 64, 64)), jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match="dim=64"):
        ragged_paged_attention(query, key, key, pages, *[integers] * 3, integers[:, None], scale=1)


@pytest.mark.parametrize("heads", [(6, 1), (3, 3), (32, 2)], ids=lambda heads: f"{heads[0]} query, {heads[1]} KV")
def test_ratios_of_heads(heads):
    """Three query heads a KV head and one are padded to eight rows of a product."""
    check("pallas_tpu", arguments([1, 40, 2], [30, 0, 63], heads=heads, tokens=64, capacity=128))


def compiled_for_ironwood(shape: AttentionShape, rows: int, *, decode: bool):
    def array(*size, dtype=shape.dtype):
        return jax.ShapeDtypeStruct(size, dtype)

    pool = (4 * shape.sequences * shape.pages, 2 * shape.heads, shape.page_size)
    args = [
        array(rows, shape.query_heads, shape.dim), *[array(rows, shape.heads, shape.dim)] * 2,
        array(*pool, shape.dim, dtype=shape.page_dtype), *[array(shape.sequences, dtype="int32")] * 3,
        array(shape.sequences, shape.pages, dtype="int32"),
    ]  # fmt: skip
    scaled = shape.page_dtype == FP8
    args += [array(*pool, dtype="float32")] * scaled
    donated = (3, 8)[: 1 + scaled]
    compiled = compile_jax(functools.partial(ragged_paged_attention, scale=1 / 16, decode=decode), *args, donated=donated)
    pools = sum(args[place].size * args[place].dtype.itemsize for place in donated)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= pools
    assert memory.temp_size_in_bytes < pools / 2  # no copy of the pages
    return compiled.as_text()


def test_decode_compiles_for_ironwood():
    text = compiled_for_ironwood(PUBLISHED, 8, decode=True)
    assert "attention_decode" in text and "attention_prefill" not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {}, {"page_dtype": FP8}, {"page_size": 16, "pages": 64}, {"query_heads": 16}, {"query_heads": 16, "heads": 1},
        {"query_heads": 6, "heads": 1}, {"dim": 128}, {"dtype": "float32", "page_dtype": "float32"}, {"sequences": 64},
    ],
    ids=str,
)  # fmt: skip
def test_all_kernels_compile_for_ironwood(change):
    text = compiled_for_ironwood(dataclasses.replace(PUBLISHED, **change), 128, decode=False)
    assert all(f"attention_{name}" in text for name in ("decode", "write", "prefill"))


@pytest.mark.spmd
@pytest.mark.slow
@pytest.mark.parametrize("step", ["decode", "decode, FP8", "prefill", "prefill, FP8"])
def test_pages_are_updated_in_place_on_eight_cores(step):
    graph = compiled_graph(f"attention, {step}")
    kernels = {name.split(".")[0] for name in graph["kernels"]}
    assert "attention_decode" in kernels and ("attention_prefill" in kernels) == step.startswith("prefill")
    assert graph["aliased bytes"] >= graph["state bytes"]
    assert not any(graph["copies"])
