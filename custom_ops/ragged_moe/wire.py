"""What a token carries to the experts, as columns of one array: its row, the row's scales, its experts and their weights.

All columns have the row's dtype, and what is no part of the row is cut into small integers that this dtype holds exactly: four
bits in FP8, eight in int8 and BF16, sixteen in FP32. So nothing between the two ends has to preserve bits that are no number,
and on TPU neither end has to bitcast the rows: XLA makes that a pass over all of them, because each dtype has tiles of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from custom_ops.ragged_moe import int8_rows, quantized
from custom_ops.ragged_moe.int8_rows import INT8

FP8 = jnp.dtype("float8_e4m3fn")
FOR_FP8_WEIGHTS = INT8
"""What rows travel in where experts' weights are FP8, on a TPU and unless another wire is asked for: as few bytes as FP8 rows,
and a quarter of their rounding error."""
_DIGIT_BITS = {1: 4, 2: 8, 4: 16}
"""Bits of an integer that a floating-point number of so many bytes holds exactly."""
ID_BITS = 16
"""Of an expert's number; two of them are a word, and so are the scales of two blocks of an int8 row, numbers of BF16."""


class Digits(NamedTuple):
    """How the columns behind a row hold 32-bit words: the lowest digit of every word, then the next digits.

    The words are the weights, two experts each (the first half of a row's experts below, the others above), and the scale of
    an FP8 row or, two each in the same way, those of an int8 row's blocks.

    Attributes:
        bits: of a digit.
        routing: words of weights and experts.
        scales: words of scales, which come last.
        zero: the number that stands for the digit 0; the others follow it.
    """

    bits: int
    routing: int
    scales: int
    zero: int

    @classmethod
    def of(cls, dtype, *, hidden: int, top_k: int) -> Digits:
        """For rows of this dtype with `hidden` elements."""
        routing = top_k + _pairs(top_k)
        if dtype == INT8:
            return cls(8, routing, _pairs(int8_rows.blocks_of(hidden)), -128)
        return cls(_DIGIT_BITS[dtype.itemsize], routing, int(dtype == FP8), 0)

    @property
    def words(self) -> int:
        """Of a token."""
        return self.routing + self.scales

    @property
    def count(self) -> int:
        """Digits of a word."""
        return 32 // self.bits

    @property
    def columns(self) -> int:
        return self.count * self.words

    @property
    def largest(self) -> int:
        """The number that stands for the largest digit."""
        return self.zero + (1 << self.bits) - 1


class Tokens(NamedTuple):
    """Rows with their routing, see `custom_ops.ragged_moe`. row_scale is [T] for FP8 rows, [T, blocks] for int8 rows (see
    `int8_rows`), and None for others."""

    rows: jax.Array
    row_scale: jax.Array | None
    expert: jax.Array
    weight: jax.Array


def to_wire(hidden, dtype) -> tuple[jax.Array, jax.Array | None]:
    """hidden [T, hidden size] as rows of `dtype`, and the float32 scales of those that have any."""
    if dtype == INT8:
        return int8_rows.quantize_rows(hidden)
    return quantized.quantize_rows(hidden) if dtype == FP8 else (hidden.astype(dtype), None)


def from_wire(rows, row_scale, dtype) -> tuple[jax.Array, jax.Array | None]:
    """Rows as local experts take them: in FP8 with the scale of each, or in `dtype`."""
    if rows.dtype == INT8:
        return int8_rows.dequantize_rows(rows, row_scale).astype(dtype), None
    return (rows, row_scale) if rows.dtype == FP8 else (rows.astype(dtype), None)


def pack(tokens: Tokens) -> jax.Array:
    """[T, `columns`] in the dtype of the rows."""
    dtype, top_k = tokens.rows.dtype, tokens.expert.shape[1]
    form = Digits.of(dtype, hidden=tokens.rows.shape[1], top_k=top_k)
    words = [lax.bitcast_convert_type(tokens.weight, jnp.uint32), _paired(tokens.expert.astype(jnp.uint32))]
    if dtype == FP8:
        words.append(lax.bitcast_convert_type(tokens.row_scale[:, None], jnp.uint32))
    elif dtype == INT8:
        words.append(_paired(lax.bitcast_convert_type(tokens.row_scale, jnp.uint32) >> 16))
    words = jnp.concatenate(words, axis=1)
    digits = [(words >> shift & (1 << form.bits) - 1).astype(jnp.float32) + form.zero for shift in range(0, 32, form.bits)]
    return jnp.concatenate([tokens.rows, *(digit.astype(dtype) for digit in digits)], axis=1)


def unpack(packed, *, hidden: int, top_k: int) -> Tokens:
    """What was packed, of rows with `hidden` elements; rows keep the further columns."""
    dtype, form = packed.dtype, Digits.of(packed.dtype, hidden=hidden, top_k=top_k)
    digits = (packed[:, hidden:].astype(jnp.float32) - form.zero).astype(jnp.uint32)
    words = sum(digit << (form.bits * number) for number, digit in enumerate(jnp.split(digits, form.count, axis=1)))
    weight, pairs, scales = jnp.split(words, (top_k, form.routing), axis=1)
    row_scale = None
    if dtype == FP8:
        row_scale = lax.bitcast_convert_type(scales[:, 0], jnp.float32)
    elif dtype == INT8:
        row_scale = lax.bitcast_convert_type(_unpaired(scales, int8_rows.blocks_of(hidden)) << 16, jnp.float32)
    expert = _unpaired(pairs, top_k).astype(jnp.int32)
    return Tokens(packed, row_scale, expert, lax.bitcast_convert_type(weight, jnp.float32))


def _pairs(count: int) -> int:
    return (count + 1) // 2


def _paired(numbers):
    """[T, n] uint32 of sixteen bits → [T, `_pairs(n)`], the first half of them below the others."""
    low, high = jnp.split(jnp.pad(numbers, ((0, 0), (0, numbers.shape[1] % 2))), 2, axis=1)
    return low | high << ID_BITS


def _unpaired(words, count: int):
    """What was paired, of `count` numbers each."""
    return jnp.concatenate([words & (1 << ID_BITS) - 1, words >> ID_BITS], axis=1)[:, :count]


def columns(dtype, *, hidden: int, top_k: int) -> int:
    """Columns of a packed token; each takes as many bytes as an element of `dtype`."""
    dtype = jnp.dtype(dtype)
    return hidden + Digits.of(dtype, hidden=hidden, top_k=top_k).columns


def check_experts(num_experts: int) -> None:
    """Raises ValueError where an expert's number, or the one that stands for none, does not fit into its columns."""
    if num_experts >= 1 << ID_BITS:
        raise ValueError(f"{num_experts} experts: their numbers travel in {ID_BITS} bits, which hold {(1 << ID_BITS) - 1}")
