"""Rows that a DMA can move one by one: how they lie in memory, and back to the layout of products.

A row of [rows, columns] lies across memory tiles of eight (BF16: sixteen) rows, and no DMA takes one out of a tile. So rows
travel as 32-bit words [rows * pitch, 128]: word w of lane l holds columns 256 w + l (lower half) and 256 w + 128 + l (upper
half) as BF16, and each row begins a memory tile of its own. A load or store of every pitch-th sublane turns a column of
eight rows' words into a register of the other layout, or back.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from custom_ops.ragged_moe.pallas_plan import LANES, SUBLANES

BLOCK_ROWS = 128


def pitch_of(hidden: int) -> int:
    """Sublanes from one row to the next."""
    return -(-hidden // (2 * LANES * SUBLANES)) * SUBLANES


def to_words(low, high):
    """Two float32 arrays, rounded to BF16, in the halves of one uint32 array."""
    low, high = (lax.bitcast_convert_type(half.astype(jnp.bfloat16).astype(jnp.float32), jnp.uint32) for half in (low, high))
    return lax.shift_right_logical(low, jnp.uint32(16)) | high


def from_words(words):
    """The halves of a uint32 array as float32."""
    low = lax.bitcast_convert_type(lax.shift_left(words, jnp.uint32(16)), jnp.float32)
    return low, lax.bitcast_convert_type(words & jnp.uint32(0xFFFF0000), jnp.float32)


def column(word: int, rows: int, pitch: int):
    """The sublanes that hold word `word` of each of `rows` rows."""
    return pl.ds(word, rows, stride=pitch)


def pack(rows, scale, *, interpret: bool):
    """[rows, hidden] of any type, and the scale of each or None → words [rows * pitch, 128] uint32."""
    count, hidden = rows.shape
    pitch, size = pitch_of(hidden), min(count, BLOCK_ROWS)
    scales = [] if scale is None else [scale[:, None]]

    def kernel(*refs):
        source, *scale, target = refs
        for word in range(hidden // (2 * LANES)):
            halves = [source[:, pl.ds((2 * word + half) * LANES, LANES)].astype(jnp.float32) for half in range(2)]
            if scale:
                halves = [half * scale[0][...] for half in halves]
            target[column(word, size, pitch), :] = to_words(*halves)

    return pl.pallas_call(
        kernel,
        name="ragged_moe_pack",
        grid=(-(-count // size),),
        in_specs=[
            pl.BlockSpec((size, hidden), lambda block: (block, 0)),
            *(pl.BlockSpec((size, 1), lambda block: (block, 0)) for _ in scales),
        ],
        out_specs=pl.BlockSpec((size * pitch, LANES), lambda block: (block, 0)),
        out_shape=jax.ShapeDtypeStruct((count * pitch, LANES), jnp.uint32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
    )(rows, *scales)
