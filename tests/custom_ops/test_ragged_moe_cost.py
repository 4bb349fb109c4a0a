"""The model of time of the exchange: what it says of 397B, and how many micro-batches follow."""

from __future__ import annotations

import dataclasses

import pytest

from custom_ops.ragged_moe.cost import (
    MoeShape,
    all_gather_time,
    experts_bound,
    flat_all_gather_time,
    layer_time,
    micro_batches,
    pipelined_time,
    reduce_scatter_time,
    table,
    wire_bytes,
)

SHAPE = MoeShape(4, 2, 8192, 4096, 512, 10, 1024, "int8", "float8_e4m3fn")


def of(**sizes) -> MoeShape:
    return dataclasses.replace(SHAPE, **sizes)


def test_bytes_of_a_token():
    assert wire_bytes(SHAPE) == 4096 + 124
    assert wire_bytes(of(wire="float8_e4m3fn")) == 4096 + 128 and wire_bytes(of(wire="bfloat16")) == 2 * (4096 + 60)


@pytest.mark.parametrize("wire, published", [("bfloat16", 559e-6), ("int8", 283e-6), ("float8_e4m3fn", 283e-6)])
def test_the_all_gather_takes_what_was_published_and_its_routing(wire, published):
    rows = 4096 * (2 if wire == "bfloat16" else 1)
    assert flat_all_gather_time(of(wire=wire)) == pytest.approx(published * wire_bytes(of(wire=wire)) / rows, rel=0.03)


@pytest.mark.parametrize("tokens, ours", [(64, False), (512, True), (8192, True)])
def test_the_all_gather_is_the_faster_one(tokens, ours):
    assert (all_gather_time(of(tokens=tokens)) < flat_all_gather_time(of(tokens=tokens))) == ours


def test_other_meshes_have_xla_s():
    assert all_gather_time(of(cores=1, chips=8)) == flat_all_gather_time(of(cores=1, chips=8))


def test_few_tokens_read_few_experts():
    read = [experts_bound(of(tokens=tokens)) for tokens in (8, 64, 512, 4096)]
    assert read == sorted(read) and read[1] / read[2] == pytest.approx(367 / 512, rel=0.01)


def test_matrix_work_bounds_many_tokens():
    assert experts_bound(of(tokens=65536)) == pytest.approx(2 * experts_bound(of(tokens=32768)))
    by_wire = [experts_bound(of(tokens=65536, wire=wire)) for wire in ("bfloat16", "int8", "float8_e4m3fn")]
    assert by_wire == pytest.approx([65536 * 10 / 8 * 6 * 4096 * 1024 / 1.155e15] * 3)


WIDE = {"width": 4096}
"""Experts that compute for longer than their rows travel."""


@pytest.mark.parametrize("tokens, expected", [(8, 1), (64, 1), (1024, 1), (8192, 1), (16384, 2), (8 * 4096, 4)])
@pytest.mark.parametrize("wire", ["int8", "float8_e4m3fn"])
def test_micro_batches(tokens, expected, wire):
    """One while reading the experts again, or their rows' longer way, would cost more than what is hidden behind them."""
    assert micro_batches(of(tokens=tokens, wire=wire)) == expected


def test_micro_batches_divide_the_tokens_and_are_worth_it():
    shape = of(tokens=8 * 4099, **WIDE)  # a prime number of rows
    assert micro_batches(shape) == 1
    shape = of(tokens=8 * 4096, **WIDE)
    assert micro_batches(shape) > 1 and layer_time(shape, micro_batches(shape)) < layer_time(shape, 1)


def test_further_micro_batches_are_gathered_by_xla_behind_the_experts():
    part = of(tokens=4096)
    first, later, scatter = all_gather_time(part), flat_all_gather_time(part), reduce_scatter_time(part)
    assert pipelined_time(part, 2, later + 1e-6) == pytest.approx(first + 2 * (later + 1e-6 + scatter))
    assert pipelined_time(part, 2, 0.0) == pytest.approx(first + later + 2 * scatter)


def test_table_has_a_line_for_each_shape():
    assert [line.split()[0] for line in table([of(tokens=64), SHAPE]).splitlines()[-2:]] == ["64", "8,192"]
