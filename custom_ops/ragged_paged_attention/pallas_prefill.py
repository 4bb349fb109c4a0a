"""The prefill kernel: sequences with more than one row, whose keys and values lie in the pages already.

A tile of a sequence's rows is held against its pages, block by block: for each KV head, the query heads of one token after
the other are the columns of the products, so that the softmax runs along vectors of queries. Blocks that every row of the tile
has seen whole need no mask. Tiles begin at any row of the batch, and results of a partial tile leave in pieces of powers of
two, so that rows of others stay as they are.

Schedule for tpu7x, 16 query heads for each of 2 KV heads of 256, BF16, tiles of 64 rows: 512 positions take about 3,640
bundles, of which the matrix unit needs 2,050; the rest are scores that leave and enter the registers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from custom_ops.ragged_paged_attention.pallas_launch import launch
from custom_ops.ragged_paged_attention.pallas_layout import Layout
from custom_ops.ragged_paged_attention.pallas_softmax import MASKED, Running, attend_columns
from custom_ops.ragged_paged_attention.pallas_stream import Block, Stream, declare


class _Refs(NamedTuple):
    """In scalar memory: `start`, `length`, `context` and the flat page table; `sequence` and `offset` of each tile: which
    sequence's, and its first row there. In HBM: query and output, [rows, KV heads * group, head dim]. In memory: tiles of
    both, [2, tile, ...]; `queries`, [KV heads, head dim, tile * group], and what `Running` holds of their columns.
    """

    start: Any
    length: Any
    context: Any
    table: Any
    query: Any
    pool: Any
    output: Any
    sequence: Any
    offset: Any
    tile_in: Any
    tile_out: Any
    came: Any
    left: Any
    queries: Any
    highest: Any
    total: Any
    weighted: Any
    scale_pool: Any = None


class _Kernel:
    def __init__(self, layout: Layout, tile: int, scale: float, refs: _Refs, memory: dict[str, Any]):
        self.layout, self.tile, self.scale, self.refs, self.memory = layout, tile, scale, refs, memory
        self.rows = refs.query.shape[0]

    def run(self) -> None:
        refs = self.refs
        count = lax.fori_loop(0, refs.length.shape[0], self.collect, jnp.int32(0))
        stream = Stream(
            self.layout, refs.table, refs.pool, refs.scale_pool, **self.memory, readers=count,
            sequence_of=lambda index: refs.sequence[index], last_of=self.last,
        )  # fmt: skip
        stream.begin()
        pl.when(count > 0)(lambda: self.query_copy(0).start())
        lax.fori_loop(0, count, lambda index, number: self.one_tile(stream, count, index, number), jnp.int32(0))
        for back in (2, 1):
            pl.when(count >= back)(lambda back=back: self.store(count - back, wait=True))

    def collect(self, sequence, count):
        """Append the tiles of a sequence."""
        length = self.refs.length[sequence]
        tiles = jnp.where(length > 1, (length + self.tile - 1) >> _log2(self.tile), 0)

        @pl.loop(0, tiles)
        def _(number):
            self.refs.sequence[count + number] = sequence
            self.refs.offset[count + number] = number * self.tile

        return count + tiles

    def valid(self, index):
        """How many rows of a tile are tokens."""
        return jnp.minimum(self.refs.length[self.refs.sequence[index]] - self.refs.offset[index], self.tile)

    def first(self, index):
        """Position of a tile's first token."""
        return self.refs.context[self.refs.sequence[index]] + self.refs.offset[index]

    def last(self, index):
        return self.first(index) + self.valid(index) - 1

    def place(self, index):
        """Row of the batch where a tile's copy begins, so that it ends within the batch, and how many rows its tokens lie
        behind it."""
        start = self.refs.start[self.refs.sequence[index]] + self.refs.offset[index]
        base = jnp.minimum(start, self.rows - self.tile)
        return base, start - base

    def query_copy(self, index):
        base, _ = self.place(index)
        return pltpu.make_async_copy(
            self.refs.query.at[pl.ds(base, self.tile)], self.refs.tile_in.at[index & 1], self.refs.came.at[index & 1]
        )

    def one_tile(self, stream: Stream, count, index, number):
        """Attention of one tile, whose first block has this number; the next one's."""
        layout, refs = self.layout, self.refs
        pl.when(index + 1 < count)(lambda: self.query_copy(index + 1).start())
        self.query_copy(index).wait()
        for head in range(layout.heads):
            query = refs.tile_in[index & 1, :, self.of_head(head), :].astype(jnp.float32) * self.scale
            refs.queries[head] = query.reshape(-1, layout.dim).T.astype(refs.query.dtype)
            columns = (1, self.tile * layout.group)
            weighted = jnp.zeros(refs.weighted.shape[1:])
            self.keep(head, Running(jnp.full(columns, MASKED), jnp.zeros(columns), weighted))

        first, last = self.first(index), self.last(index)
        last_block = layout.block_of(last)
        whole = jnp.minimum(layout.block_of(first + 1), last_block)

        @pl.loop(0, whole)
        def _(block):
            stream.start_next()
            self.block(stream.wait(number + block), None)

        _, lead = self.place(index)
        row = lax.broadcasted_iota(jnp.int32, (1, self.tile * layout.group), 1) >> _log2(layout.group)
        sees = jnp.minimum(first - lead + row, last)
        position = lax.broadcasted_iota(jnp.int32, (layout.positions, row.shape[1]), 0)

        @pl.loop(whole, last_block + 1)
        def _(block):
            stream.start_next()
            pages = layout.page_of(last) - block * layout.block_pages
            at = number + block

            @pl.when(block < last_block)
            def _():
                stream.wait(at)

            @pl.when(block == last_block)
            def _():
                stream.wait_for_last(at, pages + 1).clear_after(pages, last & (layout.page_size - 1))

            self.block(stream.block(at), position <= sees - block * layout.positions)

        pl.when(index > 1)(lambda: self.store(index - 2, wait=True))
        for head in range(layout.heads):
            running = self.running(head)
            result = (running.weighted / running.total).T.reshape(self.tile, layout.group, layout.dim)
            refs.tile_out[index & 1, :, self.of_head(head), :] = result.astype(refs.output.dtype)
        self.store(index, wait=False)
        return number + last_block + 1

    def block(self, block: Block, seen) -> None:
        for head in range(self.layout.heads):
            self.keep(head, attend_columns(self.running(head), self.refs.queries[head], seen, block, head))

    def of_head(self, head: int):
        return pl.ds(head * self.layout.group, self.layout.group)

    def running(self, head: int) -> Running:
        return Running(self.refs.highest[head], self.refs.total[head], self.refs.weighted[head])

    def keep(self, head: int, running: Running) -> None:
        refs = self.refs
        refs.highest[head], refs.total[head], refs.weighted[head] = running

    def store(self, index, *, wait: bool) -> None:
        """Copy a tile's results to their rows, or wait until they are there."""
        base, lead = self.place(index)
        valid, turn = self.valid(index), index & 1

        def copy(first, rows: int) -> None:
            source, target = pl.ds(lead + first, rows), pl.ds(base + lead + first, rows)
            move = pltpu.make_async_copy(
                self.refs.tile_out.at[turn, source], self.refs.output.at[target], self.refs.left.at[turn]
            )
            move.wait() if wait else move.start()

        for bit in range(_log2(self.tile) + 1):
            pl.when(valid & (1 << bit) > 0)(lambda bit=bit: copy(valid & ((1 << bit) - 1), 1 << bit))


def prefill(layout: Layout, tile: int, query, output, start, length, context, table, pool, scale_pool, *, scale: float):
    """`output` with the attention of all sequences with more than one row put into it.

    Args:
        tile: rows that are handled together, a power of two and at most those of the batch.
        query, output: [rows, KV heads * group, head dim].
        start, length, context: [sequences] int32; table: [sequences, pages] int32.
        pool, scale_pool: with the batch's keys and values in them.
    """
    tiles = query.shape[0] // tile + length.shape[0]
    columns = tile * layout.group
    memory = {
        "sequence": pltpu.SMEM((tiles,), jnp.int32),
        "offset": pltpu.SMEM((tiles,), jnp.int32),
        "tile_in": pltpu.VMEM((2, tile, *query.shape[1:]), query.dtype),
        "tile_out": pltpu.VMEM((2, tile, *query.shape[1:]), query.dtype),
        "came": pltpu.SemaphoreType.DMA((2,)),
        "left": pltpu.SemaphoreType.DMA((2,)),
        "queries": pltpu.VMEM((layout.heads, layout.dim, columns), query.dtype),
        "highest": pltpu.VMEM((layout.heads, 1, columns), jnp.float32),
        "total": pltpu.VMEM((layout.heads, 1, columns), jnp.float32),
        "weighted": pltpu.VMEM((layout.heads, layout.dim, columns), jnp.float32),
    }
    stream = declare(layout)

    def kernel(refs):
        of_stream = {name: refs.pop(name) for name in stream}
        _Kernel(layout, tile, scale, _Refs(**refs), of_stream).run()

    (output,) = launch(
        kernel, "attention_prefill", layout.interpret, memory=memory | stream,
        scalars={"start": start, "length": length, "context": context, "table": table.reshape(-1)},
        far={"query": query, "pool": pool} | ({"scale_pool": scale_pool} if layout.scaled else {}),
        pools={"output": output},
    )  # fmt: skip
    return output


def _log2(size: int) -> int:
    return size.bit_length() - 1
