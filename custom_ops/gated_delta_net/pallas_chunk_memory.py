"""What the chunk kernel keeps in memory, and the chunk at hand. A pair is two value heads side by side in 128 lanes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from custom_ops.gated_delta_net.pallas_arithmetic import iota
from custom_ops.gated_delta_net.shapes import GatedDeltaNetShape
from custom_ops.gated_delta_net.tiling import CHUNK, FIRST, FRESH, LANES, LAST, OPENS

BASE = 16
"""Size of the blocks on the diagonal that are inverted by substitution."""
AHEAD = 8
"""Rows before a chunk's in `inputs`, a whole register, the last of which hold what the convolution looks back to."""


class Operands(NamedTuple):
    """Arguments and results of the kernel as references: scalars in SMEM, a block's rows in VMEM, the pools in HBM."""

    block: Any  # this and the next four: [chunks], see `tiling.chunk_table`
    slot: Any
    begin: Any
    end: Any
    flags: Any
    qkv: Any  # [64, channels]
    b: Any  # [64, value heads]
    a: Any  # [64, value heads]
    conv_weight: Any  # [width, channels]
    a_log: Any  # [1, value heads]
    dt_bias: Any  # [1, value heads]
    out: Any  # [64, value heads * 128]
    conv_pool: Any  # [slots, history or more, channels]
    state_pool: Any  # [slots, value heads, 128, 128]


class Scratch(NamedTuple):
    """References to what the kernel keeps between stages and from chunk to chunk; `declare` says how large each is."""

    state: Any
    s_in: Any
    s_out: Any
    c_in: Any
    c_out: Any
    inputs: Any
    keys: Any
    values: Any
    key_products: Any
    query_products: Any
    total: Any
    beta: Any
    growth: Any
    damping: Any
    total_row: Any
    beta_row: Any
    lower: Any
    attend: Any
    inverse: Any
    rest: Any
    read: Any
    change: Any
    damped: Any
    turned: Any
    packed: Any
    pending: Any
    in_sem: Any
    out_sem: Any


def declare(shape: GatedDeltaNetShape, window_rows: int, conv_dtype, state_dtype) -> Scratch:
    """Memory for `Scratch`, for a pool of `window_rows` rows a slot; FP32 where no type is given."""
    channels, key_heads, value_heads = shape.channels, shape.key_heads, shape.value_heads
    pairs = value_heads // 2

    def memory(*size, dtype=jnp.float32):
        return pltpu.VMEM(size, dtype)

    return Scratch(
        # The running state; states that arrive and leave; windows that arrive (the next chunk's too) and leave.
        state=memory(value_heads, LANES, LANES),
        s_in=memory(value_heads, LANES, LANES, dtype=state_dtype),
        s_out=memory(value_heads, LANES, LANES, dtype=state_dtype),
        c_in=memory(2, window_rows, channels, dtype=conv_dtype),
        c_out=memory(window_rows, channels, dtype=conv_dtype),
        # By 128 channels: the chunk's rows and those before; [k over q] as two BF16 parts; v.
        inputs=memory(channels // LANES, AHEAD + CHUNK, LANES),
        keys=memory(key_heads, 2, 2 * CHUNK, LANES, dtype=jnp.bfloat16),
        values=memory(value_heads, CHUNK, LANES),
        # k kᵀ and q kᵀ, each twice side by side.
        key_products=memory(key_heads, CHUNK, LANES),
        query_products=memory(key_heads, CHUNK, LANES),
        # A value head a lane: log2(e) g summed up to each row, beta, how much of the old state is left at a row and how
        # much of a row at the end; the first two by pair as rows, too.
        total=memory(CHUNK, LANES),
        beta=memory(CHUNK, LANES),
        growth=memory(CHUNK, LANES),
        damping=memory(CHUNK, LANES),
        total_row=memory(pairs, LANES),
        beta_row=memory(pairs, LANES),
        # In two BF16 parts: the strictly lower triangular matrices as block diagonal ones; what weighs the new values in
        # the outputs.
        lower=memory(pairs, 2, LANES, LANES, dtype=jnp.bfloat16),
        attend=memory(pairs, 2, CHUNK, LANES, dtype=jnp.bfloat16),
        # The inverse, and a product on the way to it.
        inverse=memory(pairs, CHUNK, LANES),
        rest=memory(pairs, CHUNK // 2, LANES),
        # What the old state adds to the outputs; v less what it has for k, then the new values;
        # these as far as they are left at the chunk's end.
        read=memory(value_heads, CHUNK, LANES),
        change=memory(value_heads, CHUNK, LANES),
        damped=memory(value_heads, CHUNK, LANES),
        # A transposed matrix of gates.
        turned=memory(value_heads, LANES),
        # The blocks on the diagonals.
        packed=memory(pairs * BASE, LANES),
        # Whether copies still read from `s_out` and `c_out`.
        pending=pltpu.SMEM((1,), jnp.int32),
        in_sem=pltpu.SemaphoreType.DMA((2,)),
        out_sem=pltpu.SemaphoreType.DMA((2,)),
    )


@dataclasses.dataclass(frozen=True)
class Chunk:
    """The chunk at hand; its scalars are read once, not in every stage."""

    index: Any
    flags: Any
    begin: Any
    end: Any
    shape: GatedDeltaNetShape
    operands: Operands
    scratch: Scratch
    unroll: bool
    """Whether loops may be laid out for the compiler to interleave; the interpreter takes longer over them then."""

    def _has(self, flag: int):
        return (self.flags & flag) != 0

    @property
    def is_first(self):
        return self._has(FIRST)

    @property
    def is_fresh(self):
        return self._has(FRESH)

    @property
    def is_last(self):
        return self._has(LAST)

    @property
    def opens(self):
        return self._has(OPENS)

    def valid(self, lanes: int):
        """Which rows of the block are the sequence's: [64, lanes]."""
        row = iota((CHUNK, lanes), 0)
        return (row >= self.begin) & (row < self.end)

    def loop(self, count: int, body, most: int) -> None:
        """`body` for each of `count`, up to `most` of them laid out together for the compiler to interleave."""
        step = max(n for n in range(1, min(most, count) + 1) if count % n == 0) if self.unroll else 1

        @pl.loop(0, count // step)
        def _(i):
            for n in range(step):
                body(i * step + n)

    def together(self, *stages, most: int) -> None:
        """Stages (count, body) that do not depend on each other in one loop, products of one beside the arithmetic of the
        other; up to `most` of the first, if there is such a divisor, laid out together."""
        common = math.gcd(*(count for count, _ in stages))
        turns = common
        if self.unroll:
            turns = next(n for n in range(1, common + 1) if common % n == 0 and stages[0][0] // n <= most or n == common)

        @pl.loop(0, turns)
        def _(i):
            for count, body in stages:
                for n in range(count // turns):
                    body(i * (count // turns) + n)
