"""Rows in eight-bit integers, with a scale for each block of columns.

An int8 code has an even step over its block, a 254th of the block's range, where e4m3 has three bits of mantissa: for values
that lie around zero like those of a hidden state, its error is a quarter as large in the same byte. Scales are numbers that
BF16 holds, so that each travels in two bytes.

`quantize` is made of elementwise operations and a reduction along the last axis: XLA and the kernels compute the same with it.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

INT8 = jnp.dtype("int8")
BLOCK = 128
"""Columns of a row that share a scale; the last of them may be fewer."""
LARGEST = 127
_LOWER_HALF = 0xFFFF


def blocks_of(columns: int) -> int:
    """Scales of a row."""
    return -(-columns // BLOCK)


def quantize(values):
    """[..., n] float32 whose last axis shares a scale → int8 codes of the same shape, rounded to the nearest, to an even one
    between two, and the scale [..., 1] float32 that they are multiplied by.

    The scale of values of which one is not finite is NaN, that of zeros the smallest normal number.
    """
    magnitude = jnp.abs(values)
    largest = jnp.max(jnp.where(magnitude < jnp.inf, magnitude, jnp.inf), axis=-1, keepdims=True)  # NaN counts as infinity
    sound = largest < jnp.inf
    scale = _up_to_bfloat16(jnp.maximum(largest / LARGEST, jnp.finfo(jnp.float32).tiny))
    codes = jnp.round(jnp.where(sound, values, 0) * (1 / scale))
    # By way of int32: on TPU no float becomes a byte at once.
    return codes.astype(jnp.int32).astype(INT8), jnp.where(sound, scale, jnp.nan)


def quantize_rows(rows):
    """[rows, columns] → int8, and the scale of each row's blocks [rows, `blocks_of(columns)`] float32."""
    count, columns = rows.shape
    padded = jnp.pad(rows.astype(jnp.float32), ((0, 0), (0, -columns % BLOCK)))
    codes, scale = quantize(padded.reshape(count, -1, BLOCK))
    return codes.reshape(count, -1)[:, :columns], scale[..., 0]


def dequantize_rows(codes, scale):
    """What `quantize_rows` made, as [rows, columns] float32; a block whose scale is NaN is NaN throughout."""
    return codes.astype(jnp.float32) * jnp.repeat(scale, BLOCK, axis=1)[:, : codes.shape[1]]


def _up_to_bfloat16(positive):
    """The next number that BF16 holds: rounded down, a scale would make a code of more than `LARGEST` of its largest value."""
    bits = lax.bitcast_convert_type(positive, jnp.uint32) + _LOWER_HALF
    return lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF << 16), jnp.float32)
