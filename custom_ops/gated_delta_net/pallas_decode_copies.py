"""The decode kernel's copies between the pools in HBM and its memory.

The state of sequence n arrives in place n modulo RING of `s_in`; states leave from the two places of `s_out` in turn. A
sequence without rows is not copied, one that starts from zero only on its way out. Sequences are counted over all tiles.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from custom_ops.gated_delta_net.pallas_decode_memory import RING, TILE, Tile
from custom_ops.gated_delta_net.tiling import LANES

START, WAIT = "start", "wait"
SLOT, CHECKPOINT = 0, 1
"""What a place of `s_out` is copied to."""


def _copy(source, target, semaphore, act: str) -> None:
    getattr(pltpu.make_async_copy(source, target, semaphore), act)()


def _is_loaded(tile: Tile, sequence):
    return (tile.operands.rows[sequence] > 0) & (tile.operands.fresh[sequence] == 0)


def load_state(tile: Tile, sequence, act: str) -> None:
    @pl.when(_is_loaded(tile, sequence))
    def _():
        place = sequence & (RING - 1)
        source = tile.operands.state_pool.at[tile.operands.slot[sequence]]
        _copy(source, tile.scratch.s_in.at[place], tile.scratch.in_sem.at[place], act)


def load_windows(tile: Tile, index, act: str) -> None:
    """The convolution windows of tile `index`, which is `tile` or the one after it."""
    half = index & 1
    for s in range(TILE):
        sequence = index * TILE + s

        @pl.when(_is_loaded(tile, sequence))
        def _(s=s, sequence=sequence):
            source = tile.operands.conv_pool.at[tile.operands.slot[sequence]]
            _copy(source, tile.scratch.c_in.at[half, s], tile.scratch.conv_sem.at[half], act)


def arrive(tile: Tile, sequence) -> None:
    """Wait for a sequence's state; one that begins is zero, whatever its slot holds."""
    load_state(tile, sequence, WAIT)

    @pl.when(tile.operands.fresh[sequence] == 1)
    def _():
        @pl.loop(0, tile.layout.shape.value_heads)
        def _(head):
            tile.scratch.s_in[sequence & (RING - 1), head] = jnp.zeros((LANES, LANES), tile.scratch.s_in.dtype)


def leave(tile: Tile, sequence, token, place) -> None:
    """Start copying the states after a sequence's token from `place`, to its slot and to a checkpoint as it demands."""
    rows, keep, pending = tile.operands.rows, tile.operands.keep, tile.scratch.pending

    @pl.when(rows[sequence] == token + 1)
    def _():
        pending[place, SLOT] = 1
        _store(tile, place, tile.operands.slot[sequence], START)

    if keep is not None:
        home = keep[sequence * tile.layout.tokens + token]

        @pl.when((rows[sequence] > token) & (home >= 0))
        def _():
            pending[place, CHECKPOINT] = 1
            _store(tile, place, home, START)


def drain(tile: Tile, place) -> None:
    """Wait for the copies that still read from `place`."""
    for kind in (SLOT, CHECKPOINT):

        @pl.when(tile.scratch.pending[place, kind] == 1)
        def _(kind=kind):
            _store(tile, place, 0, WAIT)
            tile.scratch.pending[place, kind] = 0


def _store(tile: Tile, place, home, act: str) -> None:
    pools = (tile.scratch.s_out, tile.operands.state_pool), (tile.scratch.c_out, tile.operands.conv_pool)
    for kind, (source, pool) in enumerate(pools):
        _copy(source.at[place], pool.at[home], tile.scratch.out_sem.at[kind, place], act)
