"""Statistics of a step in words that a person reads: by layer, as JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from custom_ops.monitoring import ATTENTION, FINITE, GATES, ROUTING
from torchqwen_tpu.monitoring.recorder import Statistics, StepStatistics
from torchqwen_tpu.runtime.shapes import DecodeShape, ExtendShape


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
        start = np.broadcast_to(np.arange(shape.rows), context.shape)
        return cls("decode", shape.rows, int((fields["finished"] == 0).sum()), start, np.ones_like(context), context)

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
    for layer, rank in np.argwhere(step.finite[..., ::2].sum(-1)).tolist():
        columns = dict(zip(FINITE, step.finite[layer, rank], strict=True))
        for half in ("mixer", "mlp"):
            if not columns[f"{half}_rows"]:
                continue
            sequence, position = place.token(rank, int(columns[f"{half}_first"]), number)
            entry = {
                "layer": layer, "part": _part(recorder, layer, half), "tokens": int(columns[f"{half}_rows"]),
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
    for entry, attention in zip(full, _attention(step.attention), strict=False):
        entry["attention"] = attention
    for entry, gates, states in zip(linear, _gates(step), _states(step.states), strict=False):
        entry |= {"gates": gates, "states": states}
    for entry, router in zip(summaries, _routers(step.routing, recorder.experts, devices), strict=False):
        entry["router"] = router
    return summaries


def _attention(attention: np.ndarray) -> list[dict]:
    columns = dict(zip(ATTENTION, np.moveaxis(attention, -1, 0), strict=True))
    sampled, heads = columns["heads"] > 0, columns["heads"].sum(1)
    if not sampled.any():
        return []
    return _by_layer({
        "logit_min": np.where(sampled, columns["logit_min"], np.inf).min(1),
        "logit_max": np.where(sampled, columns["logit_max"], -np.inf).max(1),
        "logit_bound": columns["logit_bound"].max(1),
        "saturated": columns["saturated"].sum(1) / heads,
        "entropy": columns["entropy"].sum(1) / heads,
    })  # fmt: skip


def _gates(step: StepStatistics) -> list[dict]:
    ranks = (step.states[..., 1] > 0).any((0, 2)) if len(step.states) else np.zeros(0, bool)  # those that hold tokens
    if not ranks.any():
        return []
    gates = step.gates[:, ranks]
    smallest, largest = gates.min(1), gates.max(1)
    return _by_layer({
        name: (smallest if name.endswith("min") else largest)[:, number] for number, name in enumerate(GATES)
    })  # fmt: skip


def _states(states: np.ndarray) -> list[list[dict]]:
    return [
        [
            {"rank": rank, "sequence": int(sequence), "position": int(position), "norm": _number(norm)}
            for rank, samples in enumerate(layer)
            for sequence, position, norm in samples
            if position
        ]
        for layer in states.tolist()
    ]


def _routers(routing: np.ndarray, experts: int, devices: int) -> list[dict]:
    if not routing.size or not routing[..., 0].any():
        return []
    own, load = routing[..., 0], routing[..., len(ROUTING) : len(ROUTING) + experts]
    tokens, total = own.sum(1), load.sum(1)
    by_device = total.reshape(len(total), devices, -1).sum(2)
    routers = _by_layer({
        "tokens": tokens.astype(int), "entropy": routing[..., 1].sum(1) / tokens, "entropy_min": routing[..., 2].min(1),
        "busiest_expert": total.argmax(1), "busiest_share": total.max(1) / tokens, "idle_experts": (total == 0).sum(1),
        "imbalance": total.max(1) / total.mean(1), "device_imbalance": by_device.max(1) / by_device.mean(1),
        "largest_min": routing[..., 3].min(1), "largest_max": routing[..., 4].max(1),
        "fp8_flushed_a_token": routing[..., 5].sum(1) / tokens,
    })  # fmt: skip
    busiest, share = load.argmax(2).tolist(), (load.max(2) / np.maximum(own, 1)).tolist()
    # The tokens of each data-parallel rank may prefer experts of their own.
    for router, *ranks in zip(routers, own.astype(int).tolist(), busiest, share, strict=True):
        router["ranks"] = [
            {"tokens": count, "busiest_expert": expert, "busiest_share": _number(part)}
            for count, expert, part in zip(*ranks, strict=True)
        ]
    return routers


def _by_layer(columns: dict[str, np.ndarray]) -> list[dict]:
    """Arrays [layers] by name → a dictionary a layer."""
    rows = zip(*(values.tolist() for values in columns.values()), strict=True)
    return [{name: _number(value) for name, value in zip(columns, row, strict=True)} for row in rows]


def _number(value: float | int) -> float | int | None:
    """As JSON has it: None for what is not finite."""
    if isinstance(value, int):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None
