"""Where the states of an engine lie: pages that all steps share, and several stores of recurrent states."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from torchqwen_tpu.batch import Header, place_header
from torchqwen_tpu.cache import CacheLayout, CacheShape
from torchqwen_tpu.ops import PAGED, Operations
from torchqwen_tpu.runtime.graph import CompiledGraph
from torchqwen_tpu.runtime.scheduler import Move

SLOTS, CHECKPOINTS = "slots", "checkpoints"
"""Stores: of running requests, and of prefixes."""


@dataclass
class States:
    """States of all layers, as a step of the model takes and replaces them."""

    states: list[torch.Tensor]


class StateStores:
    """Pages and the slots of `shape`, and checkpoints of recurrent states; allocated once, updated in place.

    Args:
        checkpoints: their places a rank; without any there is no such store.

    Attributes:
        paths: between which stores, or places of one, states move.
    """

    def __init__(self, layout: CacheLayout, ops: Operations, shape: CacheShape, checkpoints: int):
        self._mesh, self._ops, self._rows = layout.mesh, ops, shape.rows
        kinds = [axes for _, _, axes in layout.arrays(shape)]
        self._recurrent = [(place, axes) for place, axes in enumerate(kinds) if axes not in PAGED]
        states = layout.allocate(shape)
        self._pages = {place: states[place] for place, axes in enumerate(kinds) if axes in PAGED}
        self._stores = {SLOTS: self._recurrent_of(states)}
        self.paths = [(SLOTS, SLOTS)]
        if checkpoints:
            one_page = CacheShape(checkpoints, 1, shape.page_size, pool=1)
            self._stores[CHECKPOINTS] = self._recurrent_of(layout.allocate(one_page))
            self.paths += [(SLOTS, CHECKPOINTS), (CHECKPOINTS, SLOTS)]
        self._graphs: dict[tuple[str, str], CompiledGraph] = {}

    @contextlib.contextmanager
    def opened(self) -> Iterator[States]:
        """The states of a step; what it leaves there is kept."""
        recurrent = iter(self._stores[SLOTS])
        count = len(self._pages) + len(self._recurrent)
        states = States([self._pages[place] if place in self._pages else next(recurrent) for place in range(count)])
        yield states
        self._pages = {place: states.states[place] for place in self._pages}
        self._stores[SLOTS] = self._recurrent_of(states.states)

    def move(self, moves: Sequence[Move], origin: str, target: str) -> None:
        """Copy recurrent states from one store to another, or to other places of the same, one after the other; at most as
        many a rank as there are slots."""
        ranks, rows = self._mesh.ranks, self._rows
        layout = Header((("origin", rows), ("target", rows)))
        values = {"origin": np.zeros((ranks, rows), np.int32), "target": np.full((ranks, rows), -1, np.int32)}
        filled = [0] * ranks
        for move in moves:
            values["origin"][move.rank, filled[move.rank]] = move.origin
            values["target"][move.rank, filled[move.rank]] = move.target
            filled[move.rank] += 1
        count = len(self._recurrent)

        def moved(header, *states):
            header = {name: value.reshape(-1) for name, value in layout.unpack(header).items()}
            return [
                self._ops.copy_states(into, out_of, header["target"], header["origin"], axes)
                for into, out_of, (_, axes) in zip(states[:count], states[-count:], self._recurrent, strict=True)
            ]

        inputs = [place_header(self._mesh, layout.pack(ranks, **values)), *self._stores[target]]
        if origin != target:
            inputs += self._stores[origin]
        if (origin, target) not in self._graphs:
            self._graphs[origin, target] = CompiledGraph(moved, inputs, donated=range(1, count + 1))
        self._stores[target] = self._graphs[origin, target](inputs)

    def _recurrent_of(self, states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [states[place] for place, _ in self._recurrent]
