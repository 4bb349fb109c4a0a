"""The chunk kernel's unit lower triangular matrices, two value heads side by side (a pair), and their inverses.

Blocks of 16 on the diagonal are inverted by substitution in FP32, those of all pairs in step; then twice the size, twice, by
the inverse of [[A, 0], [B, D]], which is [[A⁻¹, 0], [-D⁻¹ B A⁻¹, D⁻¹]].
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from custom_ops.gated_delta_net.pallas_arithmetic import dot, iota, one_where, side_by_side, split, stacked_product
from custom_ops.gated_delta_net.pallas_chunk_memory import BASE, Chunk
from custom_ops.gated_delta_net.tiling import CHUNK, LANES

BLOCKS = CHUNK // BASE


def set_copiers(chunk: Chunk) -> None:
    """`copies`: a product with its columns 128 j and on copies column j of every block over the block's lanes."""
    source, target = iota((2 * LANES, LANES), 0), iota((2 * LANES, LANES), 1)
    for j in range(BASE):
        same = lax.rem(source, LANES) == target - lax.rem(target, BASE) + j
        chunk.scratch.copies[:, j * LANES : (j + 1) * LANES] = one_where(same)


def set_pair(chunk: Chunk, p) -> None:
    """Of a pair: the matrix below its diagonal of ones, packed blocks of it, and what weighs new values in the outputs."""
    scratch, group = chunk.scratch, chunk.shape.group
    heads = 2 * p, 2 * p + 1
    key_heads = [lax.div(h, group) for h in heads]

    def pair(ref, places):
        return side_by_side(*(ref[place] for place in places))

    row, lane = iota((CHUNK, LANES), 0), iota((CHUNK, LANES), 1) & (CHUNK - 1)
    distance = pair(scratch.total_column, heads) - scratch.total_row[pl.ds(p, 1)]
    damping = jnp.exp(jnp.where(row >= lane, distance, -jnp.inf))
    weights = pair(scratch.beta_column, heads) * pair(scratch.key_products, key_heads)
    matrix = jnp.where(row > lane, weights * damping, 0)
    scratch.lower[p] = matrix
    scratch.attend[p, 0], scratch.attend[p, 1] = split(pair(scratch.query_products, key_heads) * damping)
    rows = pl.ds(pl.multiple_of(p * BASE, BASE), BASE)
    scratch.packed[rows] = jnp.concatenate(split(_pack_blocks(matrix)), axis=1)


def invert(chunk: Chunk) -> None:
    """The inverses of all pairs."""
    pairs = chunk.shape.value_heads // 2
    chunk.loop(BASE // 2, functools.partial(_copy_columns, chunk), 1)
    chunk.loop(pairs, functools.partial(_invert_blocks, chunk), 8)
    for size in (BASE, 2 * BASE):
        chunk.loop(pairs, functools.partial(_multiply_left, chunk, size), 32)
        chunk.loop(pairs, functools.partial(_multiply_right, chunk, size), 32)


def _copy_columns(chunk: Chunk, j) -> None:
    """Columns 2 j and 2 j + 1 of every block of all heads, over the block's lanes."""
    lanes = pl.ds(pl.multiple_of(j * 2 * LANES, 2 * LANES), 2 * LANES)
    chunk.scratch.column[:, lanes] = dot(chunk.scratch.packed[...], chunk.scratch.copies[:, lanes])


def _invert_blocks(chunk: Chunk, p) -> None:
    """Substitution in a pair's blocks; columns of the second half change the second half of the rows alone."""
    x = (iota((BASE, LANES), 0) == lax.rem(iota((BASE, LANES), 1), BASE)).astype(jnp.float32)
    half = BASE // 2
    for j in range(BASE - 1):
        first = 0 if j < half - 1 else half
        rows = pl.ds(pl.multiple_of(p * BASE + first, half), BASE - first)
        changed = x[first:] - chunk.scratch.column[rows, j * LANES : (j + 1) * LANES] * x[j : j + 1]
        x = jnp.concatenate([x[:first], changed]) if first else changed
    chunk.scratch.inverse[p] = _unpack_blocks(x)


def _lower_blocks(size: int) -> list[slice]:
    """Rows of D: every other block of this size."""
    return [slice(start, start + size) for start in range(size, CHUNK, 2 * size)]


def _multiply_left(chunk: Chunk, size: int, p) -> None:
    """D⁻¹ B of a pair's blocks of this size, into `rest`."""
    scratch = chunk.scratch
    row, lane = iota((CHUNK, LANES), 0), iota((CHUNK, LANES), 1) & (CHUNK - 1)
    below = (lax.div(row, size) & 1 == 1) & (lax.div(lane, size) == lax.div(row, size) - 1)
    inverses = jnp.concatenate([scratch.inverse[p, rows] for rows in _lower_blocks(size)])
    corner = jnp.where(below, scratch.lower[p], 0)
    scratch.rest[p] = stacked_product(split(inverses), tuple(map(_diagonal, split(corner))))


def _multiply_right(chunk: Chunk, size: int, p) -> None:
    """-D⁻¹ B A⁻¹, into its place in the inverse."""
    inverse = chunk.scratch.inverse
    corners = stacked_product(split(chunk.scratch.rest[p]), tuple(map(_diagonal, split(inverse[p]))))
    for n, rows in enumerate(_lower_blocks(size)):
        inverse[p, rows] -= corners[n * size : (n + 1) * size]


def _diagonal(x):
    """A pair [rows, 128] as a block diagonal matrix [2 rows, 128]."""
    zero = jnp.zeros_like(x)
    return jnp.concatenate([side_by_side(x, zero), side_by_side(zero, x)])


def _block_of_lane():
    return lax.rem(lax.div(iota((BASE, LANES), 1), BASE), BLOCKS)


def _pack_blocks(matrix):
    """The blocks of 16 on the diagonals of a pair [64, 128], all side by side: [16, 128]."""
    packed = matrix[:BASE]
    for block in range(1, BLOCKS):
        packed = jnp.where(_block_of_lane() == block, matrix[block * BASE : (block + 1) * BASE], packed)
    return packed


def _unpack_blocks(x):
    """The inverse of `_pack_blocks`, zero off the blocks."""
    return jnp.concatenate([jnp.where(_block_of_lane() == block, x, 0) for block in range(BLOCKS)])
