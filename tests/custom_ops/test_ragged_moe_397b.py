"""The experts of 397B (hidden 4096, width 1024, top-10; 16 of its 512), each wire against FP32 rows and the same weights."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

OP = "ragged_moe"
HIDDEN, WIDTH, EXPERTS, TOP_K = 4096, 1024, 16, 10
COMPARED = 32
"""Tokens that the reference computes: no token depends on another."""
BOUNDS = {"bfloat16": 4e-3, "float8_e4m3fn": 4e-2}
LOADS = ("uniform", "skewed", "ten experts", "experts without tokens")


@pytest.fixture(scope="module")
def weights():
    """Weights in the dtype of the wire, FP8 with a scale for each output channel: by wire, what comes after `valid`."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(size, np.float32) for size in ((EXPERTS, 2 * WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH))]
    scales = [np.abs(array).max(axis=2) / 448 for array in arrays]
    fp8 = [jnp.asarray(array / scale[..., None], jnp.float8_e4m3fn) for array, scale in zip(arrays, scales, strict=True)]
    return {"bfloat16": [jnp.asarray(array, jnp.bfloat16) for array in arrays], "float8_e4m3fn": [*fp8, *scales]}


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
    hidden = jnp.asarray(np.random.default_rng(2).standard_normal((tokens, HIDDEN)), jnp.bfloat16)
    inputs = (hidden, logits_of(load, tokens), np.ones(tokens, bool))
    result = compiled(OP, "xla", top_k=TOP_K, wire=wire)(*inputs, *weights[wire])
    some = np.linspace(0, tokens - 1, min(tokens, COMPARED)).astype(int)
    hidden, *rest = (part[some] for part in inputs)
    expected = compiled(OP, "reference", top_k=TOP_K)(hidden.astype(jnp.float32), *rest, *weights[wire])
    assert relative_error(result[some], expected) <= BOUNDS[wire]


@pytest.mark.long
@pytest.mark.parametrize("wire", BOUNDS)
@pytest.mark.parametrize("tokens, load", [(1, "uniform"), (8, "skewed"), *((64, load) for load in LOADS)])
def test_steps_of_decode(compiled, relative_error, weights, wire, tokens, load):
    check(compiled, relative_error, weights, wire, tokens, load)


@pytest.mark.long
@pytest.mark.parametrize("wire", BOUNDS)
@pytest.mark.parametrize("tokens, load", [(1000, "skewed"), (8192, "uniform")])
def test_steps_of_prefill(compiled, relative_error, weights, wire, tokens, load):
    check(compiled, relative_error, weights, wire, tokens, load)
