"""What the decode kernel keeps in memory, and how a tile's rows lie in it.

An item is one token of one sequence of the tile: item = sequence * tokens + token.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from custom_ops.gated_delta_net.shapes import GatedDeltaNetShape
from custom_ops.gated_delta_net.tiling import LANES

TILE = 8
"""Sequences of a tile: as many as a register has rows."""
RING = 4
"""States in memory: one updated, one read, one arriving (and a power of two)."""
OUTER_ROWS = 9
"""Rows of a head in `outer`: eight are used, and an odd stride lets a store meet all banks of the memory."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Sizes, known when the kernel is traced."""

    shape: GatedDeltaNetShape
    tokens: int
    """Rows of a sequence."""
    history: int
    """Rows that the convolution looks back."""
    window_rows: int
    """Rows of a slot in the pool of windows, of which the first `history` are used."""
    by_products: int
    """Key heads, the last ones, whose states the matrix unit updates; vector arithmetic updates the others'."""

    @property
    def items(self) -> int:
        return TILE * self.tokens

    @property
    def by_vectors(self) -> int:
        return self.shape.key_heads - self.by_products

    @property
    def first_outer(self) -> int:
        """The first value head that is updated by products."""
        return self.by_vectors * self.shape.group

    @property
    def span(self) -> int:
        """Rows of a sequence under the convolution."""
        return self.history + self.tokens

    @property
    def part_rows(self) -> int:
        """Rows of a key head in `parts`, four for each item: odd, so that those of an item meet all banks of the memory."""
        return 4 * self.items + 1

    @property
    def value_rows(self) -> int:
        """Rows of an item in `values`, odd for the same reason."""
        return self.shape.value_heads + 1


class Operands(NamedTuple):
    """Arguments and results of the kernel as references: scalars in SMEM, a tile's rows in VMEM, the pools in HBM."""

    slot: Any  # [sequences]
    rows: Any  # [sequences]
    fresh: Any  # [sequences]
    keep: Any  # [sequences * tokens], or None
    qkv: Any  # [tokens, TILE, channels]
    b: Any  # [tokens, TILE, value heads]
    a: Any  # [tokens, TILE, value heads]
    conv_weight: Any  # [width, channels]
    a_log: Any  # [1, value heads]
    dt_bias: Any  # [1, value heads]
    out: Any  # [tokens, TILE, value heads, 128]
    conv_pool: Any  # [slots, history or more, channels]
    state_pool: Any  # [slots, value heads, 128, 128]


class Scratch(NamedTuple):
    """References to what the kernel keeps between its steps; `declare` says how large each is."""

    s_in: Any
    s_out: Any
    c_in: Any
    c_out: Any
    window: Any
    parts: Any
    values: Any
    product: Any
    growth: Any
    betas: Any
    read: Any
    delta: Any
    columns: Any
    outer: Any
    eye: Any
    pending: Any
    in_sem: Any
    conv_sem: Any
    out_sem: Any


def declare(layout: Layout, conv_dtype, state_dtype) -> Scratch:
    """Memory for `Scratch`; FP32 where no type is given."""
    shape, items = layout.shape, layout.items
    channels, value_heads = shape.channels, shape.value_heads

    def memory(*size, dtype=jnp.float32):
        return pltpu.VMEM(size, dtype)

    return Scratch(
        # States that arrive and are read; those that leave; the same of the convolution's windows.
        s_in=memory(RING, value_heads, LANES, LANES, dtype=state_dtype),
        s_out=memory(2, value_heads, LANES, LANES, dtype=state_dtype),
        c_in=memory(2, TILE, layout.window_rows, channels, dtype=conv_dtype),
        c_out=memory(2, layout.window_rows, channels, dtype=conv_dtype),
        # By 128 channels: each sequence's window and rows, one after the other.
        window=memory(channels // LANES, TILE * layout.span, LANES),
        # By item: top half and rest of k of all key heads, then of q; v; q·k; exp(g) and beta, over all lanes.
        parts=memory(shape.key_heads * layout.part_rows, LANES),
        values=memory(items * layout.value_rows, LANES),
        product=memory(items * layout.value_rows, LANES),
        growth=memory(items * value_heads, LANES),
        betas=memory(items * value_heads, LANES),
        # Of the item at hand: Sᵀ times the four parts, delta, k as a column over all lanes, and as rows of a product.
        read=memory(4 * layout.value_rows, LANES),
        delta=memory(value_heads, LANES),
        columns=memory(layout.by_vectors, LANES, LANES),
        outer=memory(max(layout.by_products * shape.group, 1) * OUTER_ROWS, LANES),
        eye=memory(LANES, LANES, dtype=jnp.bfloat16),
        # [place in s_out, slot or checkpoint]: whether a copy still reads from the place.
        pending=pltpu.SMEM((2, 2), jnp.int32),
        in_sem=pltpu.SemaphoreType.DMA((RING,)),
        conv_sem=pltpu.SemaphoreType.DMA((2,)),
        out_sem=pltpu.SemaphoreType.DMA((2, 2)),
    )


@dataclasses.dataclass(frozen=True)
class Tile:
    """Eight sequences at hand."""

    index: Any
    layout: Layout
    operands: Operands
    scratch: Scratch
    rolled: bool
    """Whether loops over heads stay loops, for the interpreter; the compiler interleaves what is laid out."""

    @property
    def first(self):
        """Its first sequence."""
        return self.index * TILE

    @property
    def parity(self):
        """Which half of `c_in` holds its windows; the next tile's arrive in the other."""
        return self.index & 1

    def each(self, start: int, stop: int, body) -> None:
        """`body` for each key head."""
        if self.rolled:
            pl.loop(start, stop)(body)
        else:
            for head in range(start, stop):
                body(head)
