"""What the scheduler decided, as steps of the model: headers are packed here, states stay on the device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from custom_ops.gated_delta_net.metadata import check_metadata
from torchqwen_tpu.batch import Header, bucket, place_header
from torchqwen_tpu.cache import CacheLayout, CacheShape
from torchqwen_tpu.ops import PAGES
from torchqwen_tpu.runtime.graph import CompiledGraph
from torchqwen_tpu.runtime.packing import SMALLEST_BUCKET
from torchqwen_tpu.runtime.parameters import SHORTLIST
from torchqwen_tpu.runtime.request import Request
from torchqwen_tpu.runtime.scheduler import Move, Piece
from torchqwen_tpu.runtime.step import DecodeShape, ExtendShape, Steps

_SAMPLING = ("temperature", "top_p", "min_p")


@dataclass
class Pools:
    """States of all slots and pages, as steps of the model take and replace them."""

    shape: CacheShape
    states: list[torch.Tensor]


class Executor:
    """Steps over pools that are allocated once.

    Args:
        shape: slots a rank, the width of their page tables, pages a rank.
        checkpoints: places a rank for recurrent states of prefixes.
        token_budget: the most tokens of a rank's prefill step.

    Attributes:
        device_seconds: time spent in launching steps and waiting for their results.
    """

    def __init__(self, steps: Steps, layout: CacheLayout, shape: CacheShape, checkpoints: int, token_budget: int):
        self.steps, self.mesh, self.shape = steps, layout.mesh, shape
        self.vocabulary = layout.config.vocab_size
        self.pools = Pools(shape, layout.allocate(shape))
        self.device_seconds = 0.0
        kinds = [axes for _, _, axes in layout.arrays(shape)]
        self._recurrent = [(place, axes) for place, axes in enumerate(kinds) if axes != PAGES]
        self._checkpoints = []
        if checkpoints:
            kept = layout.allocate(CacheShape(checkpoints, 1, shape.page_size, pool=1))
            self._checkpoints = [kept[place] for place, _ in self._recurrent]
        self._graphs: dict[tuple, CompiledGraph] = {}
        largest = bucket(token_budget, SMALLEST_BUCKET)
        self._buckets = [SMALLEST_BUCKET << n for n in range(largest.bit_length()) if SMALLEST_BUCKET << n <= largest]
        self._candidates = sorted({0, min(SHORTLIST, self.vocabulary), self.vocabulary})

    def prefill(self, pieces: Sequence[Sequence[Piece]]) -> list[tuple[Request, int]]:
        """Take tokens of requests, by rank; returns those whose next token was chosen, with it."""
        ranks, rows = self.mesh.ranks, self.shape.rows
        tokens = bucket(max(sum(piece.count for piece in own) for own in pieces), SMALLEST_BUCKET)
        shape = ExtendShape(tokens, rows, self.shape)
        values = {name: np.zeros((ranks, size), np.int32) for name, size in shape.header.fields}
        positions = values["positions"].reshape(ranks, 3, tokens)
        positions[:] = -1
        tables = values["page_table"].reshape(ranks, rows, -1)
        chosen: list[list[Request]] = [[] for _ in pieces]
        for rank, own in enumerate(pieces):
            start = 0
            for row, piece in enumerate(own):
                request, first, end = piece.request, piece.request.computed, start + piece.count
                values["tokens"][rank, start:end] = request.tokens[first : first + piece.count]
                positions[rank, :, start:end] = np.arange(first, first + piece.count)
                values["query_start"][rank, row], values["query_length"][rank, row] = start, piece.count
                values["context_length"][rank, row], values["slot"][rank, row] = first, request.slot
                tables[rank, row, : len(request.pages)] = request.pages
                if piece.is_last:
                    values["select"][rank, len(chosen[rank])] = end - 1
                    chosen[rank].append(request)
                start = end
            fields = (values[name][rank] for name in ("query_start", "query_length", "context_length", "slot"))
            check_metadata(*fields, tokens=tokens, slots=rows)  # kernels run without bounds checks
        logits = self._prefill(shape, values)
        if not any(chosen):
            return []
        result = self._choose(logits, chosen)
        return [(request, int(result[rank, row])) for rank, own in enumerate(chosen) for row, request in enumerate(own)]

    def decode(self, turns: Sequence[tuple[Request, int]]) -> list[list[int]]:
        """Generate tokens of requests, as many as each turn says or up to a stop token."""
        ranks, rows = self.mesh.ranks, self.shape.rows
        shape = DecodeShape(self.shape, self._candidates_of([request for request, _ in turns]))
        values = {name: np.zeros((ranks * rows, size // rows), np.int32) for name, size in shape.header.fields}
        values["finished"][:] = values["fed"][:] = 1
        sampling = self._blank_sampling()
        values["eos"][:] = -1
        places = [request.rank * rows + request.slot for request, _ in turns]
        for place, (request, steps) in zip(places, turns, strict=True):
            values["token"][place] = request.tokens[-1]
            values["finished"][place] = values["fed"][place] = 0
            values["context_length"][place] = request.computed
            values["page_table"][place, : len(request.pages)] = request.pages
            values["steps"][place] = steps
            eos = request.parameters.eos
            values["eos"][place, : len(eos)] = eos
            self._write_sampling(values, sampling, request, *divmod(place, rows))
        tokens = self._decode(shape, values, sampling)
        return [
            _until(tokens[:steps, place].tolist(), request.parameters.eos)
            for place, (request, steps) in zip(places, turns, strict=True)
        ]

    def save(self, moves: Sequence[Move]) -> None:
        """Keep the recurrent states of slots in checkpoints."""
        if moves:
            self._move(moves, "save")

    def restore(self, moves: Sequence[Move]) -> None:
        """Put checkpoints into slots."""
        if moves:
            self._move(moves, "restore")

    @property
    def graphs(self) -> int:
        """How many `warm_up` compiles."""
        return len(self._buckets) + 2 * len(self._candidates) + 2 * bool(self._checkpoints)

    def warm_up(self, compiled) -> None:
        """Compile everything that can be asked for by running it without any token; `compiled()` is called after each."""
        ranks, rows = self.mesh.ranks, self.shape.rows
        for tokens in self._buckets:
            shape = ExtendShape(tokens, rows, self.shape)
            values = {name: np.zeros((ranks, size), np.int32) for name, size in shape.header.fields}
            values["positions"][:] = -1
            logits = self._prefill(shape, values)
            compiled()
        for candidates in self._candidates:
            self._choose(logits, [[] for _ in range(ranks)], candidates)
            compiled()
            shape = DecodeShape(self.shape, candidates)
            values = {name: np.zeros((ranks * rows, size // rows), np.int32) for name, size in shape.header.fields}
            values["finished"][:] = values["fed"][:] = 1
            self._decode(shape, values, self._blank_sampling())
            compiled()
        if self._checkpoints:
            for kind in ("save", "restore"):
                self._move([], kind)
                compiled()

    def _prefill(self, shape: ExtendShape, values: dict[str, np.ndarray]) -> torch.Tensor:
        started = time.perf_counter()
        logits = self.steps.extend(shape, self.pools, shape.header.pack(self.mesh.ranks, **values)).result
        self.device_seconds += time.perf_counter() - started
        return logits

    def _decode(self, shape: DecodeShape, values: dict[str, np.ndarray], sampling: np.ndarray) -> np.ndarray:
        header = shape.header.pack(self.mesh.ranks, **values)
        started = time.perf_counter()
        tokens = self.steps.decode(shape, self.pools, header, torch.from_numpy(sampling.reshape(self.mesh.ranks, -1)))
        self.device_seconds += time.perf_counter() - started
        return tokens

    def _choose(self, logits: torch.Tensor, chosen: Sequence[Sequence[Request]], candidates: int | None = None) -> np.ndarray:
        """[ranks, rows] the next token of each request from the logits [ranks * rows, vocabulary] of its last."""
        ranks, rows = self.mesh.ranks, self.shape.rows
        if candidates is None:
            candidates = self._candidates_of([request for own in chosen for request in own])
        layout = Header((("seed", rows), ("generated", rows), ("top_k", rows)))
        values = {name: np.zeros((ranks * rows, 1), np.int32) for name, _ in layout.fields}
        sampling = self._blank_sampling()
        for rank, own in enumerate(chosen):
            for row, request in enumerate(own):
                self._write_sampling(values, sampling, request, rank, row)

        def choose(header, sampling, logits):
            if not candidates:
                return [logits.float().argmax(-1).to(torch.int32)]
            header = {name: value.reshape(-1) for name, value in layout.unpack(header).items()}
            temperature, top_p, min_p = (part.reshape(-1) for part in sampling.chunk(3, dim=1))
            return [self.steps.ops.sample(
                logits, header["seed"], header["generated"], temperature, header["top_k"], top_p, min_p, candidates=candidates
            )]  # fmt: skip

        started = time.perf_counter()
        sampling = self.mesh.put(torch.from_numpy(sampling.reshape(ranks, -1)), ("tokens", None))
        inputs = [place_header(self.mesh, layout.pack(ranks, **values)), sampling, logits]
        result = self.mesh.get(self._graph(("choose", candidates), choose, inputs)(inputs)[0]).numpy()
        self.device_seconds += time.perf_counter() - started
        return result.reshape(ranks, rows)

    def _move(self, moves: Sequence[Move], kind: str) -> None:
        ranks, rows = self.mesh.ranks, self.shape.rows
        layout = Header((("origin", rows), ("target", rows)))
        values = {"origin": np.zeros((ranks, rows), np.int32), "target": np.full((ranks, rows), -1, np.int32)}
        filled = [0] * ranks
        for move in moves:
            values["origin"][move.rank, filled[move.rank]] = move.origin
            values["target"][move.rank, filled[move.rank]] = move.target
            filled[move.rank] += 1
        slots = [self.pools.states[place] for place, _ in self._recurrent]
        targets, origins = (self._checkpoints, slots) if kind == "save" else (slots, self._checkpoints)
        count = len(targets)

        def moved(header, *states):
            header = {name: value.reshape(-1) for name, value in layout.unpack(header).items()}
            return [
                self.steps.ops.copy_states(target, origin, header["target"], header["origin"], axes)
                for target, origin, (_, axes) in zip(states[:count], states[count:], self._recurrent, strict=True)
            ]

        started = time.perf_counter()
        inputs = [place_header(self.mesh, layout.pack(ranks, **values)), *targets, *origins]
        results = self._graph((kind,), moved, inputs, donated=range(1, count + 1))(inputs)
        self.device_seconds += time.perf_counter() - started
        if kind == "save":
            self._checkpoints = results
        else:
            for (place, _), state in zip(self._recurrent, results, strict=True):
                self.pools.states[place] = state

    def _graph(self, key: tuple, function, inputs: list[torch.Tensor], donated=()) -> CompiledGraph:
        if key not in self._graphs:
            self._graphs[key] = CompiledGraph(function, inputs, donated)
        return self._graphs[key]

    def _candidates_of(self, requests: Sequence[Request]) -> int:
        """How many candidates serve all of them: none for greedy search, few where every top_k allows, or all."""
        sampling = [request.parameters for request in requests if request.parameters.samples]
        if not sampling:
            return 0
        few = all(0 < parameters.top_k <= SHORTLIST for parameters in sampling)
        return min(SHORTLIST, self.vocabulary) if few else self.vocabulary

    def _blank_sampling(self) -> np.ndarray:
        """[ranks, 3, rows] temperature, top_p and min_p that choose the largest score."""
        sampling = np.zeros((self.mesh.ranks, len(_SAMPLING), self.shape.rows), np.float32)
        sampling[:, 1] = 1
        return sampling

    @staticmethod
    def _write_sampling(values: dict[str, np.ndarray], sampling: np.ndarray, request: Request, rank: int, row: int) -> None:
        place = rank * sampling.shape[2] + row
        values["seed"][place], values["generated"][place] = request.parameters.seed, request.generated
        values["top_k"][place] = min(request.parameters.top_k, np.iinfo(np.int32).max)
        sampling[rank, :, row] = [getattr(request.parameters, name) for name in _SAMPLING]


def _until(tokens: list[int], stops: Sequence[int]) -> list[int]:
    """Tokens up to the first stop token, which is included."""
    for number, token in enumerate(tokens):
        if token in stops:
            return tokens[: number + 1]
    return tokens
