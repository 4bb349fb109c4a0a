"""What lies in the pages, where, and how new tokens get there."""

from __future__ import annotations

import jax.numpy as jnp

from custom_ops.ragged import token_sequence

FP8 = jnp.float8_e4m3fn
FP8_MAX = 448.0


def page_rows(key, value, dtype):
    """Keys and values as pages of `dtype` hold them: [T, 2 * KV heads, head dim], and in FP8 the scale of each row,
    [T, 2 * KV heads] float32, which takes its largest element to FP8's largest number; None for other dtypes."""
    both = jnp.stack([key, value], axis=2).reshape(key.shape[0], -1, key.shape[-1])
    if dtype != FP8:
        return both.astype(dtype), None
    scale = scale_of(both)
    return (both.astype(jnp.float32) / scale).astype(dtype), scale[..., 0]


def scale_of(rows):
    """[..., 1] float32: scales of rows in FP8."""
    largest = jnp.max(jnp.abs(rows.astype(jnp.float32)), axis=-1, keepdims=True)
    return jnp.where(largest == 0, 1, largest / FP8_MAX)


def write(pages, key, value, query_start, query_length, context_length, page_table, page_scale=None):
    """`pages` and `page_scale` with the keys and values of this batch in their places; rows of no sequence are dropped."""
    count, heads, page_size, dim = pages.shape
    sequence, position, valid = token_sequence(query_start, query_length, key.shape[0])
    position = position + context_length[sequence]
    page = jnp.where(valid, page_table[sequence, position // page_size], count)
    rows, scales = page_rows(key, value, pages.dtype)
    # A row a head, not a token: a scatter of several rows with others between them makes a TPU copy all pages.
    place = ((page[:, None] * heads + jnp.arange(heads)) * page_size + (position % page_size)[:, None]).reshape(-1)
    pages = pages.reshape(-1, dim).at[place].set(rows.reshape(-1, dim), mode="drop").reshape(pages.shape)
    if page_scale is not None:
        page_scale = page_scale.reshape(-1).at[place].set(scales.reshape(-1), mode="drop").reshape(page_scale.shape)
    return pages, page_scale


def with_scale(output, pages, page_scale):
    """Results of the operation."""
    return (output, pages) if page_scale is None else (output, pages, page_scale)
