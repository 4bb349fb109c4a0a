"""The decode kernel's work on the states of one item (`pallas_decode_memory`): reading, the delta rule, the update.

`ring` is the place of the sequence's state in `s_in`, `place` where it goes in `s_out`.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax.experimental import pallas as pl

from custom_ops.gated_delta_net.pallas_arithmetic import dot, iota, one_where, split, top_half
from custom_ops.gated_delta_net.pallas_decode_memory import OUTER_ROWS, Tile
from custom_ops.gated_delta_net.tiling import LANES


def set_constants(tile: Tile) -> None:
    """The rows of `outer` that no item writes, and the unit matrix."""
    outer, eye = tile.scratch.outer, tile.scratch.eye
    outer[...] = jnp.zeros(outer.shape, jnp.float32)
    eye[...] = one_where(iota(eye.shape, 0) == iota(eye.shape, 1))


def read_state(tile: Tile, item, ring, head) -> None:
    """Sᵀ of a key head's value heads times the parts of its k and q, into `read`."""
    scratch, group = tile.scratch, tile.layout.shape.group
    left = _keys_and_queries(tile, item, head)
    pair = 2 if group % 2 == 0 else 1  # a product has room for 256 columns
    for first in range(0, group, pair):
        h = head * group + first
        state = jnp.concatenate([scratch.s_in[ring, h + n] for n in range(pair)], axis=1)
        halves = (state,) if state.dtype == jnp.bfloat16 else split(state)
        result = sum(dot(left, half) for half in halves)
        for n in range(pair):
            scratch.read[pl.ds(h + n, 4, stride=tile.layout.value_rows)] = result[:, n * LANES : (n + 1) * LANES]


def _keys_and_queries(tile: Tile, item, head):
    """Top and rest of a key head's k, then of its q: [4, 128]."""
    return tile.scratch.parts[pl.ds(head * tile.layout.part_rows + 4 * item, 4)].astype(jnp.bfloat16)


def apply_delta_rule(tile: Tile, item, sequence, token) -> None:
    """delta of all value heads from what was read, and the token's output. The sequence is counted in the tile."""
    layout, scratch, heads = tile.layout, tile.scratch, tile.layout.shape.value_heads
    growth, beta = (gate[pl.ds(item * heads, heads)] for gate in (scratch.growth, scratch.betas))
    mine = pl.ds(item * layout.value_rows, heads)
    k_top, k_rest, q_top, q_rest = (
        scratch.read[part * layout.value_rows : part * layout.value_rows + heads] for part in range(4)
    )
    delta = beta * (scratch.values[mine] - growth * (k_top + k_rest))
    scratch.delta[...] = delta
    if layout.by_products:
        first = layout.first_outer
        # Rows for a product with the four of `_keys_and_queries`, twice: (k top + k rest) top + k top rest.
        scaled = delta[first:] / growth[first:]
        top = top_half(scaled)
        for row, value in ((0, top), (1, top), (4, scaled - top)):
            scratch.outer[pl.ds(row, heads - first, stride=OUTER_ROWS)] = value
    output = growth * (q_top + q_rest) + scratch.product[mine] * delta
    taken = tile.operands.rows[tile.first + sequence] > token
    tile.operands.out[token, sequence] = jnp.where(taken, output, 0).astype(tile.operands.out.dtype)


def spread_keys(tile: Tile, item) -> None:
    """k as a column copied over all lanes, for the heads that are updated by vectors."""
    count, stride = tile.layout.by_vectors, tile.layout.part_rows
    top, rest = (tile.scratch.parts[pl.ds(4 * item + part, count, stride=stride)] for part in range(2))
    turned = (top + rest).T
    for head in range(count):
        tile.scratch.columns[head] = jnp.broadcast_to(turned[:, head : head + 1], (LANES, LANES))


def update_by_vectors(tile: Tile, item, ring, place, head) -> None:
    """growth S + k deltaᵀ of a key head's value heads."""
    scratch, shape = tile.scratch, tile.layout.shape
    for n in range(shape.group):
        h = head * shape.group + n
        growth = scratch.growth[pl.ds(item * shape.value_heads + h, 1)]
        state = scratch.s_in[ring, h].astype(jnp.float32)
        _put(tile, ring, place, h, state * growth + scratch.columns[head] * scratch.delta[pl.ds(h, 1)])


def update_by_products(tile: Tile, item, ring, place, head) -> None:
    """growth ([1 | k] [S over deltaᵀ / growth]) of a key head's value heads."""
    scratch, shape = tile.scratch, tile.layout.shape
    parts = _keys_and_queries(tile, item, head)
    left = jnp.concatenate([scratch.eye[...], jnp.concatenate([parts] * 4).T], axis=1)
    empty = jnp.zeros((8, LANES), jnp.float32)
    right = []
    for n in range(shape.group):
        h = head * shape.group + n
        delta = scratch.outer[pl.ds(OUTER_ROWS * (h - tile.layout.first_outer), 8)]
        right.append(jnp.concatenate([scratch.s_in[ring, h], jnp.concatenate([delta, empty]).astype(jnp.bfloat16)]))
    result = dot(left, jnp.concatenate(right, axis=1))
    for n in range(shape.group):
        h = head * shape.group + n
        growth = scratch.growth[pl.ds(item * shape.value_heads + h, 1)]
        _put(tile, ring, place, h, result[:, n * LANES : (n + 1) * LANES] * growth)


def _put(tile: Tile, ring, place, h, state) -> None:
    state = state.astype(tile.scratch.s_out.dtype)
    tile.scratch.s_out[place, h] = state
    if tile.layout.tokens > 1:
        tile.scratch.s_in[ring, h] = state  # what the window's next token finds


def put_window(tile: Tile, sequence, token, place) -> None:
    """The convolution's window after a sequence's token, into `c_out`. The sequence is counted in the tile."""
    layout, scratch = tile.layout, tile.scratch
    for c in range(layout.shape.channels // LANES):
        rows = scratch.window[c, pl.ds(sequence * layout.span + token + 1, layout.history)]
        scratch.c_out[place, : layout.history, c * LANES : (c + 1) * LANES] = rows.astype(scratch.c_out.dtype)
