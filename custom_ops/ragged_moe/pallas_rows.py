"""Rows that a DMA can move one by one: how they lie in memory, and back to the layout of products.

A row of [rows, columns] lies across memory tiles of eight (BF16: sixteen) rows, and no DMA takes one out of a tile. So rows
travel as 32-bit words [rows * pitch, 128]: word w of lane l holds columns 256 w + l (lower half) and 256 w + 128 + l (upper
half) as BF16, and each row begins a memory tile of its own. A load or store of every pitch-th sublane turns a column of
eight rows' words into a register of the other layout, or back.

Scales multiply a row once, here, whatever the number of its experts, and what the experts read is BF16 in every case: int8
codes cost them nothing and need no requantisation, because FP8 weights are multiplied by BF16 rows anyway. By the schedule for
tpu7x, 4,096 columns, 128 rows take 1,026 bundles in FP8 and 1,265 in int8, where each block has a scale to spread over its
lanes, and to send 32 of them 1,325 and 1,550: in all 10 µs more for a core of eight at 8,192 tokens and 0.1 µs at 64, at an
assumed 2.2 GHz.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from custom_ops.ragged_moe.int8_rows import BLOCK
from custom_ops.ragged_moe.pallas_plan import LANES, SUBLANES
from custom_ops.ragged_moe.wire import FP8, Digits

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


def receive(packed, *, hidden: int, top_k: int, interpret: bool):
    """Tokens as they have travelled (see `wire`) → their rows, times their scales, as words [T * pitch, 128] uint32, and their
    routing: [words of a token, in whole tiles of 8; T, in whole tiles of 128] int32, undefined where there is no token."""
    tokens, form = packed.shape[0], Digits.of(packed.dtype, hidden=hidden, top_k=top_k)
    pitch, size, blocks = pitch_of(hidden), min(tokens, BLOCK_ROWS), -(-tokens // BLOCK_ROWS)
    columns = -(-form.columns // LANES) * LANES
    if hidden % columns:
        raise ValueError(f"rows of {hidden} columns with {top_k} experts each: the columns behind them do not begin a block")

    def kernel(source, behind, target, routing):
        words = _words(behind[...].astype(jnp.float32), form)
        routing[...] = words[:height]
        scale = _scales(words, form, packed.dtype, size)
        for word in range(hidden // (2 * LANES)):
            numbers = (2 * word, 2 * word + 1)
            halves = [source[:, pl.ds(number * LANES, LANES)].astype(jnp.float32) for number in numbers]
            if scale is not None:
                halves = [half * scale(number) for half, number in zip(halves, numbers, strict=True)]
            target[column(word, size, pitch), :] = to_words(*halves)

    height = -(-form.routing // SUBLANES) * SUBLANES
    return pl.pallas_call(
        kernel,
        name="ragged_moe_receive",
        grid=(blocks,),
        in_specs=[
            pl.BlockSpec((size, hidden), lambda block: (block, 0)),
            pl.BlockSpec((size, columns), lambda block: (block, hidden // columns)),
        ],
        out_specs=[
            pl.BlockSpec((size * pitch, LANES), lambda block: (block, 0)),
            pl.BlockSpec((height, LANES), lambda block: (0, block)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((tokens * pitch, LANES), jnp.uint32),
            jax.ShapeDtypeStruct((height, blocks * LANES), jnp.int32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
    )(packed, packed)


def _scales(words, form: Digits, dtype, size: int):
    """A function from the number of a block of 128 columns to what they are multiplied by [size, 1]; None for rows without
    scales."""
    if not form.scales:
        return None
    of_token = words[form.routing : form.words]
    if dtype == FP8:
        scale = lax.bitcast_convert_type(of_token, jnp.float32)
        scale = jnp.broadcast_to(scale, (SUBLANES, LANES)).T[:size, :1]
        return lambda number: scale
    if pad := -form.scales % SUBLANES:
        of_token = jnp.concatenate([of_token, jnp.zeros((pad, LANES), jnp.int32)])
    halves = [half.T[:size] for half in from_words(lax.bitcast_convert_type(of_token, jnp.uint32))]

    def of_block(number: int):
        upper, word = divmod(number, form.scales)
        return halves[upper][:, word : word + 1]

    return of_block


def _words(digits, form: Digits):
    """Digits [tokens, columns] float32 → words [in whole tiles of 8, 128] int32, tokens along the lanes."""
    if len(digits) < LANES:
        digits = jnp.concatenate([digits, jnp.zeros((LANES - len(digits), digits.shape[1]), jnp.float32)])
    digits = digits.T.astype(jnp.int32) - form.zero
    words = sum(digits[number * form.words : (number + 1) * form.words] << number * form.bits for number in range(form.count))
    pad = -form.words % SUBLANES
    return jnp.concatenate([words, jnp.zeros((pad, LANES), jnp.int32)]) if pad else words


assert BLOCK == LANES, "scales of int8 rows lie along whole tiles"
