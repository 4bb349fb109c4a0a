"""Statistics of a step in words that a person reads: by layer, as JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from custom_ops.monitoring import ATTENTION, FINITE, GATES, ROUTING
from torchqwen_tpu.monitoring.recorder import Statistics, StepStatistics
from torchqwen_tpu.runtime.step import DecodeShape, ExtendShape


@dataclass(frozen=True)
class Place:
    """Which tokens a step took.

    Attributes:
        kind: "extend" or "decode".
        rows: sequences that a rank has room for.
        tokens: how many tokens it took; for a decode step, how many sequences went on.
        start, length, context: [ranks, rows] first row of each sequence, its rows, and the tokens it had before.
    """

    kind: str
    rows: int
    tokens: int
    start: np.ndarray
    length: np.ndarray
    context: np.ndarray

    @classmethod
    def of_extend(cls, shape: ExtendShape, header: torch.Tensor) -> Place:
        fields = {name: value.numpy() for name, value in shape.header.unpack(header).items()}
        length = fields["query_length"]
        return cls("extend", shape.cache.rows, int(length.sum()), fields["query_start"], length, fields["context_length"])

    @classmethod
    def of_decode(cls, shape: DecodeShape, header: torch.Tensor) -> Place:
        fields = {name: value.numpy() for name, value in shape.header.unpack(header).items()}
        context = fields["context_length"]
        start = np.broadcast_to(np.arange(shape.cache.rows), context.shape)
        return cls("decode", shape.cache.rows, int((fields["finished"] == 0).sum()), start, np.ones_like(context), context)

    @property
    def is_decode(self) -> bool:
        return self.kind == "decode"

    def token(self, rank: int, row: int, number: int) -> tuple[int, int]:
        """Sequence and position of a row of a rank, in the `number`-th of decode steps that run in one go."""
        start, length = self.start[rank], self.length[rank]
        sequence = int(np.argmax((start <= row) & (row < start + length)))
        return rank * self.rows + sequence, int(self.context[rank, sequence] + row - start[sequence]) + number


def not_finite(recorder: Statistics, step: StepStatistics, place: Place, number: int) -> list[dict]:
    """Where NaN or infinity first appears in tokens of a step: layer, part of it, how many tokens, and the first of them; for
    experts also those that all of these tokens and no healthy one went to."""
    entries = []
    for layer, rank in zip(*np.nonzero(step.finite[..., ::2].sum(-1)), strict=True):
        columns = dict(zip(FINITE, step.finite[layer, rank], strict=True))
        for half in ("mixer", "mlp"):
            if not columns[f"{half}_rows"]:
                continue
            sequence, position = place.token(rank, int(columns[f"{half}_first"]), number)
            entry = {
                "layer": int(layer), "part": _part(recorder, layer, half), "tokens": int(columns[f"{half}_rows"]),
                "sequence": sequence, "position": position, "number": number,
            }  # fmt: skip
            if half == "mlp" and recorder.experts:
                entry["experts"] = _suspects(step.routing[layer], recorder.experts)
            entries.append(entry)
    return entries


def _part(recorder: Statistics, layer: int, half: str) -> str:
    if half == "mixer":
        return "Gated DeltaNet" if recorder.kinds[layer] == "linear_attention" else "attention"
    return "experts" if recorder.experts else "MLP"


def _suspects(routing: np.ndarray, experts: int) -> list[int]:
    load, broken = routing.sum(0)[-2 * experts :].reshape(2, experts)
    return np.flatnonzero((broken > 0) & (broken == broken.max()) & (broken == load)).tolist()


def layer_summaries(recorder: Statistics, step: StepStatistics, devices: int) -> list[dict]:
    """Every layer of one look: ranges over all ranks, means over all tokens or samples; what was not looked at is left out."""
    summaries = [{"layer": number, "kind": kind} for number, kind in enumerate(recorder.kinds)]
    full = [entry for entry in summaries if entry["kind"] != "linear_attention"]
    linear = [entry for entry in summaries if entry["kind"] == "linear_attention"]
    for entry, ranks in zip(full, step.attention, strict=True):
        ranks = ranks[ranks[:, 0] > 0]
        if len(ranks):
            columns = dict(zip(ATTENTION, ranks.T, strict=True))
            heads = columns["heads"].sum()
            entry["attention"] = _plain({
                "logit_min": columns["logit_min"].min(),
                "logit_max": columns["logit_max"].max(),
                "logit_bound": columns["logit_bound"].max(),
                "saturated": columns["saturated"].sum() / heads,
                "entropy": columns["entropy"].sum() / heads,
            })  # fmt: skip
    for entry, gates, states in zip(linear, step.gates, step.states, strict=True):
        held = states[..., 1] > 0
        if held.any():
            gates = gates[held.any(1)]  # of ranks that hold tokens
            entry["gates"] = _plain({name: (values.min if name.endswith("min") else values.max)()
                                     for name, values in zip(GATES, gates.T, strict=True)})  # fmt: skip
            rank, sample = np.nonzero(held)
            entry["states"] = [
                {"rank": int(r), "sequence": int(states[r, s, 0]), "position": int(states[r, s, 1]),
                 "norm": _number(states[r, s, 2])}
                for r, s in zip(rank, sample, strict=True)
            ]  # fmt: skip
    for entry, ranks in zip(summaries, step.routing, strict=False):
        tokens = ranks[:, 0].sum()
        if tokens:
            load = ranks[:, len(ROUTING) : len(ROUTING) + recorder.experts]
            total, by_device = load.sum(0), load.sum(0).reshape(devices, -1).sum(1)
            entry["router"] = _plain({
                "tokens": tokens, "entropy": ranks[:, 1].sum() / tokens, "entropy_min": ranks[:, 2].min(),
                "busiest_expert": total.argmax(), "busiest_share": total.max() / tokens,
                "idle_experts": (total == 0).sum(), "imbalance": total.max() / total.mean(),
                "device_imbalance": by_device.max() / by_device.mean(), "largest_min": ranks[:, 3].min(),
                "largest_max": ranks[:, 4].max(), "fp8_flushed_a_token": ranks[:, 5].sum() / tokens,
            })  # fmt: skip
            # Which experts the tokens of each data-parallel rank went to may differ: its own busiest one and share.
            entry["router"]["ranks"] = [
                {"tokens": int(own[0]), "busiest_expert": int(row.argmax()), "busiest_share": float(row.max() / max(own[0], 1))}
                for own, row in zip(ranks, load, strict=True)
            ]  # fmt: skip
    return summaries


def _plain(values: dict) -> dict:
    return {name: _number(value) for name, value in values.items()}


def _number(value) -> float | int | None:
    """As JSON has it: None for what is not finite."""
    value = value.item()
    return value if isinstance(value, int) else (float(f"{value:.6g}") if math.isfinite(value) else None)
