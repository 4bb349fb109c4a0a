"""Index algebra of ragged batches: sequences cut into tiles of a fixed number of rows."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Tiles(NamedTuple):
    """Tiles over a flat batch of `tokens` rows; each holds rows of one sequence, only the last of a sequence is partial.

    Attributes:
        count: how many tiles hold tokens; the others (up to the static bound) are empty and come last.
        sequence: [tiles] the sequence of each tile (0 for empty tiles).
        start: [tiles] first row of that sequence in the flat batch.
        offset: [tiles] position of the tile's first row within the sequence.
        valid: [tiles, tile] which rows hold a token.
        row: [tiles, tile] the flat row of each position (clamped where not valid).
        place: [tokens] where each flat row lies in [tiles * tile]; past the end for rows of no sequence.
    """

    count: jax.Array
    sequence: jax.Array
    start: jax.Array
    offset: jax.Array
    valid: jax.Array
    row: jax.Array
    place: jax.Array

    def gather(self, rows, fill):
        """[tokens, ...] → [tiles, tile, ...], with `fill` where no token is."""
        gathered = rows[self.row]
        return jnp.where(self.valid.reshape(self.valid.shape + (1,) * (rows.ndim - 1)), gathered, fill)

    def scatter(self, tiled):
        """[tiles, tile, ...] → [tokens, ...], zero for rows of no sequence."""
        flat = tiled.reshape(-1, *tiled.shape[2:])
        return jnp.take(flat, self.place, axis=0, mode="fill", fill_value=0)


def tile_sequences(query_start, query_length, *, tokens: int, tile: int) -> Tiles:
    """Cut sequences (rows `query_start` to `query_start + query_length` of a flat batch) into tiles of `tile` rows."""
    sequences = query_start.shape[0]
    bound = min(tokens // tile + sequences, tokens)  # every sequence adds at most one partial tile
    per_sequence = -(-query_length // tile)
    ends = jnp.cumsum(per_sequence)
    index = jnp.arange(bound)
    sequence = jnp.searchsorted(ends, index, side="right", method="compare_all")
    sequence = jnp.where(index < ends[-1], sequence, 0)
    offset = (index - (ends - per_sequence)[sequence]) * tile
    position = offset[:, None] + jnp.arange(tile)
    valid = (index < ends[-1])[:, None] & (position < query_length[sequence][:, None])
    row = jnp.clip(query_start[sequence][:, None] + position, 0, tokens - 1)
    place = jnp.full(tokens, bound * tile).at[jnp.where(valid, row, tokens)].set(
        jnp.arange(bound * tile).reshape(bound, tile), mode="drop"
    )
    return Tiles(ends[-1], sequence, query_start[sequence], offset, valid, row, place)


def token_sequence(query_start, query_length, tokens: int):
    """For each row of a flat batch: its sequence, its position in it, and whether it belongs to one at all."""
    row = jnp.arange(tokens)
    inside = (row[:, None] >= query_start) & (row[:, None] < query_start + query_length)  # [tokens, sequences]
    sequence = jnp.argmax(inside, axis=1)
    return sequence, row - query_start[sequence], jnp.any(inside, axis=1)


def take_at(array, index):
    """array[index] for one scalar index, in range; where it is unsigned, XLA neither wraps nor checks it."""
    return lax.dynamic_index_in_dim(array, index, keepdims=False)
