"""Blocks of pages on their way from HBM into a ring of places in memory, in the order in which they are used.

Readers follow one another (sequences that decode, or tiles of queries), and each reads its sequence's pages from the first to
the last one that it needs, block by block. Copies run ahead over the end of a reader into the next one's pages, so that HBM is
read without a pause; pages that no position needs are not read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from custom_ops.ragged_paged_attention.pallas_layout import Layout

RING = 4
"""Blocks in memory: one that is used and three on their way, a power of two."""


def declare(layout: Layout) -> dict[str, Any]:
    """Memory of a `Stream`, by its fields."""
    place = (RING, layout.block_pages, 2 * layout.heads, layout.page_size)
    memory = {
        "ring": pltpu.VMEM((*place, layout.dim), layout.page_dtype),
        "arrived": pltpu.SemaphoreType.DMA((RING,)),
        "cursor": pltpu.SMEM((3,), jnp.int32),
    }
    return memory | ({"scale_ring": pltpu.VMEM(place, jnp.float32)} if layout.scaled else {})


@dataclass(frozen=True)
class Stream:
    """The copies of one kernel.

    Args:
        table: [sequences * pages] in scalar memory.
        pool, scale_pool: pages and scales in HBM.
        readers: how many there are.
        sequence_of, last_of: by reader, its sequence and the last position that it reads.
        cursor: the next block to be copied: its reader, its number there, and its number over all readers.
    """

    layout: Layout
    table: Any
    pool: Any
    scale_pool: Any
    ring: Any
    arrived: Any
    cursor: Any
    readers: Any
    sequence_of: Callable
    last_of: Callable
    scale_ring: Any = None

    def begin(self) -> None:
        for field in range(3):
            self.cursor[field] = 0
        for _ in range(RING - 1):
            self.start_next()

    def start_next(self) -> None:
        """Start the copies of the next block; to be called before the use of each."""
        layout = self.layout

        @pl.when(self.cursor[0] < self.readers)
        def _():
            reader, block, number = self.cursor[0], self.cursor[1], self.cursor[2]
            first = self.sequence_of(reader) * layout.pages + block * layout.block_pages
            left = layout.page_of(self.last_of(reader)) + 1 - block * layout.block_pages

            @pl.loop(0, jnp.minimum(left, layout.block_pages))
            def _(page):
                for copy in self._copies(self.table[first + page], place(number), page):
                    copy.start()

            more = left > layout.block_pages
            self.cursor[0] = jnp.where(more, reader, reader + 1)
            self.cursor[1] = jnp.where(more, block + 1, 0)
            self.cursor[2] = number + 1

    def wait(self, number) -> Block:
        """A block that fills its place."""
        at = place(number)
        pltpu.make_async_copy(self.ring.at[at], self.ring.at[at], self.arrived.at[at]).wait()
        if self.layout.scaled:
            pltpu.make_async_copy(self.scale_ring.at[at], self.scale_ring.at[at], self.arrived.at[at]).wait()
        return self.block(number)

    def wait_for_last(self, number, pages) -> Block:
        """A reader's last block, of which `pages` pages are copied."""

        @pl.loop(0, pages)
        def _(page):
            for copy in self._copies(0, place(number), page):
                copy.wait()

        return self.block(number)

    def _copies(self, page, at, index):
        yield pltpu.make_async_copy(self.pool.at[page], self.ring.at[at, index], self.arrived.at[at])
        if self.layout.scaled:
            yield pltpu.make_async_copy(self.scale_pool.at[page], self.scale_ring.at[at, index], self.arrived.at[at])

    def block(self, number) -> Block:
        """A block that has arrived."""
        at = place(number)
        return Block(self.layout, self.ring.at[at], self.scale_ring.at[at] if self.layout.scaled else None)


def place(number):
    """Of a block in the ring."""
    return number & (RING - 1)


@dataclass(frozen=True)
class Block:
    """A block in memory.

    pages: [pages, 2 * KV heads, page size, head dim]; scales: [pages, 2 * KV heads, page size] or None.
    """

    layout: Layout
    pages: Any
    scales: Any

    def rows(self, index: int):
        """[positions, head dim]: keys (2 * head) or values (2 * head + 1) of a head."""
        return self.pages[:, index].reshape(self.layout.positions, self.layout.dim)

    def scale(self, index: int):
        """[1, positions] of the same."""
        return jnp.concatenate([self.scales[page, pl.ds(index, 1), :] for page in range(self.layout.block_pages)], axis=1)

    def tile(self, row):
        """Rows of a page around `row`: a tile of memory; and the number of each, [rows, head dim]."""
        rows = self.layout.tile_rows
        first = pl.multiple_of(row & ~(rows - 1), rows)
        return pl.ds(first, rows), lax.broadcasted_iota(jnp.int32, (rows, self.layout.dim), 0) + first

    def clear_after(self, page, row) -> None:
        """Zero the values behind a row of a page, and those of all later pages, with their scales: what memory holds where no
        token is may be no number, which times a weight of 0 is not 0."""
        layout = self.layout
        tile, number = self.tile(row)
        lane = lax.broadcasted_iota(jnp.int32, (1, layout.page_size), 1)
        for index in self.of_values():
            rows = self.pages[page, index, tile, :].astype(jnp.float32)
            self.pages[page, index, tile, :] = jnp.where(number <= row, rows, 0).astype(layout.page_dtype)
            if layout.scaled:
                own = pl.ds(index, 1)
                self.scales[page, own, :] = jnp.where(lane <= row, self.scales[page, own, :], 0)

        rows = layout.tile_rows

        @pl.loop((row >> (rows.bit_length() - 1)) + 1, layout.page_size // rows)
        def _(number):
            for index in self.of_values():
                zeros = jnp.zeros((rows, layout.dim), layout.page_dtype)
                self.pages[page, index, pl.ds(pl.multiple_of(number * rows, rows), rows), :] = zeros

        @pl.loop(page + 1, layout.block_pages)
        def _(later):
            for index in self.of_values():
                self.pages[later, index] = jnp.zeros((layout.page_size, layout.dim), layout.page_dtype)
            if layout.scaled:
                self.scales[later] = jnp.zeros((2 * layout.heads, layout.page_size), jnp.float32)

    def of_values(self) -> range:
        """What `rows` calls the values of the heads."""
        return range(1, 2 * self.layout.heads, 2)
