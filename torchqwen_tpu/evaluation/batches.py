"""How requests to be scored run on the device: which go together, in which steps, and what comes back.

Requests with one context read it once. Its last token is where the first token of each of their continuations is scored;
then the context's states are copied to one row a continuation, and the rest of the continuations is read.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from torchqwen_tpu.cache import HybridCache
from torchqwen_tpu.models.causal_lm import CausalLM
from torchqwen_tpu.recording import Recorder
from torchqwen_tpu.runtime.packing import Row, Selected, extend

Request = tuple[Sequence[int], Sequence[int]]
"""Token ids of a context and of its continuation, at least one each."""


@dataclass(frozen=True)
class StepOptions:
    """What all steps have in common, so that two graphs serve all of them.

    tokens: of every step, a data-parallel rank; steps are filled up to it.
    alternatives: number of most likely tokens beside each target.
    """

    tokens: int
    alternatives: int
    recorders: tuple[Recorder, ...]


class Values(NamedTuple):
    """Of the scored tokens of a request: columns of `custom_ops.scoring` [n, columns], and records [layers, n, ...]."""

    scores: np.ndarray
    records: dict[str, np.ndarray]


def plan_batches(requests: Sequence[Request], size: int) -> list[list[list[int]]]:
    """Batches of at most `size` requests; of each, groups of numbers of requests that have one context.

    Batches hold about equally many tokens. A context that more than `size` requests have is read once a batch.
    """
    by_context = defaultdict(list)
    for number, (context, _) in enumerate(requests):
        by_context[tuple(context)].append(number)
    groups = [numbers[at : at + size] for numbers in by_context.values() for at in range(0, len(numbers), size)]

    def tokens(group: list[int]) -> int:
        return len(requests[group[0]][0]) + sum(len(requests[number][1]) for number in group)

    batches = [[] for _ in range(-(-len(requests) // size))]
    room = [size] * len(batches)
    lightest = [(0, index) for index in range(len(batches))]
    for group in sorted(groups, key=tokens, reverse=True):
        while lightest and room[lightest[0][1]] < len(group):
            heapq.heappop(lightest)
        if not lightest:
            batches.append([])
            room.append(size)
            lightest = [(0, len(batches) - 1)]
        load, index = lightest[0]
        batches[index].append(group)
        room[index] -= len(group)
        heapq.heapreplace(lightest, (load + tokens(group), index))
    return [batch for batch in batches if batch]


class RunningBatch:
    """One batch on its way through the device. Making it queues its steps and does not wait for them.

    Args:
        cache: of at least as many rows as the batch has requests; nothing else may use it before `finish`.
    """

    def __init__(
        self, model: CausalLM, cache: HybridCache, requests: Sequence[Request], batch: list[list[int]], options: StepOptions
    ):
        self._model, self._options = model, options
        self.numbers = [number for group in batch for number in group]
        self._parts: list[list[tuple[int, np.ndarray]]] = [[] for _ in self.numbers]
        self._passes: list[Selected] = []
        cache.lengths[:], cache.offsets[:] = 0, 0  # every sequence starts afresh, whatever its row holds
        nothing = _row(0, (), (), ())
        rows, later = [nothing] * len(self.numbers), [nothing] * len(self.numbers)
        source = np.arange(cache.batch)
        scored: list[tuple[int, int, slice]] = []  # row of the request, row where it is scored, which of that row's targets
        first = 0
        for group in batch:
            context, (continuation, *others) = requests[group[0]][0], [requests[number][1] for number in group]
            if others:
                targets = [tokens[0] for tokens in (continuation, *others)]
                rows[first] = _row(0, context, [len(context) - 1] * len(group), targets)
                scored += [(first + at, first, slice(at, at + 1)) for at in range(len(group))]
                for at, tokens in enumerate((continuation, *others)):
                    later[first + at] = _row(len(context), tokens[:-1], range(len(tokens) - 1), tokens[1:])
                source[first : first + len(group)] = first
            else:
                wanted = range(len(context) - 1, len(context) + len(continuation) - 1)
                rows[first] = _row(0, [*context, *continuation[:-1]], wanted, continuation)
                scored.append((first, first, slice(None)))
            first += len(group)
        self._run(cache, rows, scored)
        rest = [(number, number, slice(None)) for number, row in enumerate(later) if len(row.tokens)]
        if rest:
            cache.reorder_cache(torch.from_numpy(source))
            self._run(cache, later, rest)

    def finish(self) -> list[Values]:
        """The values of each request of `numbers`, waiting for them."""
        get = self._model.mesh.get
        passes = []
        for selected in self._passes:
            scores = torch.cat([get(step) for step in selected.steps]).numpy()
            names = selected.records[0]
            records = {name: torch.cat([get(step[name]) for step in selected.records], 1).numpy() for name in names}
            passes.append(Values(scores, records))
        return [self._joined(passes, parts) for parts in self._parts]

    def _run(self, cache: HybridCache, rows: list[Row], scored: list[tuple[int, int, slice]]) -> None:
        options = self._options
        selected = extend(
            self._model.steps, cache, rows, alternatives=options.alternatives, smallest_bucket=options.tokens,
            recorders=options.recorders, largest_step=options.tokens,
        )  # fmt: skip
        for request, row, wanted in scored:
            self._parts[request].append((len(self._passes), selected.place[row][wanted]))
        self._passes.append(selected)

    @staticmethod
    def _joined(passes: list[Values], parts: list[tuple[int, np.ndarray]]) -> Values:
        scores = np.concatenate([passes[number].scores[place] for number, place in parts])
        records = {
            name: np.concatenate([passes[number].records[name][:, place] for number, place in parts], axis=1)
            for name in passes[0].records
        }
        return Values(scores, records)


def _row(start: int, tokens: Sequence[int], wanted: Sequence[int], targets: Sequence[int]) -> Row:
    """Tokens of a sequence from position `start` on."""
    positions = np.broadcast_to(start + np.arange(len(tokens), dtype=np.int32), (3, len(tokens)))
    return Row(np.array(tokens, np.int64), positions, np.array(wanted, np.int64), np.array(targets, np.int64))
