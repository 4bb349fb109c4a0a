"""A ragged batch in chunks that lie on multiples of 64 rows, so that a block of rows in HBM is one in memory."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

LANES = 128
CHUNK = 64
FIRST, FRESH, LAST, OPENS = 1, 2, 4, 8
"""Flags of a chunk: its sequence begins in it, begins there from zero, ends in it; it is the first of its block of rows."""


def chunk_table(start, length, fresh, slot, tokens: int):
    """The chunks of a batch: one for each block of 64 rows and sequence with rows in it, one for each block without any.

    In the order of their rows, so that the chunks of a block and those of a sequence follow one another.

    Args:
        start, length, slot: [sequences] int32; fresh: [sequences] bool. Length 0 takes no part.

    Returns:
        How many chunks there are, at most blocks + sequences, and of each, int32: its block, its sequence's slot, the rows
        of the block that are its (begin, end; equal where there is no sequence), its flags.
    """
    sequences, blocks = start.shape[0], -(-tokens // CHUNK)
    base = jnp.arange(blocks) * CHUNK
    taken = jnp.any((length > 0) & (start < base[:, None] + CHUNK) & (start + length > base[:, None]), axis=1)
    # A block without rows of any sequence stands in the list as if it were one.
    start = jnp.concatenate([start, base])
    length = jnp.concatenate([length, jnp.where(taken, 0, CHUNK)])
    order = jnp.argsort(jnp.where(length > 0, start, jnp.iinfo(jnp.int32).max))
    start, length = start[order], length[order]
    chunks = jnp.where(length > 0, lax.div(start + length - 1, CHUNK) - lax.div(start, CHUNK) + 1, 0)
    ends = jnp.cumsum(chunks)
    index = jnp.arange(blocks + sequences)
    entry = jnp.minimum(jnp.searchsorted(ends, index, side="right", method="compare_all"), blocks + sequences - 1)
    place = index - (ends - chunks)[entry]
    exists = index < ends[-1]
    block = jnp.where(exists, lax.div(start[entry], CHUNK) + place, blocks - 1)
    real = exists & (order[entry] < sequences)
    sequence = jnp.minimum(order[entry], sequences - 1)
    begin, end = (
        jnp.where(real, jnp.clip(row - block * CHUNK, 0, CHUNK), 0) for row in (start[entry], (start + length)[entry])
    )
    first, last = real & (place == 0), real & (place == chunks[entry] - 1)
    opens = jnp.concatenate([jnp.ones(1, bool), block[1:] != block[:-1]])
    flags = FIRST * first + FRESH * (first & fresh[sequence]) + LAST * last + OPENS * opens
    return ends[-1], *(part.astype(jnp.int32) for part in (block, slot[sequence], begin, end, flags))
