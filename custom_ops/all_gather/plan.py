"""How an all-gather is cut into pieces of rows and streams of columns, by a model of its time."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from custom_ops.all_gather.cost import hierarchical_time, xla_time
from custom_ops.all_gather.shapes import AllGatherShape
from custom_ops.hypercube import layout
from custom_ops.hypercube.layout import LANES, streams

ROW_TILE = 32
"""Rows of a tile of bytes: pieces start at multiples of it."""
PIECES = (1, 2, 3, 4, 6, 8)
SEMAPHORES = 256
"""For the steps of all pieces and streams, at most."""

BESIDE = 5e-6
"""Seconds of work that the compiler puts beside XLA's all-gather of few rows, and that would follow the kernel: the shared
expert's first product, whose weights take 4.5 µs to read in 397B (BF16)."""


@dataclass(frozen=True)
class Plan:
    """How a shape is cut.

    Args:
        pieces: first and last row (not included) of each piece.
        streams: first and last column of each stream.
        time: modelled seconds.
    """

    pieces: tuple[tuple[int, int], ...]
    streams: tuple[tuple[int, int], ...]
    time: float


@functools.cache
def plan(shape: AllGatherShape) -> Plan:
    """The cut with the least modelled time."""
    columns = streams(0, -(-shape.columns // LANES) * LANES, shape.dimensions)
    columns = tuple((first, min(last, shape.columns)) for first, last in columns if last > first)
    candidates = {_pieces(shape.rows, count) for count in PIECES if count * shape.dimensions**2 <= SEMAPHORES}
    cuts = [Plan(pieces, columns, hierarchical_time(shape, pieces, columns)) for pieces in candidates]
    return min(cuts, key=lambda cut: (cut.time, len(cut.pieces)))


def refusal(shape: AllGatherShape) -> str | None:
    """Why the kernel does not take a shape; None where it does."""
    if not shape.rows or not shape.columns:
        return "there is nothing to gather"
    return layout.refusal(shape.chips, shape.cores)


def gains(shape: AllGatherShape) -> bool:
    """Whether the kernel takes a shape and is faster than XLA's all-gather with work beside it, by the model."""
    return refusal(shape) is None and plan(shape).time + BESIDE < xla_time(shape)


def _pieces(rows: int, count: int) -> tuple[tuple[int, int], ...]:
    """As even as tiles allow, the last one with what is left."""
    size = -(-rows // (count * ROW_TILE)) * ROW_TILE
    return tuple((first, min(first + size, rows)) for first in range(0, rows, size))
