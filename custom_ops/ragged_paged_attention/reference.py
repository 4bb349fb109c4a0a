"""Ragged paged attention as it is defined: every token against all of its sequence's positions, in FP32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from custom_ops.ragged import token_sequence
from custom_ops.ragged_paged_attention.pages import with_scale, write


def ragged_paged_attention(
    query, key, value, pages, query_start, query_length, context_length, page_table, page_scale=None,
    *, scale: float, decode: bool = False,
):  # fmt: skip
    """See `custom_ops.ragged_paged_attention` for arguments and results."""
    del decode
    pages, page_scale = write(pages, key, value, query_start, query_length, context_length, page_table, page_scale)
    sequence, position, valid = token_sequence(query_start, query_length, query.shape[0])
    position = position + context_length[sequence]
    heads = key.shape[1]

    def token(row):
        table = page_table[sequence[row]]
        history = pages[table].astype(jnp.float32)
        if page_scale is not None:
            history = history * page_scale[table][..., None]
        history = jnp.swapaxes(history, 0, 1).reshape(heads, 2, -1, history.shape[-1])
        grouped = query[row].astype(jnp.float32).reshape(heads, -1, query.shape[-1]) * scale
        scores = jnp.einsum("hgd,hld->hgl", grouped, history[:, 0])
        seen = jnp.arange(history.shape[2]) <= position[row]
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        values = jnp.where(seen[:, None], history[:, 1], 0)  # an unwritten page may hold anything
        return jnp.where(valid[row], jnp.einsum("hgl,hld->hgd", weights, values), 0).reshape(query.shape[1:])

    output = jax.lax.map(token, jnp.arange(query.shape[0])).astype(query.dtype)
    return with_scale(output, pages, page_scale)
