"""What the scheduler decided, as steps of the model: headers are packed here, states stay on the device."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from custom_ops.gated_delta_net.metadata import check_metadata
from torchqwen_tpu.batch import Header, bucket, place_header
from torchqwen_tpu.cache import CacheLayout, CacheShape
from torchqwen_tpu.runtime.graph import CompiledGraph
from torchqwen_tpu.runtime.packing import SMALLEST_BUCKET
from torchqwen_tpu.runtime.parameters import SHORTLIST
from torchqwen_tpu.runtime.penalties import Penalties
from torchqwen_tpu.runtime.request import Request
from torchqwen_tpu.runtime.scheduler import Move, Piece
from torchqwen_tpu.runtime.shapes import EOS_SLOTS, DecodeShape, ExtendShape
from torchqwen_tpu.runtime.step import Steps
from torchqwen_tpu.runtime.stores import CHECKPOINTS, SLOTS, StateStores

_SAMPLING = ("temperature", "top_p", "min_p")


def decode_widths(rows: int) -> list[int]:
    """Sequences a rank of each decode step that there is, ascending.

    Row i of a decode step is slot i: with one step for all slots, a single request would pay for as many as there are.
    """
    return sorted({rows, *(max(rows // part, 2) for part in (2, 8) if rows > 4)})


class Executor:
    """Steps over pools that are allocated once.

    Args:
        shape: slots a rank, the width of their page tables, pages a rank.
        checkpoints: places a rank for recurrent states of prefixes.
        token_budget: the most tokens of a rank's prefill step.

    Attributes:
        widths: sequences a rank of each decode step, ascending.
        device_seconds: time spent in launching steps and waiting for their results.
    """

    def __init__(self, steps: Steps, layout: CacheLayout, shape: CacheShape, checkpoints: int, token_budget: int):
        self.steps, self.mesh, self.shape = steps, layout.mesh, shape
        self.vocabulary = layout.config.vocab_size
        self.device_seconds = 0.0
        self.widths = decode_widths(shape.rows)
        self._stores = StateStores(layout, steps.ops, shape, checkpoints)
        self._choosers: dict[int, CompiledGraph] = {}
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

    def decode(self, turns: Sequence[tuple[Request, int]], width: int) -> list[list[int]]:
        """Generate tokens of requests in slots below `width`, as many as each turn says or up to a stop token."""
        shape = self._decode_shape(width, self._candidates_of([request for request, _ in turns]))
        values, sampling = self._idle_rows(shape)
        penalties = Penalties(self.mesh.ranks, width, self.vocabulary)
        places = [request.rank * width + request.slot for request, _ in turns]
        for place, (request, steps) in zip(places, turns, strict=True):
            values["token"][place] = request.tokens[-1]
            values["finished"][place] = values["fed"][place] = 0
            values["context_length"][place] = request.computed
            values["page_table"][place, : len(request.pages)] = request.pages
            values["steps"][place] = steps
            self._write_sampling(values, sampling, penalties, request, *divmod(place, width))
        tokens = self._decode(shape, values, sampling, penalties)
        return [
            _until(tokens[:steps, place].tolist(), request.parameters.eos)
            for place, (request, steps) in zip(places, turns, strict=True)
        ]

    def save(self, moves: Sequence[Move]) -> None:
        """Keep the recurrent states of slots in checkpoints."""
        if moves:
            self._move(moves, SLOTS, CHECKPOINTS)

    def restore(self, moves: Sequence[Move]) -> None:
        """Put checkpoints into slots."""
        if moves:
            self._move(moves, CHECKPOINTS, SLOTS)

    def shift(self, moves: Sequence[Move]) -> None:
        """Bring slots into others."""
        if moves:
            self._move(moves, SLOTS, SLOTS)

    @property
    def graphs(self) -> int:
        """How many `warm_up` compiles."""
        return len(self._buckets) + (1 + len(self.widths)) * len(self._candidates) + len(self._stores.paths)

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
            for width in self.widths:
                shape = self._decode_shape(width, candidates)
                self._decode(shape, *self._idle_rows(shape))
                compiled()
        for origin, target in self._stores.paths:
            self._move([], origin, target)
            compiled()

    def _prefill(self, shape: ExtendShape, values: dict[str, np.ndarray]) -> torch.Tensor:
        started = time.perf_counter()
        with self._stores.opened() as states:
            logits = self.steps.extend(shape, states, shape.header.pack(self.mesh.ranks, **values)).result
        self.device_seconds += time.perf_counter() - started
        return logits

    def _decode(
        self, shape: DecodeShape, values: dict[str, np.ndarray], sampling: np.ndarray, penalties: Penalties | None = None
    ) -> np.ndarray:
        header = shape.header.pack(self.mesh.ranks, **values)
        started = time.perf_counter()
        with self._stores.opened() as states:
            sampling = torch.from_numpy(sampling.reshape(self.mesh.ranks, -1))
            tokens = self.steps.decode(shape, states, header, sampling, penalties)
        self.device_seconds += time.perf_counter() - started
        return tokens

    def _choose(self, logits: torch.Tensor, chosen: Sequence[Sequence[Request]], candidates: int | None = None) -> np.ndarray:
        """[ranks, rows] the next token of each request from the logits [ranks * rows, vocabulary] of its last."""
        ranks, rows = self.mesh.ranks, self.shape.rows
        if candidates is None:
            candidates = self._candidates_of([request for own in chosen for request in own])
        fields = Header((("seed", rows), ("generated", rows), ("top_k", rows), ("eos", rows * EOS_SLOTS)))
        values = {name: np.zeros((ranks * rows, size // rows), np.int32) for name, size in fields.fields}
        values["eos"][:] = -1
        sampling, penalties = self._blank_sampling(rows), Penalties(ranks, rows, self.vocabulary)
        for rank, own in enumerate(chosen):
            for row, request in enumerate(own):
                self._write_sampling(values, sampling, penalties, request, rank, row)

        def choose(logits, header, sampling, *penalties):
            if not candidates:
                return [logits.float().argmax(-1).to(torch.int32)]
            header = {name: value.reshape(-1) for name, value in fields.unpack(header).items()}
            temperature, top_p, min_p = (part.reshape(-1) for part in sampling.chunk(3, dim=1))
            logits = self.steps.penalized(logits, *penalties, header["generated"], header["eos"].view(-1, EOS_SLOTS))
            return [self.steps.ops.sample(
                logits, header["seed"], header["generated"], temperature, header["top_k"], top_p, min_p, candidates=candidates
            )]  # fmt: skip

        started = time.perf_counter()
        sampling = self.mesh.put(torch.from_numpy(sampling.reshape(ranks, -1)), ("tokens", None))
        inputs = [logits, place_header(self.mesh, fields.pack(ranks, **values)), sampling]
        if candidates:
            inputs.append(self.steps.place_penalties(rows, penalties))
        if candidates not in self._choosers:
            self._choosers[candidates] = CompiledGraph(choose, inputs)
        result = self.mesh.get(self._choosers[candidates](inputs)[0]).numpy()
        self.device_seconds += time.perf_counter() - started
        return result.reshape(ranks, rows)

    def _move(self, moves: Sequence[Move], origin: str, target: str) -> None:
        started = time.perf_counter()
        self._stores.move(moves, origin, target)
        self.device_seconds += time.perf_counter() - started

    def _decode_shape(self, width: int, candidates: int) -> DecodeShape:
        return DecodeShape(self.shape, candidates, width=width)

    def _idle_rows(self, shape: DecodeShape) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Values [ranks * rows, size] of a decode step in which no row does anything."""
        rows = shape.rows
        values = {name: np.zeros((self.mesh.ranks * rows, size // rows), np.int32) for name, size in shape.header.fields}
        values["finished"][:] = values["fed"][:] = 1
        values["eos"][:] = -1
        return values, self._blank_sampling(rows)

    def _candidates_of(self, requests: Sequence[Request]) -> int:
        """How many candidates serve all of them: none for greedy search, few where every top_k allows, or all."""
        parameters = [request.parameters for request in requests]
        if not any(own.samples or own.penalizes for own in parameters):
            return 0
        few = all(0 < own.top_k <= SHORTLIST for own in parameters if own.samples)
        return min(SHORTLIST, self.vocabulary) if few else self.vocabulary

    def _blank_sampling(self, rows: int) -> np.ndarray:
        """[ranks, 3, rows] temperature, top_p and min_p that choose the largest score."""
        sampling = np.zeros((self.mesh.ranks, len(_SAMPLING), rows), np.float32)
        sampling[:, 1] = 1
        return sampling

    @staticmethod
    def _write_sampling(
        values: dict[str, np.ndarray], sampling: np.ndarray, penalties: Penalties, request: Request, rank: int, row: int
    ) -> None:
        place, parameters = rank * sampling.shape[2] + row, request.parameters
        values["seed"][place], values["generated"][place] = parameters.seed, request.generated
        values["top_k"][place] = min(parameters.top_k, np.iinfo(np.int32).max)
        values["eos"][place, : len(parameters.eos)] = parameters.eos
        sampling[rank, :, row] = [getattr(parameters, name) for name in _SAMPLING]
        if parameters.penalizes:
            penalties.put(place, request.tokens, parameters.repetition_penalty, parameters.min_new_tokens)


def _until(tokens: list[int], stops: Sequence[int]) -> list[int]:
    """Tokens up to the first stop token, which is included."""
    for number, token in enumerate(tokens):
        if token in stops:
            return tokens[: number + 1]
    return tokens
