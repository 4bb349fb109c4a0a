"""Calls of ragged paged attention, and how they are held against the reference."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from comparison import compiled, relative_error

OP = "ragged_paged_attention"
TOKENS, SEQUENCES, DIM = 448, 8, 128
SCALE = DIM**-0.5
CAPACITY = 512
"""Positions that a sequence's pages have room for."""
FP32 = 1e-5


class Arguments(NamedTuple):
    """Of the operation, in its order."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    pages: np.ndarray
    query_start: np.ndarray
    query_length: np.ndarray
    context_length: np.ndarray
    page_table: np.ndarray
    page_scale: np.ndarray | None = None


def arguments(
    lengths, contexts, *, page_size=64, heads=(4, 1), starts=None, tokens=TOKENS, sequences=SEQUENCES, capacity=CAPACITY
) -> Arguments:
    """Random tokens and a random past; what no token has written is NaN, and pages lie in no order."""
    rng = np.random.default_rng(0)
    query_heads, kv_heads = heads
    starts = np.cumsum(lengths) - lengths if starts is None else starts
    lengths, contexts, starts = (
        np.pad(np.array(values, np.int32), (0, sequences - len(values))) for values in (lengths, contexts, starts)
    )
    per_sequence = capacity // page_size
    table = rng.permutation(sequences * per_sequence).reshape(sequences, per_sequence).astype(np.int32)
    pages = np.full((sequences * per_sequence, 2 * kv_heads, page_size, DIM), np.nan, np.float32)
    for sequence, context in enumerate(contexts):
        position = np.arange(context)
        past = rng.standard_normal((context, 2 * kv_heads, DIM))
        pages[table[sequence, position // page_size], :, position % page_size] = past

    def normal(count):
        return rng.standard_normal((tokens, count, DIM)).astype(np.float32)

    return Arguments(normal(query_heads), normal(kv_heads), normal(kv_heads), pages, starts, lengths, contexts, table)


def decode_arguments(active, contexts, **sizes) -> Arguments:
    count = len(active)
    return arguments(active, contexts, starts=np.arange(count), tokens=count, sequences=count, **sizes)


def in_fp8(args: Arguments) -> Arguments:
    """The same with pages in FP8; what no token has written stays NaN, its scale too."""
    pages = jnp.asarray(args.pages)
    scale = jnp.max(jnp.abs(pages), axis=-1) / 448
    return args._replace(pages=(pages / scale[..., None]).astype(jnp.float8_e4m3fn), page_scale=scale)


def in_bfloat16(args: Arguments) -> Arguments:
    names = ("query", "key", "value", *(("pages",) if args.page_scale is None else ()))
    return args._replace(**{name: jnp.asarray(getattr(args, name), jnp.bfloat16) for name in names})


def check(implementation: str, args: Arguments, bound=FP32, decode=False) -> np.ndarray:
    """Asserts that an implementation agrees with the reference in output, pages and scales, and returns its output."""
    result = compiled(OP, implementation, scale=SCALE, decode=decode)(*args)
    expected = compiled(OP, "reference", scale=SCALE, decode=decode)(*args)
    assert [part.dtype for part in result] == [part.dtype for part in expected]
    for own, theirs in zip(result[1:], expected[1:], strict=True):
        np.testing.assert_array_equal(np.asarray(own, np.float32), np.asarray(theirs, np.float32))
    assert np.isfinite(np.asarray(result[0], np.float32)).all()
    assert relative_error(result[0], expected[0]) <= bound
    return np.asarray(result[0])


def rows_of_none(args: Arguments) -> np.ndarray:
    taken = np.zeros(len(args.query), bool)
    for start, length in zip(args.query_start, args.query_length, strict=True):
        taken[start : start + length] = True
    return ~taken
