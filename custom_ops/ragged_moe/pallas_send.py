"""The kernel before the all-gather: routing, and each token as the columns in which it travels (see `wire`).

XLA makes some twenty small programs of this, each of a microsecond or more whatever the tokens, and sorts all experts of a row
for its ten largest. Here a row stays in registers: the largest is taken and struck out, `top_k` times.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from custom_ops.ragged_moe import int8_rows
from custom_ops.ragged_moe.int8_rows import INT8
from custom_ops.ragged_moe.quantized import FP8, FP8_LARGEST
from custom_ops.ragged_moe.wire import ID_BITS, Digits, columns

LANES = 128
BLOCK_ROWS = 32


def send(hidden, router_logits, valid, *, top_k: int, round_weights: bool, wire, interpret: bool = False):
    """Arguments as in `custom_ops.ragged_moe` → packed tokens [T, `wire.columns`] in the dtype of the wire."""
    tokens, size = hidden.shape
    experts, wire = router_logits.shape[1], jnp.dtype(wire)
    block, width = min(tokens, BLOCK_ROWS), columns(wire, hidden=size, top_k=top_k)

    def of_block(columns):
        return pl.BlockSpec((block, columns), lambda number: (number, 0))

    return pl.pallas_call(
        functools.partial(_send_block, top_k=top_k, rounded=hidden.dtype if round_weights else jnp.float32),
        name="ragged_moe_send",
        grid=(-(-tokens // block),),
        in_specs=[of_block(size), of_block(experts), of_block(1)],
        out_specs=of_block(width),
        out_shape=jax.ShapeDtypeStruct((tokens, width), wire),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
    )(hidden, router_logits.astype(jnp.float32), valid.astype(jnp.int32)[:, None])


def _send_block(hidden, logits, valid, out, *, top_k: int, rounded) -> None:
    size, dtype = hidden.shape[1], out.dtype
    expert, weight = _route(logits[...], top_k)
    expert = [jnp.where(valid[...] > 0, number, logits.shape[1]) for number in expert]
    words = [*(_bits(part.astype(rounded).astype(jnp.float32)) for part in weight), *_paired(expert)]
    if dtype == INT8:
        words += _paired([lax.shift_right_logical(_bits(scale), ID_BITS) for scale in _quantize_blocks(hidden, out)])
    elif dtype == FP8:
        rows, scale = _quantize(hidden[...].astype(jnp.float32))
        out[:, :size] = rows
        words.append(_bits(scale))
    else:
        out[:, :size] = hidden[...].astype(dtype)
    digits = Digits.of(dtype, hidden=size, top_k=top_k)
    lane = lax.broadcasted_iota(jnp.int32, (hidden.shape[0], -(-digits.columns // LANES) * LANES), 1)
    group = sum((lane >= digits.words * number).astype(jnp.int32) for number in range(1, digits.count))
    place, value = lane - digits.words * group, jnp.zeros_like(lane)
    for number, word in enumerate(words):
        value = jnp.where(place == number, word, value)
    value = lax.shift_right_logical(value, digits.bits * group) & ((1 << digits.bits) - 1)
    value = value[:, : digits.columns] + digits.zero
    out[:, size:] = (value if dtype == INT8 else value.astype(jnp.float32)).astype(dtype)


def _route(logits, top_k: int):
    """As `routing.route`, for rows that are all valid: `top_k` experts and weights [rows, 1] each."""
    count = logits.shape[1]
    number = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    share = jnp.exp(logits - jnp.max(logits, axis=1, keepdims=True))
    total = jnp.sum(share, axis=1, keepdims=True)
    sound = total < jnp.inf  # neither NaN, nor of an infinite logit
    share = jnp.where(sound, share / total, 0)
    expert, weight = [], []
    for _ in range(top_k):
        largest = jnp.max(share, axis=1, keepdims=True)
        first = jnp.min(jnp.where(share == largest, number, count), axis=1, keepdims=True)
        share = jnp.where(number == first, -1.0, share)
        expert.append(first)
        weight.append(largest)
    chosen = sum(weight)
    return expert, [jnp.where(sound, part / chosen, jnp.nan) for part in weight]


def _quantize(rows):
    """As `quantized.quantize_rows`."""
    finite = jnp.abs(rows) < jnp.inf
    sound = jnp.min(jnp.where(finite, 1.0, 0.0), axis=1, keepdims=True) > 0
    rows = jnp.where(finite, rows, 0)
    scale = jnp.max(jnp.abs(rows), axis=1, keepdims=True) / FP8_LARGEST
    scale = jnp.maximum(scale, jnp.finfo(jnp.float32).tiny)
    return (rows / scale).astype(FP8), jnp.where(sound, scale, jnp.nan)


def _quantize_blocks(hidden, out) -> list:
    """As `int8_rows.quantize_rows`: codes into the first columns of `out`, the scales [rows, 1] of each block."""
    scales = []
    for first in range(0, hidden.shape[1], int8_rows.BLOCK):
        columns = pl.ds(first, int8_rows.BLOCK)
        out[:, columns], scale = int8_rows.quantize(hidden[:, columns].astype(jnp.float32))
        scales.append(scale)
    return scales


def _paired(numbers: list) -> list:
    """Numbers of sixteen bits two in a word, the first half of them below the others."""
    half = (len(numbers) + 1) // 2
    above = [*numbers[half:], jnp.zeros_like(numbers[0])][:half]
    return [low | high << ID_BITS for low, high in zip(numbers[:half], above, strict=True)]


def _bits(value):
    return lax.bitcast_convert_type(value, jnp.int32)
