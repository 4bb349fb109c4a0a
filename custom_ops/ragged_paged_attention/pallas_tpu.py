"""Ragged paged attention on TPU in Pallas: one kernel for sequences with one row, and two for the others.

`pallas_decode` computes one row of each sequence and writes its key and value on the way; `pallas_write` puts those of longer
sequences into their pages, and `pallas_prefill` holds tiles of their rows against them. All read pages where they lie, and
write them in place.
"""

from __future__ import annotations

import jax.numpy as jnp

from custom_ops.ragged_paged_attention.pallas_decode import decode as decode_rows
from custom_ops.ragged_paged_attention.pallas_layout import (
    DECODE_BLOCK,
    PREFILL_BLOCK,
    AttentionShape,
    Layout,
    supports,
    tile_of,
)
from custom_ops.ragged_paged_attention.pallas_prefill import prefill
from custom_ops.ragged_paged_attention.pallas_write import write_pages


def ragged_paged_attention(
    query, key, value, pages, query_start, query_length, context_length, page_table, page_scale=None,
    *, scale: float, decode: bool = False, interpret: bool = False,
):  # fmt: skip
    """See `custom_ops.ragged_paged_attention` for arguments and results.

    interpret: run the kernels in Pallas' interpreter, on any backend and far slower.

    Raises:
        ValueError: sizes that `supports` refuses.
    """
    shape = AttentionShape.of_arguments(
        query, key, value, pages, query_start, query_length, context_length, page_table
    )
    if not supports(shape):
        raise ValueError(f"the Pallas kernels do not take {shape}")
    layout, long = (Layout.of_shape(shape, positions, interpret) for positions in (DECODE_BLOCK, PREFILL_BLOCK))
    padded = _padded(query, layout)
    if decode:
        output, *pools = decode_rows(
            layout, padded, key, value, query_length, context_length, page_table, pages, page_scale, scale=scale
        )
        return _unpadded(output, query, layout), *pools

    row, single = jnp.clip(query_start, 0, query.shape[0] - 1), query_length == 1
    first, *pools = decode_rows(
        layout, padded[row], key[row], value[row], single.astype(jnp.int32), context_length, page_table, pages, page_scale,
        scale=scale,
    )  # fmt: skip
    sequences = (query_start, query_length, context_length, page_table)
    pools = write_pages(long, key, value, *sequences, pools[0], *(pools[1:] or [None]))
    output = jnp.zeros_like(padded).at[jnp.where(single, row, padded.shape[0])].set(first, mode="drop")
    output = prefill(long, tile_of(padded.shape[0]), padded, output, *sequences, pools[0], *(pools[1:] or [None]), scale=scale)
    return _unpadded(output, query, layout), *pools


def _padded(query, layout: Layout):
    """[rows, KV heads * padded group, head dim]"""
    grouped = query.reshape(query.shape[0], layout.heads, -1, layout.dim)
    pad = layout.group - grouped.shape[2]
    return jnp.pad(grouped, ((0, 0), (0, 0), (0, pad), (0, 0))).reshape(query.shape[0], -1, layout.dim) if pad else query


def _unpadded(output, query, layout: Layout):
    group = query.shape[1] // layout.heads
    return output.reshape(output.shape[0], layout.heads, -1, layout.dim)[:, :, :group].reshape(query.shape)
