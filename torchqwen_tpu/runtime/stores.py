"""Where the states of an engine lie: pages that all steps share, and several stores of recurrent states."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from torchqwen_tpu.batch import Header, place_header
from torchqwen_tpu.cache import CacheLayout, CacheShape
from torchqwen_tpu.ops import PAGED, Operations
from torchqwen_tpu.runtime.graph import CompiledGraph
from torchqwen_tpu.runtime.scheduler import Move

SLOTS, CHECKPOINTS, NARROW = "slots", "checkpoints", "narrow"
"""Stores: of running requests, of prefixes, and of the few that decode in a narrow step."""


@dataclass
class States:
    """States of all layers, as a step of the model takes and replaces them."""

    states: list[torch.Tensor]


class StateStores:
    """Pages and the slots of `shape`, and further stores of recurrent states; allocated once, updated in place.

    Args:
        sizes: places a rank of each further store; one without places does not exist.

    Attributes:
        extra: the further stores that exist.
    """

    def __init__(self, layout: CacheLayout, ops: Operations, shape: CacheShape, sizes: Mapping[str, int]):
        self._mesh, self._ops, self._rows = layout.mesh, ops, shape.rows
        kinds = [axes for _, _, axes in layout.arrays(shape)]
        self._recurrent = [(place, axes) for place, axes in enumerate(kinds) if axes not in PAGED]
        states = layout.allocate(shape)
        self._pages = {place: states[place] for place, axes in enumerate(kinds) if axes in PAGED}
        self._stores = {SLOTS: self._recurrent_of(states)}
        self.extra = [name for name, size in sizes.items() if size]
        for name in self.extra:
            one_page = CacheShape(sizes[name], 1, shape.page_size, pool=1)
            self._stores[name] = self._recurrent_of(layout.allocate(one_page))
        self._graphs: dict[tuple[str, str], CompiledGraph] = {}

    @contextlib.contextmanager
    def opened(self, store: str) -> Iterator[States]:
        """The states of a step whose slots are those of a store; what the step leaves there is kept."""
        recurrent = iter(self._stores[store])
        count = len(self._pages) + len(self._recurrent)
        states = States([self._pages[place] if place in self._pages else next(recurrent) for place in range(count)])
        yield states
        self._pages = {place: states.states[place] for place in self._pages}
        self._stores[store] = self._recurrent_of(states.states)

    def move(self, moves: Sequence[Move], origin: str, target: str) -> None:
        """Copy recurrent states from one store to places of another; at most as many a rank as there are slots."""
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
                for into, out_of, (_, axes) in zip(states[:count], states[count:], self._recurrent, strict=True)
            ]

        inputs = [place_header(self._mesh, layout.pack(ranks, **values)), *self._stores[target], *self._stores[origin]]
        if (origin, target) not in self._graphs:
            self._graphs[origin, target] = CompiledGraph(moved, inputs, donated=range(1, count + 1))
        self._stores[target] = self._graphs[origin, target](inputs)

    def _recurrent_of(self, states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [states[place] for place, _ in self._recurrent]
