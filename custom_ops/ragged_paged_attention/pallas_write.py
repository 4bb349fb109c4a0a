"""The kernel that writes keys and values of sequences with more than one row into their pages, page after page.

Rows come as XLA has laid them, a token after the other and each 32 bits wide: any number of them can be copied from any row on,
and a head's rows are read from memory with a stride. A page is read, gets its new rows, and is written back.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from custom_ops.ragged_paged_attention.pages import page_rows
from custom_ops.ragged_paged_attention.pallas_launch import launch
from custom_ops.ragged_paged_attention.pallas_layout import LANES, Layout


class _Refs(NamedTuple):
    """In scalar memory: `start`, `length`, `context` and the flat page table; `sequence` and `number` of each page to be
    written. In HBM: `rows`, [(page size + rows + page size) * pitch, 128] float32. In memory, in turn: the window of them that
    belongs to a page, the page before, and after.
    """

    start: Any
    length: Any
    context: Any
    table: Any
    rows: Any
    pool: Any
    sequence: Any
    number: Any
    window: Any
    before: Any
    after: Any
    came: Any
    left: Any
    scale_pool: Any = None
    scales_before: Any = None
    scales_after: Any = None


class _Kernel:
    def __init__(self, layout: Layout, pitch: int, refs: _Refs):
        self.layout, self.pitch, self.refs = layout, pitch, refs

    def run(self) -> None:
        count = lax.fori_loop(0, self.refs.length.shape[0], self.collect, jnp.int32(0))
        pl.when(count > 0)(lambda: self.load(0))

        @pl.loop(0, count)
        def _(index):
            pl.when(index + 1 < count)(lambda: self.load(index + 1))
            for copy in self.copies_in(index):
                copy.wait()
            pl.when(index > 1)(lambda: self.drain(index - 2))
            self.put(index)
            for copy in self.copies_out(index):
                copy.start()

        for back in (2, 1):
            pl.when(count >= back)(lambda back=back: self.drain(count - back))

    def collect(self, sequence, count):
        """Append the pages that a sequence's new rows lie in."""
        refs, layout = self.refs, self.layout
        length, context = refs.length[sequence], refs.context[sequence]
        first = layout.page_of(context)
        pages = jnp.where(length > 1, layout.page_of(context + length - 1) + 1 - first, 0)

        @pl.loop(0, pages)
        def _(number):
            refs.sequence[count + number] = sequence
            refs.number[count + number] = first + number

        return count + pages

    def behind(self, index):
        """How many rows of the sequence's pages lie before the page."""
        return self.refs.number[index] * self.layout.page_size

    def load(self, index) -> None:
        for copy in self.copies_in(index):
            copy.start()

    def drain(self, index) -> None:
        for copy in self.copies_out(index):
            copy.wait()

    def copies_in(self, index):
        refs, turn = self.refs, index & 1
        sequence = refs.sequence[index]
        first = self.layout.page_size + refs.start[sequence] + self.behind(index) - refs.context[sequence]
        size = self.layout.page_size * self.pitch
        rows = refs.rows.at[pl.ds(pl.multiple_of(first * self.pitch, self.pitch), size)]
        yield pltpu.make_async_copy(rows, refs.window.at[turn], refs.came.at[turn])
        yield pltpu.make_async_copy(refs.pool.at[self.page(index)], refs.before.at[turn], refs.came.at[turn])
        if self.layout.scaled:
            scales = refs.scale_pool.at[self.page(index)]
            yield pltpu.make_async_copy(scales, refs.scales_before.at[turn], refs.came.at[turn])

    def copies_out(self, index):
        refs, turn = self.refs, index & 1
        yield pltpu.make_async_copy(refs.after.at[turn], refs.pool.at[self.page(index)], refs.left.at[turn])
        if self.layout.scaled:
            scales = refs.scale_pool.at[self.page(index)]
            yield pltpu.make_async_copy(refs.scales_after.at[turn], scales, refs.left.at[turn])

    def page(self, index):
        return self.refs.table[self.refs.sequence[index] * self.layout.pages + self.refs.number[index]]

    def put(self, index) -> None:
        """The page with its new rows."""
        layout, refs, turn = self.layout, self.refs, index & 1
        context, length = (ref[refs.sequence[index]] for ref in (refs.context, refs.length))
        first = context - self.behind(index)

        def is_new(shape, axis):
            row = lax.broadcasted_iota(jnp.int32, shape, axis)
            return (row >= first) & (row < first + length)

        def column(number):
            return refs.window[turn, pl.ds(number, layout.page_size, stride=self.pitch), :]

        parts = layout.dim // LANES
        for number in range(2 * layout.heads * parts):
            head, lanes = number // parts, pl.ds(number % parts * LANES, LANES)
            old = refs.before[turn, head, :, lanes].astype(jnp.float32)
            rows = jnp.where(is_new(old.shape, 0), column(number), old)
            refs.after[turn, head, :, lanes] = rows.astype(layout.page_dtype)
        if layout.scaled:
            old = refs.scales_before[turn]
            new = column(2 * layout.heads * parts).T[: 2 * layout.heads]
            refs.scales_after[turn] = jnp.where(is_new(old.shape, 1), new, old)


def write_pages(layout: Layout, key, value, start, length, context, table, pool, scale_pool):
    """The pools with the keys and values of all sequences with more than one row.

    Args:
        key, value: [rows, KV heads, head dim].
        start, length, context: [sequences] int32; table: [sequences, pages] int32.
    """
    rows, scales = page_rows(key, value, layout.page_dtype)
    count, size = rows.shape[0], layout.page_size
    rows = rows.astype(jnp.float32).reshape(count, -1, LANES)
    if layout.scaled:
        own = jnp.pad(scales, ((0, 0), (0, LANES - scales.shape[1])))[:, None]
        rows = jnp.concatenate([rows, own], axis=1)
    pitch = layout.row_words // LANES
    rows = jnp.pad(rows, ((size, size), (0, pitch - rows.shape[1]), (0, 0))).reshape(-1, LANES)
    pages = count // size + 2 * length.shape[0]
    place = (2, 2 * layout.heads, size)
    pools, memory = {"pool": pool}, {
        "sequence": pltpu.SMEM((pages,), jnp.int32),
        "number": pltpu.SMEM((pages,), jnp.int32),
        "window": pltpu.VMEM((2, size * pitch, LANES), jnp.float32),
        "before": pltpu.VMEM((*place, layout.dim), layout.page_dtype),
        "after": pltpu.VMEM((*place, layout.dim), layout.page_dtype),
        "came": pltpu.SemaphoreType.DMA((2,)),
        "left": pltpu.SemaphoreType.DMA((2,)),
    }  # fmt: skip
    if layout.scaled:
        pools["scale_pool"] = scale_pool
        memory |= {name: pltpu.VMEM(place, jnp.float32) for name in ("scales_before", "scales_after")}
    return launch(
        lambda refs: _Kernel(layout, pitch, _Refs(**refs)).run(), "attention_write", layout.interpret, memory=memory,
        scalars={"start": start, "length": length, "context": context, "table": table.reshape(-1)},
        far={"rows": rows}, pools=pools,
    )  # fmt: skip
