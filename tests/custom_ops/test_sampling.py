"""Sampling on the device: reproducible by seed and step alone, distributed as the softmax, cut as transformers cuts."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from custom_ops import sampling

ROWS, VOCABULARY = 8192, 12
ALL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


@functools.cache
def _sample(candidates: int):
    return jax.jit(functools.partial(sampling.sample, candidates=candidates))


def draw(logits, candidates: int = VOCABULARY, seeds=None, step=0, **settings) -> np.ndarray:
    """A token for every seed, all from the same logits [vocabulary] or each from its row of [rows, vocabulary]."""
    seeds = np.arange(ROWS, dtype=np.int32) if seeds is None else np.array(seeds, np.int32)
    settings = {**ALL, **settings}

    def column(value, dtype):
        return np.broadcast_to(np.asarray(value, dtype), len(seeds))

    floats = {name: column(settings[name], np.float32) for name in ("temperature", "top_p", "min_p")}
    logits = np.broadcast_to(np.asarray(logits, np.float32), (len(seeds), np.shape(logits)[-1]))
    steps, top_k = column(step, np.int32), column(settings["top_k"], np.int32)
    return np.asarray(
        _sample(candidates)(logits, seeds, steps, floats["temperature"], top_k, floats["top_p"], floats["min_p"])
    )


def kept_by_transformers(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> set[int]:
    """Tokens that survive transformers' warpers, in the order in which generate() applies them."""
    warpers = [transformers.TemperatureLogitsWarper(temperature)]
    if top_k:
        warpers.append(transformers.TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(transformers.TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(transformers.MinPLogitsWarper(min_p))
    scores = torch.tensor(logits)[None]
    for warper in warpers:
        scores = warper(None, scores)
    return set(torch.isfinite(scores[0]).nonzero()[:, 0].tolist())


def test_choice_depends_on_seed_and_step_alone():
    """Not on the row, the number of rows, or what else is in the batch."""
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((8, 50)).astype(np.float32)
    seed, step = np.arange(8, dtype=np.int32) * 7, np.arange(8, dtype=np.int32) % 3
    together = np.asarray(sampling.choose(scores, seed, step))
    order = rng.permutation(8)
    np.testing.assert_array_equal(sampling.choose(scores[order], seed[order], step[order]), together[order])
    for row in range(8):
        assert sampling.choose(scores[row : row + 1], seed[row : row + 1], step[row : row + 1])[0] == together[row]


def test_seeds_and_steps_give_different_tokens():
    flat = np.zeros(1000)
    by_seed = draw(flat, 1000, seeds=range(64))
    by_step = draw(flat, 1000, seeds=[5] * 64, step=np.arange(64))
    assert len(set(by_seed)) > 50 and len(set(by_step)) > 50
    assert draw(flat, 1000, seeds=[5], step=9)[0] == by_step[9]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature):
    """A chi-square statistic of 11 degrees of freedom stays below 31 with a probability of 99.9 %."""
    logits = np.random.default_rng(1).standard_normal(VOCABULARY)
    counts = np.bincount(draw(logits, temperature=temperature), minlength=VOCABULARY)
    expected = ROWS * np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    assert np.sum((counts - expected) ** 2 / expected) < 31


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 1},
        {"top_k": 5},
        {"top_p": 0.7},
        {"top_p": 0.01},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"temperature": 2.0, "top_k": 8, "top_p": 0.8},
        {"temperature": 1.5, "top_k": 9, "top_p": 0.9, "min_p": 0.1},
        {},
    ],
    ids=str,
)
@pytest.mark.parametrize("case", range(3))
def test_tokens_are_cut_as_transformers_cuts_them(settings, case):
    """So many draws that every token that is kept comes up: the rarest has a probability of 0.3 % at least."""
    logits = np.random.default_rng(case).uniform(-2, 2, VOCABULARY)
    assert set(draw(logits, **settings).tolist()) == kept_by_transformers(logits, **settings)


def test_top_k_keeps_ties_as_transformers_does():
    logits = np.array([1.0, 2.0, 1.0, 0.0, 1.0] + [-1.0] * 7)
    assert set(draw(logits, top_k=2).tolist()) == kept_by_transformers(logits, top_k=2) == {0, 1, 2, 4}


def test_candidates_only_bound_top_k():
    """Any number of candidates from top_k on gives the same tokens; top_k = 0 takes all tokens as candidates."""
    logits = np.random.default_rng(2).standard_normal(VOCABULARY)
    settings = {"top_k": 4, "top_p": 0.9, "min_p": 0.05}
    np.testing.assert_array_equal(draw(logits, 4, **settings), draw(logits, VOCABULARY, **settings))
    assert set(draw(logits, VOCABULARY, top_k=0).tolist()) == set(range(VOCABULARY))


def test_rows_have_their_own_settings():
    logits = np.random.default_rng(3).standard_normal(VOCABULARY)
    seeds = np.arange(4).repeat(100)
    kinds = {"top_k": [1, 0, 3, 2], "temperature": [1, 2, 0.5, 1], "top_p": [1, 0.5, 1, 0.5]}
    together = draw(logits, seeds=seeds, **{name: values * 100 for name, values in kinds.items()})
    for kind in range(4):
        alone = draw(logits, seeds=seeds, **{name: values[kind] for name, values in kinds.items()})
        np.testing.assert_array_equal(together[kind::4], alone[kind::4])


def test_masked_tokens_are_never_chosen():
    logits = np.zeros(VOCABULARY)
    logits[[2, 7]] = -np.inf
    assert set(draw(logits).tolist()) == set(range(VOCABULARY)) - {2, 7}


def test_bfloat16_logits():
    logits = jnp.asarray(np.random.default_rng(4).standard_normal((64, VOCABULARY)), jnp.bfloat16)
    seeds = np.arange(64, dtype=np.int32)
    ones = np.ones(64, np.float32)
    tokens = _sample(VOCABULARY)(logits, seeds, seeds * 0, ones, seeds * 0, ones, ones * 0)
    np.testing.assert_array_equal(tokens, draw(np.asarray(logits, np.float32), seeds=seeds))


@pytest.mark.parametrize("vocabulary", [12, 32, 70])
def test_penalties_are_transformers(vocabulary):
    """Rows of different histories, penalties and shortest lengths; one without any stays as it is, bit for bit."""
    rng = np.random.default_rng(vocabulary)
    logits = rng.standard_normal((4, vocabulary)).astype(np.float32)
    history = [rng.integers(0, vocabulary, size) for size in (1, 5, 40, 9)]
    history[0][0] = vocabulary - 1
    penalty = np.array([1.5, 0.7, 2.0, 1.0], np.float32)
    least, generated = np.array([[0, 3, 9, 0], [0, 3, 8, 5]], np.int32)
    eos = np.array([[3, -1], [4, 5], [6, vocabulary - 1], [7, -1]], np.int32)
    seen = np.zeros((4, -(-vocabulary // 32)), np.int32)
    for row, tokens in enumerate(history):  # one after the other, as a decode step adds them
        for token in tokens:
            chosen = np.arange(4) == row
            seen = sampling.mark(jnp.asarray(seen), jnp.full(4, token, jnp.int32), jnp.asarray(chosen))
    own = np.asarray(sampling.penalize(logits, seen, penalty.view(np.int32), least, generated, eos))
    for row, tokens in enumerate(history):
        want = transformers.RepetitionPenaltyLogitsProcessor(float(penalty[row]))(
            torch.tensor(tokens)[None], torch.tensor(logits[row : row + 1])
        )[0]
        if generated[row] < least[row]:
            want[[token for token in eos[row] if token >= 0]] = -torch.inf
        np.testing.assert_allclose(own[row], want.numpy(), rtol=1e-6)
    np.testing.assert_array_equal(own[3], logits[3])
