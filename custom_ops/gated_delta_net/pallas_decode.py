"""The decode kernel: sequences with one row, or a window of a few, token after token in tiles of eight sequences.

For each value head, with growth = exp(g) and S as it was before the token:

    delta = beta (v - growth Sᵀk),  output = growth Sᵀq + (q·k) delta,  S ← growth S + k deltaᵀ

so one pass over S gives both Sᵀk and Sᵀq. The matrix unit takes S as its weights, as BF16 (an FP32 state as the sum of two),
and k and q as the sum of two BF16 rows each, which keeps them to 2⁻¹⁶. The update is bound by vector arithmetic (nine
operations for 2,048 elements); for a part of the heads of a BF16 state the matrix unit makes it too, as
growth ([1 | k] [S over deltaᵀ / growth]), where the product with 1 is exact.

While a sequence's state is updated, the next one's is read by the matrix unit, the one after is on its way from HBM and
the one before on its way back. What needs no state (convolution, norms, gates) is done for eight sequences at once.

Schedule for tpu7x, 16 key and 64 value heads, eight sequences, BF16 states: about 1,420 bundles before the first
state is updated and 1,440 for each sequence, 12,900 in all (5.9 µs at an assumed 2.2 GHz). The states take 32 MiB through
HBM, 9.1 µs at 3.69 TB/s, so that bytes bind. Vector arithmetic fills 960 bundles of a sequence's 1,440; the rest are those
in which the compiler begins with the weights of the next state's products, and it spills registers in that loop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from custom_ops.gated_delta_net.pallas_decode_copies import (
    START,
    WAIT,
    arrive,
    drain,
    leave,
    load_state,
    load_windows,
)
from custom_ops.gated_delta_net.pallas_decode_memory import RING, TILE, Layout, Operands, Scratch, Tile, declare
from custom_ops.gated_delta_net.pallas_decode_rows import clear_new_windows, convolve_key_head, spread_gates
from custom_ops.gated_delta_net.pallas_decode_state import (
    apply_delta_rule,
    put_window,
    read_state,
    set_constants,
    spread_keys,
    update_by_products,
    update_by_vectors,
)
from custom_ops.gated_delta_net.pallas_launch import launch
from custom_ops.gated_delta_net.shapes import GatedDeltaNetShape
from custom_ops.gated_delta_net.tiling import LANES


def _kernel(layout: Layout, rolled: bool, operands: Operands, scratch: Scratch) -> None:
    index, tiles = pl.program_id(0), pl.num_programs(0)
    tile = Tile(index, layout, operands, scratch, rolled)
    key_heads = layout.shape.key_heads

    @pl.when(index == 0)
    def _():
        for place in range(2):
            for kind in range(2):
                scratch.pending[place, kind] = 0
        load_windows(tile, index, START)
        load_state(tile, jnp.int32(0), START)
        load_state(tile, jnp.int32(1), START)

    @pl.when(index + 1 < tiles)
    def _():
        load_windows(tile, index + 1, START)

    load_windows(tile, index, WAIT)
    if layout.tokens == 1:
        arrive(tile, tile.first)
    set_constants(tile)
    clear_new_windows(tile)
    spread_gates(tile)

    def prepare_key_head(head):
        convolve_key_head(tile, head)
        if layout.tokens == 1:
            read_state(tile, 0, tile.first & (RING - 1), head)  # beside the convolution of the heads that follow

    tile.each(0, key_heads, prepare_key_head)
    if layout.tokens == 1:
        spread_keys(tile, 0)
        pl.loop(0, TILE)(functools.partial(_one_token, tile, tiles * TILE))
    else:
        pl.loop(0, layout.items)(functools.partial(_token_of_window, tile, tiles * TILE))

    @pl.when(index == tiles - 1)
    def _():
        drain(tile, 0)
        drain(tile, 1)


def _one_token(tile: Tile, sequences, s) -> None:
    """Update the state of a sequence with one row, which has been read, and read the next one's beside it."""
    by_vectors, key_heads = tile.layout.by_vectors, tile.layout.shape.key_heads
    sequence, place = tile.first + s, s & 1
    ring, next_ring = sequence & (RING - 1), (sequence + 1) & (RING - 1)
    following = jnp.minimum(s + 1, TILE - 1)  # after the last one a state is read that nobody uses
    # Before the branches below, so that the compiler does not delay it for the work that comes after them.
    apply_delta_rule(tile, s, s, 0)
    _advance(tile, sequence, sequences)
    drain(tile, place)

    @pl.when(s + 1 < TILE)
    def _():
        arrive(tile, sequence + 1)

    if tile.rolled:
        tile.each(0, by_vectors, functools.partial(update_by_vectors, tile, s, ring, place))
        tile.each(by_vectors, key_heads, functools.partial(update_by_products, tile, s, ring, place))
        tile.each(0, key_heads, functools.partial(read_state, tile, following, next_ring))
    else:
        for step, head in _interleaved(tile.layout):
            where = (following, next_ring) if step is read_state else (s, ring, place)
            step(tile, *where, head)
    spread_keys(tile, following)
    put_window(tile, s, 0, place)
    leave(tile, sequence, 0, place)


def _interleaved(layout: Layout) -> list[tuple[Callable[..., None], int]]:
    """Steps and key heads of `_one_token` in the order in which the compiler is given them.

    The products come in the first half, since arithmetic follows them; the reads, which only the next sequence waits for,
    begin a little later and last to the end; the updates by vectors fill the gaps.
    """
    by_vectors, key_heads = layout.by_vectors, layout.shape.key_heads

    def placed(step, heads, start, stop):
        return [(start + (stop - start) * n / len(heads), step, head) for n, head in enumerate(heads)]

    work = placed(update_by_products, range(by_vectors, key_heads), 0, 0.5)
    work += placed(update_by_vectors, range(by_vectors), 0.05, 1.05) + placed(read_state, range(key_heads), 0.3, 1)
    return [(step, head) for _, step, head in sorted(work, key=lambda entry: entry[0])]


def _token_of_window(tile: Tile, sequences, item) -> None:
    """Read and update the state of a sequence whose tokens follow one another in it."""
    layout, key_heads = tile.layout, tile.layout.shape.key_heads
    s, token = lax.div(item, layout.tokens), lax.rem(item, layout.tokens)
    sequence, place = tile.first + s, item & 1
    ring = sequence & (RING - 1)

    @pl.when(token == 0)
    def _():
        _advance(tile, sequence, sequences)
        arrive(tile, sequence)

    drain(tile, place)
    tile.each(0, key_heads, functools.partial(read_state, tile, item, ring))
    apply_delta_rule(tile, item, s, token)
    spread_keys(tile, item)
    tile.each(0, layout.by_vectors, functools.partial(update_by_vectors, tile, item, ring, place))
    tile.each(layout.by_vectors, key_heads, functools.partial(update_by_products, tile, item, ring, place))
    put_window(tile, s, token, place)
    leave(tile, sequence, token, place)


def _advance(tile: Tile, sequence, sequences) -> None:
    """Start the copy of the state after the next."""

    @pl.when(sequence + 2 < sequences)
    def _():
        load_state(tile, sequence + 2, START)


def decode_windows(
    qkv, b, a, conv_weight, a_log, dt_bias, rows, fresh, slot, keep, tiles, conv_pool, state_pool,
    *, shape: GatedDeltaNetShape, interpret: bool,
):
    """The first rows of sequences, in place.

    Args:
        qkv: [window, sequences, channels] row j of each sequence; the number of sequences is a multiple of `TILE`.
        b, a: [window, sequences, value heads] float32.
        rows: [sequences] int32, how many of them are tokens; 0 leaves the sequence's states alone.
        fresh: [sequences] int32, whether a sequence starts from zero.
        slot: [sequences] int32, read only for sequences with rows.
        keep: [sequences, window] int32 slots for the states after each row, -1 for none; or None.
        tiles: how many tiles of sequences to go through, a traced number; None for all of them.

    Returns:
        [window, sequences, value heads, 128], defined for the tiles gone through, and the pools.

    Between the rows of a window the state is rounded to the pool's dtype, as if they had come one call at a time.
    """
    tokens, sequences = qkv.shape[:2]
    key_heads, value_heads = shape.key_heads, shape.value_heads
    # As many products as the matrix unit has time for beside reading the states, an even number of three in eight heads.
    by_products = 3 * key_heads // 16 * 2 if state_pool.dtype == jnp.bfloat16 else 0
    layout = Layout(shape, tokens, conv_weight.shape[0] - 1, conv_pool.shape[1], by_products)
    scratch = declare(layout, conv_pool.dtype, state_pool.dtype)
    scalars = [slot, rows, fresh] + ([] if keep is None else [keep.reshape(-1)])

    def kernel(*refs):
        split = len(refs) - len(scratch)
        scalar_refs = refs[: len(scalars)] + (() if keep is not None else (None,))
        qkv, b, a, conv_weight, a_log, dt_bias, _, _, *results = refs[len(scalars) : split]
        operands = Operands(*scalar_refs, qkv, b, a, conv_weight, a_log, dt_bias, *results)
        _kernel(layout, interpret, operands, Scratch(*refs[split:]))

    def of_tile(array):
        trailing = array.shape[2:]
        return pl.BlockSpec((tokens, TILE, *trailing), lambda tile, *_: (0, tile, *(0 for _ in trailing)))

    return launch(
        kernel, "gated_delta_net_decode", scalars, (qkv, b, a), (conv_weight, a_log, dt_bias), (conv_pool, state_pool),
        steps=sequences // TILE if tiles is None else tiles, of_rows=of_tile,
        output=jax.ShapeDtypeStruct((tokens, sequences, value_heads, LANES), qkv.dtype),
        scratch=scratch, vmem_bytes=60 * 2**20, interpret=interpret,
    )  # fmt: skip
