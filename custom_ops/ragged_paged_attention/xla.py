"""Ragged paged attention for any backend: tiles of queries against blocks of pages, with a running softmax.

The running softmax is that of "Self-attention Does Not Need O(n²) Memory" (arXiv:2112.05682). Only pages up to a tile's
last position are read, so work follows the tokens that are there and not the size of the page table.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from custom_ops.ragged import take_at, tile_sequences
from custom_ops.ragged_paged_attention.pages import with_scale, write

QUERY_TILE = 128
"""Most rows of one sequence that are handled together in prefill; fewer where a batch has few rows a sequence."""
BLOCK = 256
"""Positions that one step of the inner loop reads in prefill beside a whole tile, rounded up to whole pages."""
MASKED = -1e30
"""Score of an unseen position: finite, so that a block without any seen position leaves no NaN."""


def ragged_paged_attention(
    query, key, value, pages, query_start, query_length, context_length, page_table, page_scale=None,
    *, scale: float, decode: bool = False,
):  # fmt: skip
    """See `custom_ops.ragged_paged_attention` for arguments and results."""
    pages, page_scale = write(pages, key, value, query_start, query_length, context_length, page_table, page_scale)
    rows, query_heads, dim = query.shape
    heads, group, page_size = key.shape[1], query_heads // key.shape[1], pages.shape[2]
    tile = 1 if decode else tile_rows(rows, query_start.shape[0])
    positions = BLOCK if tile == QUERY_TILE else BLOCK // 2
    step = 1 if decode else min(max(positions // page_size, 1), page_table.shape[1])  # pages a step
    tiles = tile_sequences(query_start, query_length, tokens=rows, tile=tile)
    padded = -(-page_table.shape[1] // step) * step - page_table.shape[1]
    page_table = jnp.pad(page_table, ((0, 0), (0, padded)))  # unread: positions there are never seen
    # Columns are queries from here on: reductions over positions then run along vectors of queries.
    columns = (tiles.gather(query, 0) * jnp.asarray(scale, query.dtype)).reshape(-1, tile, heads, group, dim)
    columns = jnp.transpose(columns, (0, 2, 4, 3, 1)).reshape(-1, heads, dim, group * tile)

    size = step * page_size
    # Indices are unsigned and known to be in range: XLA need not wrap or check them in every iteration.
    page_table, sequences = page_table.astype(jnp.uint32), tiles.sequence.astype(jnp.uint32)

    def one_tile(index, output):
        sequence = take_at(sequences, index)
        context = take_at(context_length, sequence)
        first = context + take_at(tiles.offset, index)
        last = jnp.minimum(first + tile, context + take_at(query_length, sequence))
        position = jnp.tile(first + jnp.arange(tile), group)
        queries = take_at(columns, index)

        def block(number, carry, masked):
            total, highest, weighted = carry
            table = lax.dynamic_slice(page_table, (sequence, number * step), (1, step))[0]
            history = _as_it_lies(_take(pages, table)).astype(queries.dtype)
            history = jnp.swapaxes(history, 0, 1).reshape(heads, 2, size, dim)
            keys, values = history[:, 0], history[:, 1]
            scores = jnp.einsum("hld,hdq->hlq", keys, queries, preferred_element_type=jnp.float32)
            if page_scale is not None:  # scores and weights have fewer numbers than keys and values, and stay FP32
                scales = jnp.swapaxes(_take(page_scale, table), 0, 1).reshape(heads, 2, size, 1)
                scores = scores * scales[:, 0]
            if masked:
                seen = (number.astype(jnp.int32) * size + jnp.arange(size))[:, None]
                scores = jnp.where(seen <= position, scores, MASKED)
                # Unseen values are zeroed as well: an unwritten page may hold anything, and 0 times NaN is NaN.
                values = jnp.where(seen < last, values, 0)
                if page_scale is not None:
                    scales = jnp.where(seen < last, scales, 0)
            new_highest = jnp.maximum(highest, scores.max(1, keepdims=True))
            weights = jnp.exp(scores - new_highest)
            shrink = jnp.exp(highest - new_highest)
            total = total * shrink + weights.sum(1, keepdims=True)
            if page_scale is not None:
                weights = weights * scales[:, 1]
            update = jnp.einsum("hld,hlq->hdq", values, weights.astype(values.dtype), preferred_element_type=jnp.float32)
            return total, new_highest, weighted * shrink + update

        carry = (
            jnp.zeros((heads, 1, group * tile), jnp.float32),
            jnp.full((heads, 1, group * tile), MASKED, jnp.float32),
            jnp.zeros((heads, dim, group * tile), jnp.float32),
        )
        # Blocks that every query of the tile has seen whole come first and need no mask.
        blocks, whole = -(-last // size), jnp.zeros((), jnp.int32) if decode else (first + 1) // size
        whole, blocks = whole.astype(jnp.uint32), blocks.astype(jnp.uint32)
        if not decode:
            carry = lax.fori_loop(jnp.uint32(0), whole, functools.partial(block, masked=False), carry)
        total, _, weighted = lax.fori_loop(whole, blocks, functools.partial(block, masked=True), carry)
        return lax.dynamic_update_index_in_dim(output, (weighted / total).astype(output.dtype), index, 0)

    output = lax.fori_loop(jnp.uint32(0), tiles.count.astype(jnp.uint32), one_tile, jnp.zeros_like(columns))
    output = jnp.transpose(output.reshape(-1, heads, dim, group, tile), (0, 4, 1, 3, 2))
    return with_scale(tiles.scatter(output.reshape(-1, tile, query_heads, dim)), pages, page_scale)


def _take(pool, pages):
    """Entries of a pool; one is a slice of it."""
    if pages.shape[0] == 1:
        return lax.dynamic_slice_in_dim(pool, pages[0], 1)
    return pool.at[pages].get(mode="promise_in_bounds")


def _as_it_lies(pages):
    """Keeps a TPU from turning all pages, in a copy, where the few that were read are to be turned."""

    def fixed(pages):
        return lax.optimization_barrier(with_layout_constraint(pages, Layout(tuple(range(pages.ndim)))))

    return lax.platform_dependent(pages, tpu=fixed, default=lambda pages: pages)


def tile_rows(tokens: int, sequences: int) -> int:
    """Rows a tile for a batch with room for `tokens` rows of `sequences` sequences: about their mean number, as a tile is
    computed whole however few of its rows are tokens; within 16 and `QUERY_TILE`."""
    mean = max(tokens // sequences, 1)
    return min(max(1 << mean.bit_length() - 1, 16), QUERY_TILE)
