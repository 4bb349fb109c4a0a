"""Repetition penalty and shortest lengths of a step's sequences, on their way to the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from torchqwen_tpu.batch import Header


class Penalties:
    """Those of `rows` sequences on each of `ranks` ranks; at first they change nothing.

    A sequence's tokens travel as bits, token v as bit v % 32 of word v // 32.

    Attributes:
        neutral: whether they change nothing.
    """

    def __init__(self, ranks: int, rows: int, vocabulary: int):
        self._ranks, self._layout = ranks, penalty_header(rows, vocabulary)
        self._seen = np.zeros((ranks * rows, _words(vocabulary)), np.int32)
        self._penalty = np.ones(ranks * rows, np.float32)
        self._least = np.zeros(ranks * rows, np.int32)
        self.neutral = True

    def put(self, place: int, tokens: Sequence[int], repetition_penalty: float, least: int) -> None:
        """Of one sequence.

        Args:
            place: rank * rows + row.
            tokens: so far, the prompt's included.
            repetition_penalty: as transformers has it; 1 for none.
            least: tokens to generate before a stop token may come.
        """
        self.neutral = False
        self._penalty[place], self._least[place] = repetition_penalty, least
        seen = np.zeros(32 * self._seen.shape[1], bool)
        seen[np.asarray(tokens)] = True
        self._seen[place] = np.packbits(seen, bitorder="little").view("<i4")

    def pack(self) -> torch.Tensor:
        """[ranks, width of `penalty_header`] int32."""
        return self._layout.pack(self._ranks, seen=self._seen, penalty=self._penalty.view(np.int32), least=self._least)


def penalty_header(rows: int, vocabulary: int) -> Header:
    """Penalties are the bits of float32."""
    return Header((("seen", rows * _words(vocabulary)), ("penalty", rows), ("least", rows)))


def _words(vocabulary: int) -> int:
    return -(-vocabulary // 32)
