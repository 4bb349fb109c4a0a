"""What the kernels of the local experts do in a step where their schedules cannot tell, because it is data: turns and bytes.

Routing is taken to be even and independent, so experts that are hit, tiles and pairs are expectations.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from custom_ops.ragged_moe.pallas_combine import PIECE
from custom_ops.ragged_moe.pallas_plan import GROUP, LANES, ExpertsShape, plan, supports, tiles_of_an_expert
from custom_ops.ragged_moe.pallas_work import BLOCK_ROWS
from custom_ops.schedule.bundles import Loop

SHORT_LOOP, LONG_LOOP = 40, 100
"""Bundles: of the loops of `pallas_work` the one that lists an expert's items has fewer than either, the one that writes a
group of pairs lies between, the one that places a tile of them has more."""


@dataclass(frozen=True)
class ExpertsLoad:
    """Local experts at work.

    Args:
        shape: what the kernels are built for.
        tokens: rows that hold one.
        passes: over which the work is spread; turns and bytes are those of one of them.
    """

    shape: ExpertsShape
    tokens: float
    passes: int = 1

    @property
    def pallas(self) -> bool:
        """Whether the kernels take these sizes; elsewhere XLA's loop over tiles computes the experts."""
        return supports(self.shape)

    @property
    def filled(self) -> ExpertsShape:
        return dataclasses.replace(self.shape, rows=self.tokens)

    @property
    def hit(self) -> float:
        """Expected local experts that at least one token picks."""
        return self.shape.experts * (1 - (1 - self.shape.top_k / self.shape.num_experts) ** self.tokens)

    @property
    def pairs(self) -> float:
        """Of a pass."""
        return self.filled.mean_pairs / self.passes

    @property
    def items(self) -> float:
        """Tiles of an expert's rows in a pass."""
        return self.shape.experts * tiles_of_an_expert(self.filled, plan(self.shape).tile) / self.passes

    def by_pass(self) -> ExpertsLoad:
        """The same by pass: there is more than one where pairs are too many for the memory of their results."""
        passes = -(-math.ceil(self.filled.mean_pairs) // plan(self.shape).pairs)
        return dataclasses.replace(self, passes=passes)

    @property
    def blocks(self) -> int:
        return -(-self.shape.rows // BLOCK_ROWS)

    @property
    def pieces(self) -> float:
        """Of a block of rows: its results are a run of their own, of which the last piece is partial."""
        return max(self.pairs / self.blocks / PIECE + 0.5 * (self.blocks > 1), 1.0)

    def turns(self, kernel: str, loop: Loop) -> float | None:
        """How often a loop of a kernel runs each time that it is entered; None for what the schedule or nobody knows."""
        if kernel.startswith("ragged_moe_group") and not loop.inner and loop.own < SHORT_LOOP:
            return self.items / self.shape.experts  # its exit test compares with another loop's constant
        if loop.steps is not None:
            return None
        if kernel.startswith("ragged_moe_experts"):
            if loop.inner:
                return self.items
            tile = plan(self.shape).tile
            return tiles_of_an_expert(self.filled, GROUP) / tiles_of_an_expert(self.filled, tile)  # groups of an item's rows
        if kernel.startswith("ragged_moe_combine"):
            return self.pieces
        if kernel.startswith("ragged_moe_group"):
            if loop.own > LONG_LOOP:
                return max(self.pairs / self.blocks / LANES + 0.5 * (self.blocks > 1), 1.0)
            return self.pairs / self.blocks / GROUP + 0.5
        return None

    def bytes(self, kernel: str) -> float | None:
        """Bytes that a kernel moves, where it touches only a part of what it is given: experts that are hit, and each pair's
        row read and result written; then results read and rows written, and read from the second pass on."""
        shape, row = self.shape, 2 * self.shape.hidden
        if kernel.startswith("ragged_moe_experts"):
            scales = 4 * (2 * shape.width + shape.hidden) * shape.experts if shape.scales == "channel" else 0
            return self.hit / self.passes * shape.weight_bytes + scales + 2 * row * self.pairs
        if kernel.startswith("ragged_moe_combine"):
            return self.blocks * self.pieces * PIECE * row + (2 - 1 / self.passes) * shape.rows * row
        return None
