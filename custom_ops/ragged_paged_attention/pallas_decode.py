"""The decode kernel: sequences with one row each, whose key and value it also writes.

The query heads of a KV head are the rows of its products, keys and values the weights of the matrix unit, as they lie in the
pages. A sequence's last page arrives like the others; the new token's rows are put into it there, and the tile of memory around
them goes back to HBM.

Schedule for tpu7x, 16 query heads for each of 2 KV heads of 256, pages of 256, blocks of 1,024 positions: a block takes about
690 bundles (0.31 µs at an assumed 2.2 GHz) in BF16 and 480 (0.22 µs) in FP8, its bytes 0.57 and 0.29 µs at 3.69 TB/s, so
that bytes bind. A sequence costs about 1,000 bundles more, whatever its length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from custom_ops.ragged_paged_attention.pages import scale_of
from custom_ops.ragged_paged_attention.pallas_launch import launch
from custom_ops.ragged_paged_attention.pallas_layout import Layout
from custom_ops.ragged_paged_attention.pallas_softmax import MASKED, Running, attend, scores_of
from custom_ops.ragged_paged_attention.pallas_stream import Block, Stream, declare


class _Refs(NamedTuple):
    """In scalar memory: `context`, `active` and the flat page table; `order`: the sequences that are active.

    query: [sequences, KV heads * group, head dim], output likewise; key, value: [sequences, KV heads * head dim] float32.
    tile, scale_page: [2, ...] what goes back to HBM, in turn.
    """

    context: Any
    active: Any
    table: Any
    query: Any
    key: Any
    value: Any
    output: Any
    pool: Any
    order: Any
    tile: Any
    left: Any
    scale_pool: Any = None
    scale_page: Any = None


class _Kernel:
    def __init__(self, layout: Layout, scale: float, refs: _Refs, memory: dict[str, Any]):
        self.layout, self.scale, self.refs, self.memory = layout, scale, refs, memory

    def run(self) -> None:
        refs = self.refs
        refs.output[...] = jnp.zeros(refs.output.shape, refs.output.dtype)
        count = lax.fori_loop(0, refs.order.shape[0], self.collect, jnp.int32(0))
        stream = Stream(
            self.layout, refs.table, refs.pool, refs.scale_pool, **self.memory, readers=count,
            sequence_of=lambda reader: refs.order[reader], last_of=lambda reader: refs.context[refs.order[reader]],
        )  # fmt: skip
        stream.begin()
        lax.fori_loop(0, count, lambda reader, number: self.sequence(stream, reader, number), jnp.int32(0))
        for turn in range(2):
            pl.when(count > turn)(lambda turn=turn: self.drain(turn))

    def collect(self, sequence, count):
        self.refs.order[count] = sequence
        return count + self.refs.active[sequence]

    def sequence(self, stream: Stream, reader, number):
        """Attention of one sequence, whose first block has this number; the next one's."""
        layout, refs = self.layout, self.refs
        sequence = refs.order[reader]
        position = refs.context[sequence]
        last = layout.block_of(position)

        def whole(block, carry):
            stream.start_next()
            return self.block(stream.wait(number + block), sequence, block * layout.positions, carry)

        carry = tuple(Running.empty(layout.group, layout.dim) for _ in range(layout.heads))
        carry = lax.fori_loop(0, last, whole, carry)
        stream.start_next()
        page = layout.page_of(position) - last * layout.block_pages
        block = stream.wait_for_last(number + last, page + 1)
        self.insert(block, reader, sequence, position, page)
        carry = self.block(block, sequence, last * layout.positions, carry)
        for head, running in enumerate(carry):
            refs.output[sequence, self.of_head(head), :] = (running.weighted / running.total).astype(refs.output.dtype)
        return number + last + 1

    def block(self, block: Block, sequence, first, carry: Sequence[Running]) -> tuple[Running, ...]:
        """first: position of the block."""
        refs, layout = self.refs, self.layout
        seen = first + lax.broadcasted_iota(jnp.int32, (layout.group, layout.positions), 1) <= refs.context[sequence]
        # All scores first: the heads' chains of dependent steps then run beside each other.
        scores = [scores_of(self.query(sequence, head), block, head) for head in range(layout.heads)]
        return tuple(
            attend(running, jnp.where(seen, scores[head], MASKED), refs.query.dtype, block, head)
            for head, running in enumerate(carry)
        )

    def of_head(self, head: int):
        return pl.ds(head * self.layout.group, self.layout.group)

    def query(self, sequence, head: int):
        query = self.refs.query[sequence, self.of_head(head), :]
        return (query.astype(jnp.float32) * self.scale).astype(query.dtype)

    def new_row(self, sequence, index: int):
        """[1, head dim] float32: the sequence's key or value of a head, as `Block.rows` counts them."""
        ref = self.refs.value if index % 2 else self.refs.key
        first = index // 2 * self.layout.dim
        return ref[pl.ds(sequence, 1), :][:, first : first + self.layout.dim]

    def insert(self, block: Block, reader, sequence, position, page) -> None:
        """Put the new token into its page, in memory and in HBM."""
        layout, refs, turn = self.layout, self.refs, reader & 1
        pl.when(reader > 1)(lambda: self.drain(turn))
        within = position & (layout.page_size - 1)
        tile, number = block.tile(within)
        lane = lax.broadcasted_iota(jnp.int32, (1, layout.page_size), 1)
        for index in range(2 * layout.heads):
            new = self.new_row(sequence, index)
            if layout.scaled:
                scale, own = scale_of(new), pl.ds(index, 1)
                new = new / scale
                scales = jnp.where(lane == within, scale, block.scales[page, own, :])
                block.scales[page, own, :] = scales
                refs.scale_page[turn, own, :] = scales
            rows = block.pages[page, index, tile, :].astype(jnp.float32)
            rows = jnp.where(number == within, new, rows).astype(layout.page_dtype)
            block.pages[page, index, tile, :] = rows
            refs.tile[turn, index] = rows
        for copy in self.copies_back(turn, refs.table[sequence * layout.pages + layout.page_of(position)], tile):
            copy.start()
        block.clear_after(page, within)

    def drain(self, turn) -> None:
        """Wait until what a turn before put into HBM is there."""
        for copy in self.copies_back(turn, 0, pl.ds(0, self.layout.tile_rows)):
            copy.wait()

    def copies_back(self, turn, page, tile):
        refs = self.refs
        yield pltpu.make_async_copy(refs.tile.at[turn], refs.pool.at[page, :, tile], refs.left.at[turn])
        if self.layout.scaled:
            yield pltpu.make_async_copy(refs.scale_page.at[turn], refs.scale_pool.at[page], refs.left.at[turn])


def decode(layout: Layout, query, key, value, active, context, table, pool, scale_pool, *, scale: float):
    """Attention of one row for each sequence that is active.

    Args:
        query: [sequences, KV heads * group, head dim].
        key, value: [sequences, KV heads, head dim].
        active, context: [sequences] int32; table: [sequences, pages] int32.

    Returns:
        Output in the shape of query, zero for sequences that are not active, and the pools.
    """
    heads, sequences = 2 * layout.heads, query.shape[0]
    key, value = (rows.astype(jnp.float32).reshape(sequences, -1) for rows in (key, value))
    arrays, pools = {"query": query, "key": key, "value": value}, {"pool": pool}
    memory = {
        "order": pltpu.SMEM((sequences,), jnp.int32),
        "tile": pltpu.VMEM((2, heads, layout.tile_rows, layout.dim), layout.page_dtype),
        "left": pltpu.SemaphoreType.DMA((2,)),
    }
    if layout.scaled:
        pools["scale_pool"] = scale_pool
        memory["scale_page"] = pltpu.VMEM((2, heads, layout.page_size), jnp.float32)
    stream = declare(layout)

    def kernel(refs):
        of_stream = {name: refs.pop(name) for name in stream}
        _Kernel(layout, scale, _Refs(**refs), of_stream).run()

    return launch(
        kernel, "attention_decode", layout.interpret, memory=memory | stream, arrays=arrays, pools=pools,
        scalars={"context": context, "active": active, "table": table.reshape(-1)},
        outputs={"output": jax.ShapeDtypeStruct(query.shape, query.dtype)},
    )  # fmt: skip
