"""How a reduce-scatter is cut into micro-batches and calls of the kernel, by a model of its time."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from custom_ops.hypercube.layout import LANES, streams
from custom_ops.reduce_scatter.cost import hierarchical_time
from custom_ops.reduce_scatter.shapes import ReduceScatterShape

ROW_TILE = 16
"""Rows of a BF16 tile: micro-batches start at multiples of it."""
VMEM_BYTES = 44 * 2**20
"""What buffers may take of a core's 64 MiB."""


@dataclass(frozen=True)
class Plan:
    """How a shape is cut.

    Args:
        rows: rows of each device in one micro-batch.
        micro_batches: micro-batches in one call of the kernel.
        column_blocks: first and last column (not included) of each call of the kernel.
        time: modelled seconds.
    """

    rows: int
    micro_batches: int
    column_blocks: tuple[tuple[int, int], ...]
    time: float

    @property
    def padded_rows(self) -> int:
        """Rows a device with those that fill the last tile."""
        return self.rows * self.micro_batches

    @property
    def padded_hidden(self) -> int:
        return self.column_blocks[-1][1]

    @property
    def slots(self) -> int:
        """Micro-batches in flight, each with its own buffers."""
        return min(self.micro_batches, 2)


@functools.cache
def plan(shape: ReduceScatterShape) -> Plan | None:
    """The cut with the least modelled time among those that fit into VMEM; None where none fits.

    Micro-batches are cut along the rows: a DMA then moves whole rows, the columns are divided once among the streams
    (dividing each micro-batch's would round to tiles of 128 every time), and all micro-batches have one shape, so that a
    loop holds them. Columns are cut only where not even the smallest micro-batch fits, into separate calls.
    """
    rows = shape.rows_per_device if shape.rows_per_device <= ROW_TILE else _whole_tiles(shape.rows_per_device)
    hidden = -(-shape.hidden // LANES) * LANES
    candidates = [size for size in range(ROW_TILE, rows, ROW_TILE) if rows % size == 0] + [rows]
    calls = 1
    while calls <= hidden // LANES:
        blocks = streams(0, hidden, calls)
        widest = blocks[0][1] - blocks[0][0]
        cuts = [
            Plan(size, rows // size, blocks, calls * hierarchical_time(_with_hidden(shape, widest), rows // size))
            for size in candidates
        ]
        fitting = [cut for cut in cuts if buffer_bytes(shape, cut) <= VMEM_BYTES]
        if fitting:
            return min(fitting, key=lambda cut: cut.time)
        calls *= 2
    return None


def buffer_bytes(shape: ReduceScatterShape, cut: Plan) -> int:
    """VMEM of one call, see `pallas_kernel.scratch_shapes`. Fewer rows than a tile's take the next power of two."""
    steps = shape.chips - 1
    slabs = (2 * shape.chips + 2 * steps + 1) * shape.itemsize + steps * 4  # own, swapped; sent, received; result; kept
    columns = cut.column_blocks[0][1] - cut.column_blocks[0][0]
    rows = _whole_tiles(cut.rows) if cut.rows > ROW_TILE else max(1 << (cut.rows - 1).bit_length(), 2)
    return cut.slots * slabs * rows * columns


def _whole_tiles(rows: int) -> int:
    return -(-rows // ROW_TILE) * ROW_TILE


def _with_hidden(shape: ReduceScatterShape, hidden: int) -> ReduceScatterShape:
    return ReduceScatterShape(shape.chips, shape.cores, shape.rows, hidden, shape.dtype)
