"""Rows of a padded batch become flat ragged steps: here padding ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from custom_ops.gated_delta_net.metadata import check_metadata
from torchqwen_tpu.batch import bucket
from torchqwen_tpu.cache import HybridCache
from torchqwen_tpu.recording import Recorder
from torchqwen_tpu.runtime.observation import Records
from torchqwen_tpu.runtime.shapes import ExtendShape
from torchqwen_tpu.runtime.step import Steps

SMALLEST_BUCKET = 64
"""Fewest tokens that a prefill step is compiled for, and fewest logits where it is more than one a sequence."""


@dataclass
class Row:
    """New tokens of one sequence.

    Attributes:
        tokens: [n] ids; with embeddings, their rows in the embeddings.
        positions: [3, n]
        wanted: positions within `tokens`, ascending, whose logits are wanted; one may come several times.
        targets: as many token ids to be scored at those positions, where scores are asked for.
    """

    tokens: np.ndarray
    positions: np.ndarray
    wanted: np.ndarray
    targets: np.ndarray | None = None


@dataclass
class Piece:
    """Part of a row that one step takes."""

    row: int
    first: int
    last: int


@dataclass
class Selected:
    """Results for the wanted tokens, where each step left them.

    Attributes:
        steps: logits [n, vocabulary] (or scores) of every step, on the device; `total` in all.
        hidden_states: per layer [total, hidden size], if asked for.
        place: per row, where its wanted tokens lie in `total`.
        records: of every step, what the recorders kept.
    """

    steps: list[torch.Tensor]
    hidden_states: list[torch.Tensor]
    place: list[np.ndarray]
    records: list[Records]

    @property
    def logits(self) -> torch.Tensor:
        """[total, vocabulary]"""
        return _joined(self.steps)


def extend(
    steps: Steps,
    cache: HybridCache,
    rows: list[Row],
    embeddings: torch.Tensor | None = None,
    hidden_states: bool = False,
    alternatives: int | None = None,
    smallest_bucket: int = SMALLEST_BUCKET,
    recorders: tuple[Recorder, ...] = (),
    largest_step: int | None = None,
) -> Selected:
    """Take the rows' tokens into the cache, in as many steps as `largest_step` asks for.

    Args:
        rows: one for each sequence of the cache; a row without tokens keeps its state.
        embeddings: [tokens, hidden size] on the host, instead of token ids.
        hidden_states: also return the input of every layer and the output of the last norm.
        alternatives: return scores of the rows' `targets` in place of logits, each with that many alternatives.
        smallest_bucket: fewest tokens that a step is compiled for.
        recorders: what to keep of the values inside the layers.
        largest_step: most tokens that a rank takes in one step; by default `prefill_chunk`.
    """
    cache.reserve(int(max(cache.lengths[i] + len(row.tokens) for i, row in enumerate(rows))))
    logits, layers, records = [], [], []
    place = [np.zeros(len(row.wanted), np.int64) for row in rows]
    total = 0
    for pieces in _plan(rows, cache, largest_step or steps.runtime.prefill_chunk):
        shape, values, selected = _pack(
            pieces, rows, cache, embeddings is not None, hidden_states, alternatives, smallest_bucket, recorders
        )
        flat = None if embeddings is None else _pack_embeddings(embeddings, values["tokens"], steps)
        result, kept, recorded = steps.extend(shape, cache, shape.header.pack(cache.layout.mesh.ranks, **values), flat)
        logits.append(result)
        layers.append(kept)
        records.append(recorded)
        for row, number, where in selected:
            place[row][number] = total + where
        total += result.shape[0]
        for piece in (piece for rank in pieces for piece in rank):
            cache.lengths[piece.row] += piece.last - piece.first
    for index, row in enumerate(rows):
        if len(row.tokens):
            cache.offsets[:, index] = row.positions[:, -1] + 1 - cache.lengths[index]
    return Selected(logits, [_joined(layer) for layer in zip(*layers, strict=True)], place, records)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _plan(rows: list[Row], cache: HybridCache, budget: int) -> list[list[list[Piece]]]:
    """Steps; of each, the pieces of every rank, at most `budget` tokens a rank."""
    ranks, per_rank = cache.layout.mesh.ranks, cache.shape.rows
    queues = []
    for rank in range(ranks):
        steps, room = [[]], budget
        for index in range(rank * per_rank, min((rank + 1) * per_rank, len(rows))):
            first, length = 0, len(rows[index].tokens)
            while first < length:
                if room == 0:
                    steps.append([])
                    room = budget
                last = min(first + room, length)
                steps[-1].append(Piece(index, first, last))
                room -= last - first
                first = last
        queues.append(steps)
    count = max(len(queue) for queue in queues)
    return [[queue[number] if number < len(queue) else [] for queue in queues] for number in range(count)]


def _pack(
    pieces: list[list[Piece]],
    rows: list[Row],
    cache: HybridCache,
    embeddings: bool,
    hidden_states: bool,
    alternatives: int | None,
    smallest: int,
    recorders: tuple[Recorder, ...],
):
    """Shape and header values of one step, and (row, number, place) of the wanted tokens in it."""
    ranks, per_rank = len(pieces), cache.shape.rows
    decode = all(piece.last - piece.first == 1 for rank in pieces for piece in rank)
    wanted = [
        [(piece, number) for piece in rank for number in _wanted_in(rows[piece.row], piece)] for rank in pieces
    ]
    tokens = per_rank if decode else bucket(max(sum(p.last - p.first for p in rank) for rank in pieces), smallest)
    most = max(len(rank) for rank in wanted)
    selected = per_rank if most <= per_rank else bucket(most, smallest)
    shape = ExtendShape(tokens, selected, cache.shape, decode, embeddings, hidden_states, alternatives, recorders)

    values = {name: np.zeros((ranks, size), np.int32) for name, size in shape.header.fields}
    values["slot"][:] = np.arange(per_rank)
    values["page_table"][:] = cache.page_table.reshape(ranks, -1)
    values["context_length"][:] = cache.lengths.reshape(ranks, per_rank)
    positions = values["positions"].reshape(ranks, 3, tokens)
    positions[:] = -1
    places = []
    for rank, own in enumerate(pieces):
        start, starts = 0, {}
        for piece in own:
            row, slot, length = rows[piece.row], piece.row - rank * per_rank, piece.last - piece.first
            if decode:
                start = slot
            values["tokens"][rank, start : start + length] = row.tokens[piece.first : piece.last]
            positions[rank, :, start : start + length] = row.positions[:, piece.first : piece.last]
            values["query_start"][rank, slot], values["query_length"][rank, slot] = start, length
            starts[piece.row] = start - piece.first
            start += length
        for place, (piece, number) in enumerate(wanted[rank]):
            values["select"][rank, place] = starts[piece.row] + rows[piece.row].wanted[number]
            if alternatives is not None:
                values["target"][rank, place] = rows[piece.row].targets[number]
            places.append((piece.row, number, rank * selected + place))
    fields = ("query_start", "query_length", "context_length", "slot")
    for rank in range(ranks):  # kernels run without bounds checks
        check_metadata(*(values[name][rank] for name in fields), tokens=tokens, slots=per_rank)
    return shape, values, places


def _wanted_in(row: Row, piece: Piece) -> range:
    first, last = np.searchsorted(row.wanted, (piece.first, piece.last))
    return range(first, last)


def _pack_embeddings(embeddings: torch.Tensor, index: np.ndarray, steps: Steps) -> torch.Tensor:
    """Rows of the embeddings in the order of a step, [ranks * tokens, hidden size] on the device."""
    flat = embeddings[torch.from_numpy(index.reshape(-1).astype(np.int64))]
    return steps.ops.mesh.put(flat, ("tokens", None))
