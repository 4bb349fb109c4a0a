"""Choosing the next token at random, the same whatever the batch, the layout and the number of devices.

The noise of a row depends on its seed and its step alone (a counter-based generator), and the choice is the largest of
score plus Gumbel noise, which has the distribution of the softmax of the scores.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def choose(scores, seed, step):
    """One token a row from the softmax of `scores`.

    Args:
        scores: [rows, vocabulary] float32, -inf where a token must not be chosen.
        seed, step: [rows] int32, the request's seed and the number of tokens it has generated.

    Returns: [rows] int32.
    """

    def noise(seed, step):
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), step), scores.shape[-1:])

    return jnp.argmax(scores + jax.vmap(noise)(seed, step), axis=-1).astype(jnp.int32)


def penalize(logits, seen, penalty, least, generated, eos):
    """Scores after transformers' repetition penalty and shortest length.

    Args:
        logits: [rows, vocabulary].
        seen: [rows, ceil(vocabulary / 32)] int32, a bit for each token that the sequence has: token v is bit v % 32 of word
            v // 32.
        penalty: [rows] int32, the bits of the float32 by which scores of such tokens are divided where they are positive
            and multiplied where they are not; 1 changes nothing.
        least: [rows] int32, tokens to generate before one of `eos` may come.
        generated: [rows] int32, tokens generated so far.
        eos: [rows, n] int32 stop tokens; -1 is none.

    Returns: [rows, vocabulary] float32.
    """
    logits = logits.astype(jnp.float32)
    rows, vocabulary = logits.shape
    penalty = lax.bitcast_convert_type(penalty, jnp.float32)[:, None]
    occurs = ((seen[:, :, None] >> jnp.arange(32)) & 1).reshape(rows, -1)[:, :vocabulary] > 0
    logits = jnp.where(occurs, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)
    early = jnp.where((generated < least)[:, None] & (eos >= 0), eos, vocabulary)
    return logits.at[jnp.arange(rows)[:, None], early].set(-jnp.inf, mode="drop")


def mark(seen, token, chosen):
    """`seen` of `penalize` with one token more in the rows that have `chosen` it; token: [rows] int32, chosen: [rows] bool."""
    place = (jnp.arange(len(token)), token // 32)
    return seen.at[place].set(seen[place] | jnp.where(chosen, jnp.left_shift(1, token % 32), 0))


def sample(logits, seed, step, temperature, top_k, top_p, min_p, *, candidates: int):
    """Temperature, top-k, top-p and min-p in transformers' order, then `choose`.

    Args:
        logits: [rows, vocabulary].
        seed, step: as for `choose`.
        temperature: [rows] float32; 0 takes the largest score, the first of several.
        top_k: [rows] int32, at most `candidates`; 0 for all.
        top_p: [rows] float32; 1 for all.
        min_p: [rows] float32; 0 for none.
        candidates: how many of the largest scores are sorted; the vocabulary where a row has no top_k.

    Returns: [rows] int32.
    """
    logits = logits.astype(jnp.float32)
    greedy = temperature == 0
    scores = logits / jnp.where(greedy, 1, temperature)[:, None]
    ranked = lax.top_k(scores, candidates)[0]
    last = jnp.where(top_k > 0, top_k, candidates) - 1
    ranked = jnp.where(jnp.arange(candidates) <= last[:, None], ranked, -jnp.inf)
    probability = jax.nn.softmax(ranked, axis=-1)
    above = jnp.cumsum(probability, axis=-1) - probability  # of all tokens ranked higher
    kept = (above < top_p[:, None]) | (jnp.arange(candidates) == 0)
    floor = jnp.min(jnp.where(kept & (ranked > -jnp.inf), ranked, jnp.inf), axis=-1)
    floor = jnp.maximum(floor, ranked[:, 0] + jnp.log(min_p))
    chosen = choose(jnp.where(scores >= floor[:, None], scores, -jnp.inf), seed, step)
    return jnp.where(greedy, jnp.argmax(logits, axis=-1).astype(jnp.int32), chosen)
