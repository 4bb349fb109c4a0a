"""The chunk kernel's stages that need the rows alone: gates, convolution, norms, products of keys and queries."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from custom_ops.gated_delta_net.pallas_arithmetic import dot, iota, one_where, side_by_side, softplus, split, split_exactly
from custom_ops.gated_delta_net.pallas_chunk_memory import AHEAD, Chunk
from custom_ops.gated_delta_net.tiling import CHUNK, LANES

NORM_EPSILON = 1e-6


def set_selectors(chunk: Chunk) -> None:
    """`onehot`: columns 128 h and on have 1 where a row belongs to value head h of three parts of the gates."""
    heads, onehot = chunk.shape.value_heads, chunk.scratch.onehot

    def fill(h):
        lanes = pl.ds(pl.multiple_of(h * LANES, LANES), LANES)
        onehot[:, lanes] = one_where(lax.rem(iota((3 * heads, LANES), 0), heads) == h)

    chunk.loop(heads, fill, 2)


def prepare_rows(chunk: Chunk, valid) -> None:
    """All that is known of the rows before the state is read. valid: [64, 128], see `Chunk.valid`."""
    gates = _gates(chunk)
    chunk.together(
        (chunk.shape.key_heads, functools.partial(_convolve_key_head, chunk, valid)),
        (chunk.shape.value_heads // 2, functools.partial(_spread_gates, chunk, gates)),
        most=4,
    )


def _gates(chunk: Chunk):
    """g summed up to each row and beta; both are 0 in rows that are not the sequence's.

    Writes them as rows of pairs; returns three exact BF16 parts of [g over beta] side by side, [128, 3 * value heads].
    """
    operands, scratch, heads = chunk.operands, chunk.scratch, chunk.shape.value_heads
    valid = chunk.valid(heads)
    g = jnp.where(valid, -jnp.exp(operands.a_log[...]) * softplus(operands.a[...] + operands.dt_bias[...]), 0)
    beta = jnp.where(valid, jax.nn.sigmoid(operands.b[...]), 0)
    ones = one_where(iota((CHUNK, CHUNK), 0) >= iota((CHUNK, CHUNK), 1))
    total = sum(dot(ones, part) for part in reversed(split_exactly(g)))
    for x, rows in ((total, scratch.total_row), (beta, scratch.beta_row)):
        scratch.turned[...] = jnp.concatenate([x.T, x.T], axis=1)
        rows[...] = side_by_side(*(scratch.turned[pl.ds(n, heads // 2, stride=2)] for n in range(2)))
    return jnp.concatenate([jnp.concatenate(split_exactly(x), axis=1) for x in (total, beta)])


def _spread_gates(chunk: Chunk, gates, p) -> None:
    """A pair's columns of both gates, copied over all lanes; products with 0 and 1 are exact."""
    lanes = pl.ds(pl.multiple_of(2 * p * LANES, 2 * LANES), 2 * LANES)
    both = dot(gates, chunk.scratch.onehot[:, lanes])
    for n in range(2):
        mine = slice(n * LANES, (n + 1) * LANES)
        chunk.scratch.total_column[2 * p + n], chunk.scratch.beta_column[2 * p + n] = both[:CHUNK, mine], both[CHUNK:, mine]


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
    """SiLU of the convolution of the rows, channels 128 c and on: [64, 128]. Writes the window after the last row."""
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
    half = y * 0.5
    return half * jnp.tanh(half) + half
