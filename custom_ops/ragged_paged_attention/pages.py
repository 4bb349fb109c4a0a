"""Where tokens lie in the pages, and how new ones get there."""

from __future__ import annotations

import jax.numpy as jnp

from custom_ops.ragged import token_sequence


def write(pages, key, value, query_start, query_length, context_length, page_table):
    """`pages` with the keys and values of this batch in their places; rows of no sequence are dropped."""
    page_size = pages.shape[1]
    sequence, position, valid = token_sequence(query_start, query_length, key.shape[0])
    position = position + context_length[sequence]
    page = jnp.where(valid, page_table[sequence, position // page_size], pages.shape[0])
    both = jnp.stack([key, value], axis=2).reshape(key.shape[0], -1, key.shape[-1])
    return pages.at[page, position % page_size].set(both.astype(pages.dtype), mode="drop")
