"""The chunk kernel's copies between the pools in HBM and its memory, and between those and the running state."""

from __future__ import annotations

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from custom_ops.gated_delta_net.pallas_chunk_memory import Chunk
from custom_ops.gated_delta_net.tiling import FIRST, FRESH, LANES

START, WAIT = "start", "wait"
UNROLLED = 4
"""Heads of a state that are moved together."""


def load(chunk: Chunk, index, act: str) -> None:
    """The states of the sequence that begins in chunk `index`, if one does and it is not new."""
    operands, scratch = chunk.operands, chunk.scratch

    @pl.when((operands.flags[index] & (FIRST | FRESH)) == FIRST)
    def _():
        slot = operands.slot[index]
        _copy(operands.state_pool.at[slot], scratch.s_in, scratch.in_sem.at[0], act)
        _copy(operands.conv_pool.at[slot], scratch.c_in.at[index & 1], scratch.in_sem.at[1], act)


def begin_sequence(chunk: Chunk) -> None:
    """Set the running state: to zero, whatever the slot holds, or to what was loaded."""
    scratch, heads = chunk.scratch, chunk.shape.value_heads

    @pl.when(chunk.is_fresh)
    def _():
        half = chunk.index & 1
        scratch.c_in[half] = jnp.zeros(scratch.c_in.shape[1:], scratch.c_in.dtype)

        def zero(h):
            scratch.state[h] = jnp.zeros((LANES, LANES), jnp.float32)

        chunk.loop(heads, zero, UNROLLED)

    @pl.when(jnp.logical_not(chunk.is_fresh))
    def _():
        def take(h):
            scratch.state[h] = scratch.s_in[h].astype(jnp.float32)

        chunk.loop(heads, take, UNROLLED)


def end_sequence(chunk: Chunk) -> None:
    """Start the copies of both states to the sequence's slot."""
    scratch = chunk.scratch
    drain(chunk)

    def give(h):
        scratch.s_out[h] = scratch.state[h].astype(scratch.s_out.dtype)

    chunk.loop(chunk.shape.value_heads, give, UNROLLED)
    scratch.pending[0] = 1
    _store(chunk, chunk.operands.slot[chunk.index], START)


def drain(chunk: Chunk) -> None:
    """Wait for the copies that still read from `s_out` and `c_out`."""

    @pl.when(chunk.scratch.pending[0] == 1)
    def _():
        _store(chunk, 0, WAIT)
        chunk.scratch.pending[0] = 0


def _store(chunk: Chunk, home, act: str) -> None:
    operands, scratch = chunk.operands, chunk.scratch
    _copy(scratch.s_out, operands.state_pool.at[home], scratch.out_sem.at[0], act)
    _copy(scratch.c_out, operands.conv_pool.at[home], scratch.out_sem.at[1], act)


def _copy(source, target, semaphore, act: str) -> None:
    getattr(pltpu.make_async_copy(source, target, semaphore), act)()
