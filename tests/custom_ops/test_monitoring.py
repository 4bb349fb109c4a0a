"""Statistics of a layer, each against what it says it is, computed plainly."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from custom_ops import monitoring
from custom_ops.monitoring.attention import ROWS
from custom_ops.monitoring.sample import sample_sequences
from custom_ops.ragged_moe.routing import _is_among_largest, _is_among_top
from custom_ops.ragged_paged_attention.pages import write

PAGE, HEADS, GROUP, DIM = 16, 2, 3, 8


def named(names, row) -> dict[str, float]:
    return dict(zip(names, np.asarray(row)[0].tolist(), strict=False))


@pytest.mark.parametrize(("present", "count"), [([1, 1, 1], 3), ([0, 1, 0], 1), ([0, 0, 0], 0)])
def test_few_sequences_are_all_chosen(present, count):
    sequence, turn, _ = jax.jit(sample_sequences, static_argnums=2)(jnp.array(present) * 5, jnp.array([7, 0, 9]), 8)
    assert len(set(sequence[turn == 0].tolist()) & set(np.flatnonzero(present))) == count


def test_many_sequences_take_turns():
    seen = set()
    for context in range(0, 8 * 200, 8):  # as a launch of eight decode steps advances them
        sequence, _, _ = sample_sequences(jnp.ones(64, int), jnp.full(64, context), 4)
        seen |= set(sequence.tolist())
    assert seen == set(range(64))


@pytest.mark.parametrize("context", [1, 37])
def test_attention_of_one_sequence_is_exact(context):
    """Eight rows of a sequence that fits the sampled keys, rows of no sequence before and after it."""
    rng = np.random.default_rng(context)
    tokens, length, first = 40, 32, 5
    query = jnp.asarray(3 * rng.standard_normal((tokens, HEADS * GROUP, DIM)), jnp.float32)
    history = jnp.asarray(rng.standard_normal((2, 128, HEADS, DIM)), jnp.float32)
    sequences = [jnp.array([first, 0]), jnp.array([length, 0]), jnp.array([context, 0])]
    table = jnp.array([[7, 2, 5, 1, 0], [3, 4, 6, 8, 9]])
    pages = jnp.full((10, 2 * HEADS, PAGE, DIM), jnp.nan)
    before = [jnp.array([number]) for number in (0, context, 0)]
    pages, _ = write(pages, history[0, :context], history[1, :context], *before, table[:1])
    key = jnp.zeros((tokens, HEADS, DIM)).at[first : first + length].set(history[0, context : context + length])
    pages, _ = write(pages, key, key, *sequences, table)
    valid = (jnp.arange(tokens) >= first) & (jnp.arange(tokens) < first + length)
    row = jax.jit(monitoring.attention_statistics, static_argnames="scale")(
        query, key, jnp.stack([jnp.full_like(pages, jnp.nan), pages]), valid, *sequences, table, 1, scale=0.5
    )
    found = named(monitoring.ATTENTION, row)

    keys = np.concatenate([history[0, :context], history[0, context : context + length]])
    rows = [place for place in (length - 1 - length * turn // ROWS for turn in range(ROWS)) if context + place + 1 >= 16]
    logits, entropies, saturated = [], [], 0
    for place in rows:
        own = np.asarray(query[first + place]).reshape(HEADS, GROUP, DIM)
        scores = 0.5 * np.einsum("hgd,lhd->hgl", own, keys[: context + place + 1])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        logits.append(scores.ravel())
        entropies.append(-(weights * np.log(np.maximum(weights, 1e-30))).sum())
        saturated += int((weights.max(-1) > 0.999).sum())
    logits = np.concatenate(logits)
    assert found["heads"] == len(rows) * HEADS * GROUP and found["saturated"] == saturated
    np.testing.assert_allclose([found["logit_min"], found["logit_max"]], [logits.min(), logits.max()], rtol=1e-5)
    np.testing.assert_allclose(found["entropy"], sum(entropies), rtol=1e-4)
    assert found["logit_bound"] >= 0.5 * np.abs(np.einsum("thgd,lhd->tlhg", np.asarray(query[5:37]).reshape(
        32, HEADS, GROUP, DIM), np.asarray(key[5:37]))).max()  # fmt: skip


def test_states_and_gates():
    rng = np.random.default_rng(0)
    b, a = (jnp.asarray(rng.standard_normal((6, 4)), jnp.float32) for _ in range(2))
    A_log, dt_bias = (jnp.asarray(rng.standard_normal(4), jnp.float32) for _ in range(2))
    state = jnp.asarray(rng.standard_normal((5, 4, 8, 8)), jnp.bfloat16)
    valid = jnp.array([1, 1, 0, 1, 1, 0], bool)
    length, context, slot = jnp.array([2, 0, 2]), jnp.array([10, 20, 0]), jnp.array([4, 1, 0])
    pool = jnp.stack([state, jnp.full_like(state, 1e6)])  # of two layers
    row = monitoring.gated_delta_net_statistics(b, a, A_log, dt_bias, pool, valid, length, context, slot, 0)
    found = named(monitoring.GATES, row)
    beta = jax.nn.sigmoid(b[valid])
    decay = jnp.exp(-jnp.exp(A_log) * jax.nn.softplus(a[valid] + dt_bias))
    expected = [beta.min(), beta.max(), decay.min(), decay.max()]
    np.testing.assert_allclose([found[name] for name in monitoring.GATES], expected, rtol=1e-5)
    samples = np.asarray(row)[0, 4:].reshape(-1, 3)
    samples = {int(one[0]): one[1:] for one in samples if one[1] > 0}
    assert sorted(samples) == [0, 2]
    for sequence, position in ((0, 12), (2, 2)):
        own = np.asarray(state[slot[sequence]], np.float32)
        np.testing.assert_allclose(samples[sequence], [position, np.sqrt((own**2).sum((1, 2)).max())], rtol=1e-5)


def test_routing():
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.standard_normal((7, 5)), jnp.float32)
    rows = jnp.asarray(rng.standard_normal((7, 16)), jnp.float32).at[0, 3].set(1e-7)
    valid = jnp.array([1, 1, 1, 0, 1, 1, 0], bool)
    broken = jnp.array([2, 1, 2, 1, 2, 0, 2], jnp.int8)
    experts = np.argsort(-np.asarray(logits), axis=1)[:, :2]
    found = monitoring.routing_statistics(rows, logits, valid, broken, top_k=2)
    columns, counts = named(monitoring.ROUTING, found), np.asarray(found)[0, len(monitoring.ROUTING) :].reshape(2, 5)
    np.testing.assert_array_equal(counts[0], np.bincount(experts[np.asarray(valid)].ravel(), minlength=5))
    np.testing.assert_array_equal(counts[1], np.bincount(experts[1], minlength=5))
    probability = np.asarray(jax.nn.softmax(logits))
    entropy = -(probability * np.log(probability)).sum(1)[np.asarray(valid)]
    np.testing.assert_allclose([columns["entropy"], columns["entropy_min"]], [entropy.sum(), entropy.min()], rtol=1e-5)
    largest = np.abs(rows).max(1)[np.asarray(valid)]
    np.testing.assert_allclose([columns["largest_min"], columns["largest_max"]], [largest.min(), largest.max()])
    scale = np.abs(rows).max(1, keepdims=True) / 448
    rounded = np.asarray(jnp.asarray(rows / scale, jnp.float8_e4m3fn), np.float32)
    assert columns["flushed"] == (rounded == 0)[np.asarray(valid)].sum()


@pytest.mark.parametrize("step", [1e-9, 0.05, 0.5, 2.0])
def test_the_largest_on_a_tpu_are_those_of_top_k(step):
    """Also where many are equal."""
    rng = np.random.default_rng(2)
    share = jax.nn.softmax(jnp.asarray(step * np.round(rng.standard_normal((64, 40)) / step), jnp.float32), axis=-1)
    found, expected = (jax.jit(function, static_argnames="count")(share, count=10)
                       for function in (_is_among_largest, _is_among_top))  # fmt: skip
    np.testing.assert_array_equal(found, expected)


def test_where_values_stop_being_finite():
    """Only the first layer of each row counts, in the half in which it happens; rows of no sequence do not."""
    mixed, output = np.zeros((2, 3, 5, 4), np.float32)
    output[1, 3, 2], mixed[2, 3] = np.nan, np.nan  # row 3: after the MLP of layer 1, and then on
    mixed[2, 1, 0] = output[2, 1] = np.inf  # row 1: halfway through layer 2
    output[0, 4, 0] = np.nan  # row 4 is no token
    codes = jnp.stack([monitoring.finiteness(jnp.asarray(a), jnp.asarray(b)) for a, b in zip(mixed, output, strict=True)])
    found = np.asarray(monitoring.first_not_finite(codes, jnp.arange(5) < 4)).reshape(3, 4)
    np.testing.assert_array_equal(found, [[0, 0, 0, 0], [0, 0, 1, 3], [1, 1, 0, 0]])
