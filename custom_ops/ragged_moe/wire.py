"""What a token carries to the experts, as columns of one array: its row, the row's scale, its experts and their weights.

All columns have the row's dtype, and what is no part of the row is cut into small integers that this dtype holds exactly: four
bits in FP8, eight in BF16, sixteen in FP32. So nothing between the two ends has to preserve bits that are no number, and on
TPU neither end has to bitcast the rows: XLA makes that a pass over all of them, because each dtype has tiles of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from custom_ops.ragged_moe.quantized import quantize_rows

FP8 = jnp.dtype("float8_e4m3fn")
_DIGIT_BITS = {1: 4, 2: 8, 4: 16}
"""Bits of an integer that a floating-point number of so many bytes holds exactly."""
ID_BITS = 16


class Digits(NamedTuple):
    """How the columns behind a row hold 32-bit words: the lowest digit of every word, then the next digits.

    The words are the weights, two experts each (the first half of a row's experts below, the others above), and the scale of
    an FP8 row.

    Attributes:
        bits: of a digit.
        words: of a token.
    """

    bits: int
    words: int

    @classmethod
    def of(cls, dtype, top_k: int) -> Digits:
        """For rows of this dtype."""
        return cls(_DIGIT_BITS[dtype.itemsize], top_k + (top_k + 1) // 2 + (dtype == FP8))

    @property
    def count(self) -> int:
        """Digits of a word."""
        return 32 // self.bits

    @property
    def columns(self) -> int:
        return self.count * self.words


class Tokens(NamedTuple):
    """Rows with their routing, see `custom_ops.ragged_moe`. row_scale is None where rows are not FP8."""

    rows: jax.Array
    row_scale: jax.Array | None
    expert: jax.Array
    weight: jax.Array


def to_wire(hidden, dtype) -> tuple[jax.Array, jax.Array | None]:
    """hidden [T, hidden size] as rows of `dtype`, and for FP8 their scales [T] float32."""
    return quantize_rows(hidden) if dtype == FP8 else (hidden.astype(dtype), None)


def pack(tokens: Tokens) -> jax.Array:
    """[T, `columns`] in the dtype of the rows."""
    dtype, top_k = tokens.rows.dtype, tokens.expert.shape[1]
    low, high = jnp.split(jnp.pad(tokens.expert.astype(jnp.uint32), ((0, 0), (0, top_k % 2))), 2, axis=1)
    words = [lax.bitcast_convert_type(tokens.weight, jnp.uint32), low | high << ID_BITS]
    if tokens.row_scale is not None:
        words.append(lax.bitcast_convert_type(tokens.row_scale[:, None], jnp.uint32))
    words, bits = jnp.concatenate(words, axis=1), Digits.of(dtype, top_k).bits
    digits = [(words >> shift & (1 << bits) - 1).astype(jnp.float32).astype(dtype) for shift in range(0, 32, bits)]
    return jnp.concatenate([tokens.rows, *digits], axis=1)


def unpack(packed, *, hidden: int, top_k: int) -> Tokens:
    """What was packed, of rows with `hidden` elements; rows keep the further columns."""
    form = Digits.of(packed.dtype, top_k)
    digits = jnp.split(packed[:, hidden:].astype(jnp.float32).astype(jnp.uint32), form.count, axis=1)
    words = sum(digit << (form.bits * number) for number, digit in enumerate(digits))
    weight, pairs = words[:, :top_k], words[:, top_k : top_k + (top_k + 1) // 2]
    expert = jnp.concatenate([pairs & (1 << ID_BITS) - 1, pairs >> ID_BITS], axis=1)[:, :top_k]
    row_scale = lax.bitcast_convert_type(words[:, -1], jnp.float32) if packed.dtype == FP8 else None
    return Tokens(packed, row_scale, expert.astype(jnp.int32), lax.bitcast_convert_type(weight, jnp.float32))


def columns(dtype, *, hidden: int, top_k: int) -> int:
    """Columns of a packed token; each takes as many bytes as an element of `dtype`."""
    dtype = jnp.dtype(dtype)
    return hidden + Digits.of(dtype, top_k).columns


def check_experts(num_experts: int) -> None:
    """Raises ValueError where an expert's number, or the one that stands for none, does not fit into its columns."""
    if num_experts >= 1 << ID_BITS:
        raise ValueError(f"{num_experts} experts: their numbers travel in {ID_BITS} bits, which hold {(1 << ID_BITS) - 1}")
