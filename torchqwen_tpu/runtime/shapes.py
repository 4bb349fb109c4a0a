"""Sizes of steps: what a compiled graph is looked up by, and how its integers are packed."""

from __future__ import annotations

from dataclasses import dataclass

from torchqwen_tpu.batch import Header
from torchqwen_tpu.cache import CacheShape
from torchqwen_tpu.recording import Recorder

EOS_SLOTS = 8
"""Stop tokens of a sequence that a decode graph has room for."""


@dataclass(frozen=True)
class ExtendShape:
    """Sizes of an extend step, each a rank: tokens, rows whose logits are wanted, and the cache.

    decode: every sequence takes at most one token, and token i belongs to row i of the cache.
    alternatives: None for logits; otherwise the scores of given tokens, with that many alternatives beside each.
    recorders: what is kept of the values inside the layers.
    """

    tokens: int
    selected: int
    cache: CacheShape
    decode: bool = False
    embeddings: bool = False
    hidden_states: bool = False
    alternatives: int | None = None
    recorders: tuple[Recorder, ...] = ()

    @property
    def header(self) -> Header:
        rows = self.cache.rows
        targets = self.selected if self.alternatives is not None else 0
        return Header((
            ("tokens", self.tokens),
            ("positions", 3 * self.tokens),
            ("query_start", rows),
            ("query_length", rows),
            ("context_length", rows),
            ("slot", rows),
            ("page_table", rows * self.cache.pages),
            ("select", self.selected),
            ("target", targets),
        ))  # fmt: skip


@dataclass(frozen=True)
class DecodeShape:
    """Sizes of a decode step: its cache, the candidates that sampling sorts (0: greedy), what is kept of the values inside
    the layers, and the sequences a rank if they are fewer than the cache has: its first ones."""

    cache: CacheShape
    candidates: int = 0
    recorders: tuple[Recorder, ...] = ()
    width: int | None = None

    @property
    def rows(self) -> int:
        """Sequences a rank."""
        return self.width or self.cache.rows

    @property
    def header(self) -> Header:
        rows = self.rows
        return Header((
            ("token", rows),
            ("finished", rows),
            ("fed", rows),
            ("context_length", rows),
            ("offsets", 3 * rows),
            ("page_table", rows * self.cache.pages),
            ("seed", rows),
            ("generated", rows),
            ("top_k", rows),
            ("steps", rows),
            ("eos", rows * EOS_SLOTS),
        ))  # fmt: skip
