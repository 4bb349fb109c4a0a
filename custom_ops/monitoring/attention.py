"""Range and saturation of attention logits, which no kernel ever writes out."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from custom_ops.monitoring.sample import sample_sequences

ATTENTION = ("heads", "logit_min", "logit_max", "logit_bound", "saturated", "entropy")
"""Columns: how many pairs of a row and a head were sampled; smallest and largest of their logits; |q|·|k|·scale, the largest
for the tokens of the step; how many pairs put more than `SATURATED` of their weight on one key; the sum of their entropies in
nats."""
ROWS = 8
"""Rows of a step that are sampled."""
KEYS = 256
"""Keys that a sampled row is compared with, rounded up to whole pages (two at least)."""
SATURATED = 0.999
FEWEST_KEYS = 16
"""A row with fewer keys is not sampled: its softmax may well be all on one."""


def attention_statistics(
    query, key, pages, valid, query_start, query_length, context_length, page_table, *scales_and_layer,
    scale: float, head_axes=(),
):  # fmt: skip
    """One row of `ATTENTION`.

    Logits and softmax are exact for up to `ROWS` rows, spread over the step's sequences and over each of them, against the
    keys that the row attends to: all of them up to `KEYS`, otherwise those of the first page (where sinks are) and of the
    latest pages, so that logits are a sample and a saturation may be an overestimate. The bound holds for every pair of
    tokens of the step.

    Args:
        query, key: as `custom_ops.ragged_paged_attention` has them.
        pages: [layers, ...] its pages of all layers, with the step's keys written.
        scales_and_layer: the scales of these pages, [layers, ...], where they have any; then which layer, [] int32.
        valid: [T] bool, which rows are tokens.
        head_axes: mesh axes that split the heads.
    """
    rows = min(ROWS, query.shape[0])
    sequence, turn, present = sample_sequences(query_length, context_length, rows)
    length, times = query_length[sequence], -(-rows // present)
    place = length - 1 - length * turn // times
    position = context_length[sequence] + place
    sampled = (position + 1 >= FEWEST_KEYS) & (length > 0)
    *scales, layer = scales_and_layer
    pools = [pool.reshape(-1, *pool.shape[2:]) for pool in (pages, *scales)]
    keys, seen = _keys(pools, page_table + layer * pages.shape[1], sequence, position)
    heads = keys.shape[2]
    row = jnp.clip(query_start[sequence] + place, 0, query.shape[0] - 1)
    grouped = query[row].astype(jnp.float32).reshape(rows, heads, -1, query.shape[-1]) * scale
    logits = jnp.einsum("rhgd,rlhd->rhgl", grouped, keys)
    seen = (seen & sampled[:, None])[:, None, None, :]
    weights = jnp.exp(logits - jnp.max(jnp.where(seen, logits, -1e30), axis=-1, keepdims=True))
    weights = jnp.where(seen, weights, 0)
    weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1)  # the largest is one, if any is there
    entropy = -jnp.sum(jnp.where(weights > 0, weights * jnp.log(weights), 0))
    saturated = jnp.sum(jnp.max(weights, -1) > SATURATED, dtype=jnp.float32)
    count = jnp.sum(sampled, dtype=jnp.float32) * heads * grouped.shape[2]
    bound = _largest_norm(query, valid) * _largest_norm(key, valid) * scale
    smallest = jnp.min(jnp.where(seen, logits, jnp.inf))
    largest = jnp.max(jnp.where(seen, logits, -jnp.inf))
    if head_axes:
        count, saturated, entropy = lax.psum((count, saturated, entropy), head_axes)
        smallest, (largest, bound) = lax.pmin(smallest, head_axes), lax.pmax((largest, bound), head_axes)
    return jnp.stack([count, smallest, largest, bound, saturated, entropy])[None]


def _keys(pools, page_table, sequence, position):
    """Keys [rows, keys, KV heads, head dim] of the pages to compare each row with, and which of them it attends to.

    pools: pages, and their scales where they have any.
    """
    pages, *scales = pools
    size = pages.shape[2]
    count = min(page_table.shape[1], max(2, -(-KEYS // size)))
    number = jnp.arange(count)
    # The first page, then the latest ones; all from the first on where there are no more than `count`.
    latest = jnp.maximum(position // size - count + 1, 0)[:, None] + number
    latest = jnp.where(number == 0, 0, latest)
    table = jnp.take_along_axis(page_table[sequence], latest, axis=1)
    keys = pages[table][:, :, ::2].astype(jnp.float32)
    for pool in scales:
        keys = keys * pool[table][:, :, ::2, :, None]
    keys = jnp.swapaxes(keys, 2, 3).reshape(len(position), count * size, -1, pages.shape[-1])
    place = (latest[:, :, None] * size + jnp.arange(size)).reshape(len(position), -1)
    seen = place <= position[:, None]
    return jnp.where(seen[..., None, None], keys, 0), seen  # an unwritten page may hold anything


def _largest_norm(heads, valid):
    squares = jnp.sum(jnp.square(heads.astype(jnp.float32)), axis=-1)
    return jnp.sqrt(jnp.max(jnp.where(valid[:, None], squares, 0)))
