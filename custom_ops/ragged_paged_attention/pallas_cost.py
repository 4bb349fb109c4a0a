"""What the kernels do under a load where their schedules cannot tell, because it is data: turns of their loops, and bytes."""

from __future__ import annotations

from dataclasses import dataclass

from custom_ops.ragged_paged_attention.pallas_layout import (
    DECODE_BLOCK,
    PREFILL_BLOCK,
    AttentionShape,
    Layout,
    tile_of,
)
from custom_ops.schedule.bundles import Loop


@dataclass(frozen=True)
class AttentionWork:
    """One core's call.

    Args:
        rows: of the batch.
        decoding, context: sequences with one row, and tokens that each has in its pages.
        sequences, prefill, prefill_context: other sequences, the rows of all of them, and tokens that each has in its pages.
    """

    shape: AttentionShape
    rows: int
    decoding: int = 0
    context: float = 0
    sequences: int = 0
    prefill: int = 0
    prefill_context: float = 0

    @property
    def tiles(self) -> int:
        """Of rows of longer sequences."""
        each = self.prefill / self.sequences if self.prefill else 0
        return self.sequences * -int(-each // tile_of(self.rows))

    @property
    def seen(self) -> float:
        """Positions before a tile's own, on average."""
        return self.prefill_context + self.prefill / max(self.sequences, 1) / 2

    @property
    def pages(self) -> float:
        """That the new rows of longer sequences lie in."""
        return self.sequences * (self.prefill / max(self.sequences, 1) / self.shape.page_size + 1) if self.prefill else 0

    def turns(self, name: str, loop: Loop) -> float | None:
        """Turns of a loop each time that it is entered, by its place among the others: None leaves the schedule's constant.

        Loops over the pages of a block are taken to go through all of them.
        """
        if loop.steps is not None and not loop.inner:
            return None
        deep = any(inner.inner for inner in loop.inner)
        if name.startswith("attention_decode"):
            layout = self._layout(DECODE_BLOCK)
            if deep:
                return self.decoding
            return self.context // layout.positions if loop.inner else layout.block_pages
        if name.startswith("attention_prefill"):
            layout = self._layout(PREFILL_BLOCK)
            if loop.steps is not None:
                return None  # over all sequences, to list their tiles
            if deep:
                return self.tiles
            if len(loop.inner) > 1:
                return 1 + tile_of(self.rows) / layout.positions  # blocks that some rows of a tile see in part
            return self.seen // layout.positions if loop.inner else layout.block_pages
        if name.startswith("attention_write"):
            return None if loop.steps is not None else self.pages
        return None

    def bytes(self, name: str) -> float | None:
        """Pages that are read and written; rows that are."""
        shape, layout = self.shape, self._layout(DECODE_BLOCK)
        token = layout.page_bytes / shape.page_size
        row = 2 * shape.query_heads * shape.dim * (4 if shape.dtype == "float32" else 2)
        if name.startswith("attention_decode"):
            return self.decoding * ((self.context + 1) * token + layout.tile_rows * token + row)
        if name.startswith("attention_prefill"):
            return self.tiles * (self.seen + tile_of(self.rows) / 2) * token + self.prefill * row
        if name.startswith("attention_write"):
            return self.pages * (2 * layout.page_bytes + 4 * layout.row_words * shape.page_size)
        return None

    def least_bytes(self) -> float:
        """That have to move whatever the kernels do: each sequence's pages once, new keys and values, rows."""
        shape, layout = self.shape, self._layout(DECODE_BLOCK)
        tokens = self.decoding + self.prefill
        read = self.decoding * self.context + self.sequences * self.prefill_context
        row = 2 * shape.query_heads * shape.dim * (4 if shape.dtype == "float32" else 2)
        return (read + tokens) * layout.page_bytes / shape.page_size + tokens * row

    def matrix_flops(self) -> float:
        """Both products of every token with all positions that it sees."""
        each = self.prefill / max(self.sequences, 1)
        pairs = self.decoding * (self.context + 1) + self.prefill * (self.prefill_context + (each + 1) / 2)
        return 4 * pairs * self.shape.query_heads * self.shape.dim

    def _layout(self, positions: int) -> Layout:
        return Layout.of_shape(self.shape, positions, False)
