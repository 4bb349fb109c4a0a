"""Mixture of experts: every implementation against the reference, whatever the experts' load."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from custom_ops.ragged_moe.routing import route

OP = "ragged_moe"
TAKE_ANY_SHAPE = ["xla"]
"""The Pallas kernel takes whole tiles and no FP32 weights: see test_ragged_moe_pallas.py."""
EXPERTS, HIDDEN, WIDTH = 16, 32, 8
FP32 = 1e-5


class Arguments(NamedTuple):
    """Arguments of the operation, in its order."""

    hidden: np.ndarray
    router_logits: np.ndarray
    valid: np.ndarray
    gate_up: np.ndarray
    down: np.ndarray


def logits_of(load: str, tokens: int, rng) -> np.ndarray:
    """Router logits that spread the tokens over the experts in one way or another."""
    logits = rng.standard_normal((tokens, EXPERTS)).astype(np.float32)
    if load == "skewed":
        logits += np.linspace(6, 0, EXPERTS, dtype=np.float32)
    elif load == "one expert":
        logits[:, 3] = 50
    elif load == "experts without tokens":
        logits[:, ::2] = -50
    elif load == "ties":
        logits = np.round(logits)
    return logits


def arguments(tokens: int, load: str = "uniform", invalid: float = 0.0) -> Arguments:
    rng = np.random.default_rng(0)

    def normal(*size):
        return rng.standard_normal(size).astype(np.float32)

    return Arguments(
        hidden=normal(tokens, HIDDEN),
        router_logits=logits_of(load, tokens, rng),
        valid=rng.uniform(size=tokens) >= invalid,
        gate_up=normal(EXPERTS, 2 * WIDTH, HIDDEN),
        down=normal(EXPERTS, HIDDEN, WIDTH),
    )


@pytest.fixture
def check(compiled, relative_error):
    """Asserts that an implementation agrees with the reference, and returns its result."""

    def checker(implementation: str, args: Arguments, bound=FP32, **static):
        result = compiled(OP, implementation, **static)(*args)
        expected = compiled(OP, "reference", **static)(*args)
        assert result.dtype == expected.dtype and result.shape == expected.shape
        assert relative_error(result, expected) <= bound
        return np.asarray(result)

    return checker


@pytest.mark.parametrize(("tokens", "top_k"), [(1, 1), (1, 5), (8, 5), (64, 5), (500, 1), (500, 5)])
@pytest.mark.parametrize("load", ["uniform", "skewed", "one expert", "experts without tokens", "ties"])
def test_load(implementation, check, tokens, top_k, load):
    result = check(implementation, arguments(tokens, load), top_k=top_k)
    assert np.abs(result).max(axis=1).all()  # every token got something from its experts


@pytest.mark.parametrize("tokens", [8, 500])
@pytest.mark.parametrize("invalid", [0.5, 1.0], ids=["half", "all"])
def test_rows_that_are_no_token_get_zero(implementation, check, tokens, invalid):
    args = arguments(tokens, invalid=invalid)
    result = check(implementation, args, top_k=5)
    assert not result[~args.valid].any() and np.abs(result[args.valid]).max(axis=1, initial=0).all()


def test_a_token_does_not_depend_on_its_neighbours(implementation, compiled, relative_error):
    args = arguments(64)
    whole = compiled(OP, implementation, top_k=5)(*args)
    alone = compiled(OP, implementation, top_k=5)(args.hidden[7:8], args.router_logits[7:8], args.valid[7:8], *args[3:])
    assert relative_error(whole[7:8], alone) <= FP32


@pytest.mark.parametrize("tokens", [8, 500])
@pytest.mark.parametrize("round_weights", [False, True])
def test_bfloat16(implementation, check, tokens, round_weights):
    """Products are FP32; what lies between two of them, and the result, may be rounded to BF16 (2⁻⁹ each)."""
    args = arguments(tokens)
    arrays = {name: jnp.asarray(getattr(args, name), jnp.bfloat16) for name in ("hidden", "gate_up", "down")}
    check(implementation, args._replace(**arrays), bound=8e-3, top_k=5, round_weights=round_weights)


def test_reference_is_the_sum_over_chosen_experts(compiled, relative_error):
    """The reference itself, against the definition written out in NumPy and float64."""
    args = Arguments(*(part if part.dtype == bool else part.astype(np.float64) for part in arguments(8)))
    expected = np.zeros((8, HIDDEN))
    for token in range(8):
        probability = np.exp(args.router_logits[token]) / np.exp(args.router_logits[token]).sum()
        chosen = np.argsort(-probability)[:5]
        for expert in chosen:
            gate, up = np.split(args.gate_up[expert] @ args.hidden[token], 2)
            activated = gate / (1 + np.exp(-gate)) * up
            expected[token] += probability[expert] / probability[chosen].sum() * (args.down[expert] @ activated)
    assert relative_error(compiled(OP, "reference", top_k=5)(*arguments(8)), expected) <= FP32


def test_routing_weights_sum_to_one_and_ties_go_to_the_first_experts():
    expert, weight = route(jnp.zeros((2, EXPERTS)), jnp.array([True, False]), top_k=3)
    np.testing.assert_array_equal(expert, [[0, 1, 2], [EXPERTS] * 3])
    np.testing.assert_allclose(weight, 1 / 3, rtol=1e-6)
