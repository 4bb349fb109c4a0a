"""What the decode kernel computes of a tile's rows alone, eight sequences to a register: gates, convolution, norms."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from custom_ops.gated_delta_net.pallas_arithmetic import dot, iota, one_where, softplus, split_exactly, top_half
from custom_ops.gated_delta_net.pallas_decode_memory import TILE, Tile
from custom_ops.gated_delta_net.tiling import LANES

LEAST = 1e-30
"""Lower bound of exp(g), so that dividing by it is possible; it stands for 0."""
NORM_EPSILON = 1e-6


def clear_new_windows(tile: Tile) -> None:
    """A sequence that begins has zeros before its first row, whatever its slot holds."""
    windows, fresh = tile.scratch.c_in, tile.operands.fresh
    is_new = [fresh[tile.first + s] == 1 for s in range(TILE)]

    @pl.when(functools.reduce(jnp.logical_or, is_new))
    def _():
        @pl.loop(0, TILE)
        def _(s):
            @pl.when(fresh[tile.first + s] == 1)
            def _():
                windows[tile.parity, s] = jnp.zeros(windows.shape[2:], windows.dtype)


def spread_gates(tile: Tile) -> None:
    """exp(g) and beta of every item and value head as rows of 128 equal lanes."""
    layout, operands, scratch = tile.layout, tile.operands, tile.scratch
    # One exact product turns gates, copies them over all lanes and sorts them by sequence: [heads, sequences * lanes].
    source, target = (iota((3 * TILE, TILE * LANES), axis) for axis in (0, 1))
    spread = one_where(lax.rem(source, TILE) == lax.div(target, LANES))
    heads = layout.shape.value_heads
    for j in range(layout.tokens):
        g = -jnp.exp(operands.a_log[...]) * softplus(operands.a[j] + operands.dt_bias[...])
        growth, beta = jnp.maximum(jnp.exp(g), LEAST), jax.nn.sigmoid(operands.b[j])
        for gates, value in ((scratch.growth, growth), (scratch.betas, beta)):
            copies = dot(jnp.concatenate(split_exactly(value)), spread, ((0,), (0,)))
            for s in range(TILE):
                gates[pl.ds((s * layout.tokens + j) * heads, heads)] = copies[:, s * LANES : (s + 1) * LANES]


def convolve_key_head(tile: Tile, head) -> None:
    """Of every item and a key head: the BF16 parts of k and q, which have norm 1 (q then 128^-1/2), and q·k; its group's v."""
    layout, scratch = tile.layout, tile.scratch
    group, tokens = layout.shape.group, layout.tokens
    first = head * (group + 2)  # of its 128 channels: q, k, and a group of v
    for j in range(tokens):
        q, k = (_convolve(tile, c, j) for c in (first, first + 1))
        q, k = _normalized(q, LANES**-0.5), _normalized(k)
        q_dot_k = jnp.broadcast_to(jnp.sum(q * k, axis=1, keepdims=True), (TILE, LANES))
        for part, value in enumerate((top_half(k), k - top_half(k), top_half(q), q - top_half(q))):
            scratch.parts[pl.ds(head * layout.part_rows + 4 * j + part, TILE, stride=4 * tokens)] = value
        for h in range(group):
            rows = pl.ds(j * layout.value_rows + head * group + h, TILE, stride=layout.value_rows * tokens)
            scratch.product[rows] = q_dot_k
            scratch.values[rows] = _convolve(tile, first + 2 + h, j)


def _normalized(x, norm: float = 1.0):
    return x * (lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) + NORM_EPSILON) * norm)


def _convolve(tile: Tile, c, token: int):
    """SiLU of the convolution at one token of every sequence, channels 128 c and on: [TILE, 128]."""
    history, span = tile.layout.history, tile.layout.span
    window, conv_weight = tile.scratch.window, tile.operands.conv_weight
    lanes = pl.ds(pl.multiple_of(c * LANES, LANES), LANES)
    if token == 0:
        for s in range(TILE):
            window[c, span * s : span * s + history] = tile.scratch.c_in[tile.parity, s, :history, lanes].astype(
                jnp.float32
            )
    x = tile.operands.qkv[token, :, lanes].astype(jnp.float32)
    window[c, pl.ds(history + token, TILE, stride=span)] = x
    y = x * conv_weight[history : history + 1, lanes]
    for e in range(history):
        y += window[c, pl.ds(token + e, TILE, stride=span)] * conv_weight[e : e + 1, lanes]
    return y * jax.nn.sigmoid(y)
