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
    keys, seen = _keys((pages, *scales), page_table + layer * pages.shape[1], sequence, position)
    heads = keys.shape[1]
    row = jnp.clip(query_start[sequence] + place, 0, query.shape[0] - 1)
    grouped = query[row].astype(jnp.float32).reshape(rows, heads, -1, query.shape[-1]) * scale
    logits = jnp.einsum("rhgd,rhld->rhgl", grouped, keys)
    seen = (seen & sampled[:, None])[:, None, None, :]
    largest = jnp.max(jnp.where(seen, logits, -jnp.inf), axis=-1)
    smallest = jnp.min(jnp.where(seen, logits, jnp.inf), axis=-1)
    below = logits - jnp.where(largest == -jnp.inf, 0, largest)[..., None]
    weights = jnp.where(seen, jnp.exp(below), 0)
    total = jnp.sum(weights, axis=-1)  # the largest weight is one, if any is there
    entropy = jnp.log(jnp.maximum(total, 1)) - jnp.sum(jnp.where(weights > 0, weights * below, 0), -1) / jnp.maximum(total, 1)
    saturated = (total > 0) & (total * SATURATED < 1)
    sampled = jnp.broadcast_to(sampled[:, None, None], total.shape)
    # Two reductions to vectors: XLA for TPU gives each scalar a kernel and a trip to HBM.
    sums = jnp.sum(_columns(sampled, saturated, entropy), axis=1)
    norms = jnp.where(valid, jnp.stack([_largest_square(query), _largest_square(key)]), 0)
    ends = jnp.max(_columns(-smallest, largest), axis=1)
    bound = jnp.prod(jnp.sqrt(jnp.max(norms, axis=1)), keepdims=True) * scale
    if head_axes:
        sums = lax.psum(sums, head_axes)
        ends, bound = lax.pmax((ends, bound), head_axes)
    return jnp.concatenate([sums[:1], -ends[:1], ends[1:], bound, sums[1:]])[None]


def _columns(*arrays):
    """Equally large arrays as rows of one, in float32."""
    return jnp.stack([array.astype(jnp.float32).reshape(-1) for array in arrays])


def _keys(pools, page_table, sequence, position):
    """Keys [rows, KV heads, keys, head dim] of the pages to compare each row with, and which of them [rows, keys] it attends
    to. The others may be anything, as an unwritten page is.

    pools: pages of all layers, [layers, pages, 2 * KV heads, page size, head dim], and their scales where they have any.
    page_table: of one layer, which counts pages through all layers.
    """
    pages, *scales = pools
    planes, size, dim = pages.shape[2:]
    count = min(page_table.shape[1], max(2, -(-KEYS // size)))
    number = jnp.arange(count)
    # The first page, then the latest ones; all from the first on where there are no more than `count`.
    latest = jnp.maximum(position // size - count + 1, 0)[:, None] + number
    latest = jnp.where(number == 0, 0, latest)
    table = jnp.take_along_axis(page_table[sequence], latest, axis=1)
    # Keys alone, head by head: no value is read, and nothing has to be turned.
    plane = table[:, None, :] * planes + 2 * jnp.arange(planes // 2)[:, None]
    keys = pages.reshape(-1, size, dim)[plane].astype(jnp.float32)
    for pool in scales:
        keys = keys * pool.reshape(-1, size)[plane][..., None]
    place = (latest[:, :, None] * size + jnp.arange(size)).reshape(len(position), -1)
    return keys.reshape(len(position), planes // 2, -1, dim), place <= position[:, None]


def _largest_square(heads):
    """[T] the largest squared norm of a row's heads."""
    return jnp.max(jnp.sum(jnp.square(heads.astype(jnp.float32)), axis=-1), axis=-1)
