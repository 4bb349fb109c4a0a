"""The chunk kernel's stages that need the rows alone: gates, convolution, norms, products of keys and queries."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from custom_ops.gated_delta_net.pallas_arithmetic import (
    dot,
    iota,
    one_where,
    side_by_side,
    softplus,
    split,
    split_exactly,
)
from custom_ops.gated_delta_net.pallas_chunk_memory import AHEAD, Chunk
from custom_ops.gated_delta_net.tiling import CHUNK, LANES

NORM_EPSILON = 1e-6
LOG2_E = math.log2(math.e)


def prepare_rows(chunk: Chunk, valid) -> None:
    """All that is known of the rows before the state is read. valid: [64, 128], see `Chunk.valid`."""
    _gates(chunk)
    chunk.loop(chunk.shape.key_heads, functools.partial(_convolve_key_head, chunk, valid), 4)


def _gates(chunk: Chunk) -> None:
    """What follows from g and beta, which are 0 in rows that are not the sequence's; see `Scratch` in `declare`."""
    operands, scratch, heads = chunk.operands, chunk.scratch, chunk.shape.value_heads
    valid = chunk.valid(heads)
    g = jnp.where(valid, -jnp.exp(operands.a_log[...]) * softplus(operands.a[...] + operands.dt_bias[...]), 0)
    beta = jnp.where(valid, jax.nn.sigmoid(operands.b[...]), 0)
    ones = one_where(iota((CHUNK, CHUNK), 0) >= iota((CHUNK, CHUNK), 1))
    total = sum(dot(ones, part) for part in reversed(split_exactly(g * LOG2_E)))
    columns = (
        (scratch.total, total),
        (scratch.beta, beta),
        (scratch.growth, jnp.exp2(total)),
        (scratch.damping, jnp.exp2(total[CHUNK - 1 :] - total)),
    )
    for gate, value in columns:
        gate[:, :heads] = value
    for x, rows in ((total, scratch.total_row), (beta, scratch.beta_row)):
        scratch.turned[...] = jnp.concatenate([x.T, x.T], axis=1)
        rows[...] = side_by_side(*(scratch.turned[pl.ds(n, heads // 2, stride=2)] for n in range(2)))


def _convolve_key_head(chunk: Chunk, valid, head) -> None:
    """The BF16 parts of a key head's k and q, which have norm 1 (q then 128^-1/2), k kᵀ and q kᵀ; its group's v."""
    scratch, group = chunk.scratch, chunk.shape.group
    first = head * (group + 2)
    q, k = _convolve(chunk, valid, first), _convolve(chunk, valid, first + 1)
    parts = split(jnp.concatenate([_normalized(k), _normalized(q, LANES**-0.5)]))
    scratch.keys[head, 0], scratch.keys[head, 1] = parts
    twice = [jnp.concatenate([x[:CHUNK], x[:CHUNK]]) for x in parts]
    left, right = jnp.concatenate([*parts, parts[0]], axis=1), jnp.concatenate([twice[0], *twice], axis=1)
    products = dot(left, right, ((1,), (1,)))
    scratch.key_products[head], scratch.query_products[head] = products[:CHUNK], products[CHUNK:]
    for h in range(group):
        scratch.values[head * group + h] = _convolve(chunk, valid, first + 2 + h)


def _normalized(x, norm: float = 1.0):
    return x * (lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) + NORM_EPSILON) * norm)


def _convolve(chunk: Chunk, valid, c):
    """SiLU of the convolution of the rows, channels 128 c and on: [64, 128]. Writes the window after the last row.

    The weights are half of those of the convolution, since SiLU of x is h + h tanh(h) with h = x / 2.
    """
    operands, scratch = chunk.operands, chunk.scratch
    inputs, weight = scratch.inputs, operands.conv_weight
    history = weight.shape[0] - 1
    lanes = pl.ds(pl.multiple_of(c * LANES, LANES), LANES)
    # What comes before the sequence's first row of this block: its window, or the last rows of the block before.
    window = scratch.c_in[chunk.index & 1, :history, lanes].astype(jnp.float32)
    before = jnp.where(chunk.is_first, window, inputs[c, AHEAD + CHUNK - history :])
    inputs[c, :AHEAD] = jnp.zeros((AHEAD, LANES), jnp.float32)
    inputs[c, AHEAD:] = jnp.where(valid, operands.qkv[:, lanes].astype(jnp.float32), 0)
    inputs[c, pl.ds(chunk.begin + AHEAD - history, history)] = before
    y = inputs[c, AHEAD:] * weight[history : history + 1, lanes]
    for e in range(history):
        y += inputs[c, pl.ds(AHEAD - history + e, CHUNK)] * weight[e : e + 1, lanes]
    scratch.c_out[:history, lanes] = inputs[c, pl.ds(chunk.end + AHEAD - history, history)].astype(scratch.c_out.dtype)
    return y * jnp.tanh(y) + y
