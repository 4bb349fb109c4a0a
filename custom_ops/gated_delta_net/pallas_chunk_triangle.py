"""The chunk kernel's unit lower triangular matrices, two value heads side by side (a pair), and their inverses.

Blocks of 16 on the diagonal are inverted by substitution in FP32, those of all pairs in step; then twice the size, twice, by
the inverse of [[A, 0], [B, D]], which is [[A⁻¹, 0], [-D⁻¹ B A⁻¹, D⁻¹]].
"""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from custom_ops.gated_delta_net.pallas_arithmetic import copy_lane, iota, side_by_side, split, stacked_product
from custom_ops.gated_delta_net.pallas_chunk_memory import BASE, Chunk
from custom_ops.gated_delta_net.tiling import CHUNK, LANES

BLOCKS = CHUNK // BASE


def set_pair(chunk: Chunk, p) -> None:
    """Of a pair: the matrix below its diagonal of ones, packed blocks of it, and what weighs new values in the outputs."""
    scratch, group = chunk.scratch, chunk.shape.group
    heads = 2 * p, 2 * p + 1
    key_heads = [lax.div(h, group) for h in heads]

    def products(ref):
        if group % 2 == 0:
            return ref[key_heads[0]]
        return side_by_side(*(ref[head] for head in key_heads))

    row, lane = iota((CHUNK, LANES), 0), iota((CHUNK, LANES), 1) & (CHUNK - 1)
    head_of_lane = 2 * p + lax.div(iota((CHUNK, LANES), 1), CHUNK)
    distance = copy_lane(scratch.total[...], head_of_lane) - scratch.total_row[pl.ds(p, 1)]
    damping = jnp.exp2(jnp.where(row >= lane, distance, -jnp.inf))
    weights = copy_lane(scratch.beta[...], head_of_lane) * products(scratch.key_products)
    matrix = jnp.where(row > lane, weights * damping, 0)
    scratch.lower[p, 0], scratch.lower[p, 1] = map(_diagonal, split(matrix))
    scratch.attend[p, 0], scratch.attend[p, 1] = split(products(scratch.query_products) * damping)
    rows = pl.ds(pl.multiple_of(p * BASE, BASE), BASE)
    scratch.packed[rows] = _pack_blocks(matrix)


def invert(chunk: Chunk) -> None:
    """The inverses of all pairs."""
    pairs = chunk.shape.value_heads // 2
    some = math.gcd(pairs, 8)
    chunk.loop(pairs // some, functools.partial(_invert_blocks, chunk, some), 1)
    for size in (BASE, 2 * BASE):
        chunk.loop(pairs, functools.partial(_multiply_left, chunk, size), 32)
        chunk.loop(pairs, functools.partial(_multiply_right, chunk, size), 32)


def _invert_blocks(chunk: Chunk, some: int, first) -> None:
    """Substitution in the blocks of `some` pairs in step, which take the same lanes in turn.

    Columns of the second half change the second half of the rows alone.
    """
    scratch, half = chunk.scratch, BASE // 2
    pairs = [first * some + n for n in range(some)]
    lane = iota((BASE, LANES), 1)
    block = lane - lax.rem(lane, BASE)
    blocks = [scratch.packed[pl.ds(pl.multiple_of(p * BASE, BASE), BASE)] for p in pairs]
    inverses = [(iota((BASE, LANES), 0) == lane - block).astype(jnp.float32)] * some
    for j in range(BASE - 1):
        start = 0 if j < half - 1 else half
        for n, x in enumerate(inverses):
            changed = x[start:] - copy_lane(blocks[n][start:], block[start:] + j) * x[j : j + 1]
            inverses[n] = jnp.concatenate([x[:start], changed]) if start else changed
    for p, x in zip(pairs, inverses, strict=True):
        scratch.inverse[p] = _unpack_blocks(x)


def _lower_blocks(size: int) -> list[slice]:
    """Rows of D: every other block of this size."""
    return [slice(start, start + size) for start in range(size, CHUNK, 2 * size)]


def _multiply_left(chunk: Chunk, size: int, p) -> None:
    """D⁻¹ times all that is below the diagonal, of a pair's blocks of this size, into `rest`."""
    scratch = chunk.scratch
    inverses = jnp.concatenate([scratch.inverse[p, rows] for rows in _lower_blocks(size)])
    scratch.rest[p] = stacked_product(split(inverses), (scratch.lower[p, 0], scratch.lower[p, 1]))


def _multiply_right(chunk: Chunk, size: int, p) -> None:
    """-D⁻¹ B A⁻¹, into its place in the inverse. What stands beside B in `rest` gives columns that nobody wants."""
    inverse, shape = chunk.scratch.inverse, (CHUNK // 2, LANES)
    wanted = lax.div(iota(shape, 1) & (CHUNK - 1), size) == 2 * lax.div(iota(shape, 0), size)
    corners = stacked_product(split(chunk.scratch.rest[p]), tuple(map(_diagonal, split(inverse[p]))))
    corners = jnp.where(wanted, corners, 0)
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
