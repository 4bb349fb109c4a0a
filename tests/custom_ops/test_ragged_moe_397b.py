"""The experts of 397B (hidden 4096, width 1024, top-10; 16 of its 512), each wire against rows that are not rounded, and the
same weights."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from custom_ops.ragged_moe import reference, xla
from custom_ops.ragged_moe.routing import route
from custom_ops.ragged_moe.wire import Tokens, from_wire, pack, to_wire, unpack

OP = "ragged_moe"
HIDDEN, WIDTH, EXPERTS, ALL_EXPERTS, TOP_K = 4096, 1024, 16, 512, 10
COMPARED = 32
"""Tokens of a long step that the reference computes."""
BOUNDS = {"bfloat16": 4e-3, "int8": 1.2e-2, "float8_e4m3fn": 4e-2}
LOADS = ("uniform", "skewed", "ten experts", "experts without tokens")


@pytest.fixture(scope="module")
def weights():
    """By wire, what comes after `valid`: weights in BF16, or in FP8 with a scale for each output channel."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(size, np.float32) for size in ((EXPERTS, 2 * WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH))]
    scales = [np.abs(array).max(axis=2) / 448 for array in arrays]
    fp8 = [jnp.asarray(array / scale[..., None], jnp.float8_e4m3fn) for array, scale in zip(arrays, scales, strict=True)]
    bfloat16 = [jnp.asarray(array, jnp.bfloat16) for array in arrays]
    return {"bfloat16": bfloat16} | dict.fromkeys(("int8", "float8_e4m3fn"), [*fp8, *scales])


def logits_of(load: str, tokens: int) -> np.ndarray:
    logits = np.random.default_rng(1).standard_normal((tokens, EXPERTS)).astype(np.float32)
    if load == "skewed":
        logits += np.linspace(4, 0, EXPERTS, dtype=np.float32)
    elif load == "ten experts":
        logits[:, 3 : 3 + TOP_K] += 50
    elif load == "experts without tokens":
        logits[:, ::4] = -50
    return logits


def check(compiled, relative_error, weights, wire: str, tokens: int, load: str) -> None:
    """Over eight tokens at least, of as many steps as they take: what e4m3 does to one token varies around 3.8e-2."""
    many = max(tokens, 8)
    hidden, logits = rows_of(many), logits_of(load, many)
    parts = [slice(first, first + tokens) for first in range(0, many, tokens)]
    run = compiled(OP, "xla", top_k=TOP_K, wire=wire)
    result = jnp.concatenate([run(hidden[part], logits[part], np.ones(tokens, bool), *weights[wire]) for part in parts])
    expected = compiled(OP, "reference", top_k=TOP_K)(hidden.astype(jnp.float32), logits, np.ones(many, bool), *weights[wire])
    assert relative_error(result, expected) <= BOUNDS[wire]


def rows_of(tokens: int):
    return jnp.asarray(np.random.default_rng(2).standard_normal((tokens, HIDDEN)), jnp.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("wire", BOUNDS)
@pytest.mark.parametrize("tokens, load", [(1, "uniform"), (8, "skewed"), *((64, load) for load in LOADS)])
def test_steps_of_decode(compiled, relative_error, weights, wire, tokens, load):
    """All of a token's ten experts are here."""
    check(compiled, relative_error, weights, wire, tokens, load)


@pytest.mark.slow
@pytest.mark.parametrize("wire", BOUNDS)
@pytest.mark.parametrize("tokens, load", [(1000, "skewed"), (8192, "uniform")])
def test_steps_of_prefill(relative_error, weights, wire, tokens, load):
    """As a device sees them that has the first 16 of the 512 experts: tokens that come over the wire, most of them for other
    devices. The reference computes some of the others: no token depends on another."""
    hidden, logits = rows_of(tokens), np.random.default_rng(1).standard_normal((tokens, ALL_EXPERTS)).astype(np.float32)
    if load == "skewed":
        logits[:, :EXPERTS] += np.linspace(3, 0, EXPERTS, dtype=np.float32)
    expert, weight = route(logits, jnp.ones(tokens, bool), top_k=TOP_K)
    travelled = pack(Tokens(*to_wire(hidden, jnp.dtype(wire)), expert, weight))
    rows, scale, expert, weight = unpack(travelled, hidden=HIDDEN, top_k=TOP_K)
    rows, scale = from_wire(rows[:, :HIDDEN], scale, hidden.dtype)
    local = jnp.minimum(expert, EXPERTS)
    result = jax.jit(functools.partial(xla.experts, num_experts=ALL_EXPERTS))(
        rows, local, weight, *weights[wire], row_scale=scale
    )
    here = (np.asarray(local) < EXPERTS).any(1)
    assert here.any() and not here.all() and not np.asarray(result)[~here].any()
    some = np.flatnonzero(here)[:: max(here.sum() // COMPARED, 1)]
    expected = jax.jit(functools.partial(reference.experts, num_experts=ALL_EXPERTS))(
        hidden[some].astype(jnp.float32), local[some], weight[some], *weights[wire]
    )
    assert relative_error(result[some], expected) <= BOUNDS[wire]
