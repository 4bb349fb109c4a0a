"""Sizes that the kernels are built for, and which they take."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp

from custom_ops.ragged_paged_attention.pages import FP8

LANES = 128
GROUP = 8
"""Rows of a tile in memory, and the least of a product: the query heads of a KV head are padded to a power of two from here."""
DECODE_BLOCK = 1024
PREFILL_BLOCK = 512
"""Positions that a step of a kernel reads, if a sequence's pages have room for so many."""
PREFILL_TILE = 64
"""Most rows of a sequence that the prefill kernel handles together."""
TABLE_BYTES = 512 << 10
"""Of scalar memory, the most that a page table may take."""
_PAGE_DTYPES = (jnp.float32, jnp.bfloat16, FP8)


@dataclass(frozen=True)
class AttentionShape:
    """One device's share of a call.

    sequences, pages: rows and columns of the page table.
    dtype, page_dtype: names of the dtypes of the query and the pages.
    """

    query_heads: int
    heads: int
    dim: int
    page_size: int
    sequences: int
    pages: int
    dtype: str
    page_dtype: str

    @classmethod
    def of_arguments(cls, query, key, value, pages, query_start, query_length, context_length, page_table, *_, **__):
        return cls(
            query.shape[1], key.shape[1], key.shape[2], pages.shape[2], *page_table.shape, query.dtype.name, pages.dtype.name
        )


def supports(shape: AttentionShape) -> bool:
    """Whether the kernels take these sizes: heads as wide as whole tiles, pages of a power of two and of whole tiles (FP8 with
    its scales: of 128 tokens and more), and a page table that fits scalar memory."""
    tile = 128 if shape.page_dtype == "float8_e4m3fn" else 32 // jnp.dtype(shape.page_dtype).itemsize
    return (
        shape.dim % LANES == 0
        and shape.dtype in ("float32", "bfloat16")
        and jnp.dtype(shape.page_dtype) in map(jnp.dtype, _PAGE_DTYPES)
        and shape.page_size % tile == 0
        and shape.page_size & (shape.page_size - 1) == 0
        and 4 * shape.sequences * shape.pages <= TABLE_BYTES
    )


def tile_of(rows: int) -> int:
    """Rows of a sequence that the prefill kernel handles together, in a batch of so many rows."""
    return min(PREFILL_TILE, 1 << rows.bit_length() - 1)


@dataclass(frozen=True)
class Layout:
    """How a kernel cuts its work.

    heads: KV heads.
    group: query heads of each, padded.
    pages: of a sequence, in the page table.
    block_pages: that one step reads.
    interpret: the kernel runs in Pallas' interpreter.
    """

    heads: int
    group: int
    dim: int
    page_size: int
    pages: int
    page_dtype: jnp.dtype
    block_pages: int
    interpret: bool

    @classmethod
    def of_shape(cls, shape: AttentionShape, positions: int, interpret: bool) -> Layout:
        """positions: of a block, at most."""
        group = max(1 << (shape.query_heads // shape.heads - 1).bit_length(), GROUP)
        block_pages = min(max(positions // shape.page_size, 1), 1 << (shape.pages - 1).bit_length())
        dtype = jnp.dtype(shape.page_dtype)
        return cls(shape.heads, group, shape.dim, shape.page_size, shape.pages, dtype, block_pages, interpret)

    @property
    def scaled(self) -> bool:
        return self.page_dtype == FP8

    @property
    def positions(self) -> int:
        """Of a block."""
        return self.block_pages * self.page_size

    @property
    def tile_rows(self) -> int:
        """Rows of a page that are copied together: a tile of memory, 32 bits deep in 8 rows."""
        return 32 // self.page_dtype.itemsize

    @property
    def row_words(self) -> int:
        """Of 32 bits, of a token's keys and values as `pallas_write` takes them: whole tiles of memory."""
        rows = 2 * self.heads * (self.dim // LANES) + self.scaled
        return -(-rows // 8) * 8 * LANES

    @property
    def page_bytes(self) -> int:
        """Of one page, and its scales."""
        row = self.dim * self.page_dtype.itemsize + 4 * self.scaled
        return 2 * self.heads * self.page_size * row

    def page_of(self, position):
        """The page of a sequence that a position lies in."""
        return position >> int(math.log2(self.page_size))

    def block_of(self, position):
        """The block of a sequence that a position lies in."""
        return position >> int(math.log2(self.positions))
