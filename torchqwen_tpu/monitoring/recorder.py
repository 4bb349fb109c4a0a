"""What a numerical watch has every step record, and its way from one flat tensor back to numbers by layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from custom_ops.monitoring import ATTENTION, FINITE, GATES, ROUTING, STATES
from custom_ops.monitoring.gated_delta_net import SAMPLES
from torchqwen_tpu.batch import RaggedBatch
from torchqwen_tpu.ops import Operations
from torchqwen_tpu.recording import Taps


@dataclass(frozen=True)
class Statistics:
    """The statistics of `custom_ops.monitoring` for every layer, as one tensor `statistics` [ranks, width] float32.

    Of steps that run in one go the first alone looks at everything; values that are not finite are looked for in all.

    Args:
        kinds: the kind of every layer, as `config.layer_types`.
        experts, top_k: of a mixture of experts; 0 for a dense model.
    """

    kinds: tuple[str, ...]
    experts: int = 0
    top_k: int = 0
    names = ("statistics",)

    @classmethod
    def of(cls, config) -> Statistics:
        """For a model of this configuration."""
        return cls(tuple(config.layer_types), getattr(config, "num_experts", 0), getattr(config, "num_experts_per_tok", 0))

    def layer(self, taps: Taps, batch: RaggedBatch, ops: Operations) -> dict[str, torch.Tensor]:
        """`finiteness` [tokens] and, in a first step, a row of statistics [ranks, columns] for each part of the layer."""
        kept = {"finiteness": ops.finiteness(taps["mixed"], taps["output"])}
        if not batch.first:
            return kept
        if "attention.query" in taps:
            values = (taps[f"attention.{name}"] for name in ("query", "key", "pages"))
            kept["attention"] = ops.attention_statistics(*values, taps["number"], batch)
            ops.read_before_writes(kept["attention"], taps["attention.pages"], taps["output"])
        else:
            values = (taps[f"gated_delta_net.{name}"] for name in ("b", "a", "A_log", "dt_bias", "state"))
            kept["gated_delta_net"] = ops.gated_delta_net_statistics(*values, taps["number"], batch)
            ops.read_before_writes(kept["gated_delta_net"], [taps["gated_delta_net.state"]], taps["output"])
        if "router.logits" in taps:
            kept["routing"] = ops.routing_statistics(
                taps["experts.input"], taps["router.logits"], batch, kept["finiteness"], top_k=self.top_k
            )
        return kept

    def step(self, layers, batch, select, ops) -> tuple[torch.Tensor]:
        """One tensor, since fewer outputs cost less host time; zeros for what was not looked at."""
        parts = [ops.first_not_finite(torch.stack([kept["finiteness"] for kept in layers]), batch)]
        if batch.first:
            parts += [kept[part] for part, _, _ in self._parts[1:] for kept in layers if part in kept]
        else:
            rest = sum(len(owners) * columns for _, owners, columns in self._parts[1:])
            parts.append(parts[0].new_zeros(len(parts[0]), rest))
        return (torch.cat(parts, dim=1),)

    @cached_property
    def _parts(self) -> list[tuple[str, list[int], int]]:
        """Name of each part of the tensor, the layers that have it, and its columns a layer."""
        linear = [number for number, kind in enumerate(self.kinds) if kind == "linear_attention"]
        full = [number for number, kind in enumerate(self.kinds) if kind != "linear_attention"]
        every = list(range(len(self.kinds)))
        return [
            ("finite", every, len(FINITE)),
            ("attention", full, len(ATTENTION)),
            ("gated_delta_net", linear, len(GATES) + SAMPLES * len(STATES)),
            ("routing", every if self.experts else [], len(ROUTING) + 2 * self.experts),
        ]

    def any_not_finite(self, statistics: np.ndarray) -> np.ndarray:
        """[steps, ranks, width] → [steps] bool."""
        return statistics[:, :, : len(FINITE) * len(self.kinds)].any((1, 2))

    def unpack(self, statistics: np.ndarray) -> StepStatistics:
        """[ranks, width] of one step, by part."""
        first, parts = 0, {}
        for name, layers, columns in self._parts:
            last = first + len(layers) * columns
            parts[name] = statistics[:, first:last].reshape(-1, len(layers), columns).transpose(1, 0, 2)
            first = last
        gates = parts.pop("gated_delta_net")
        return StepStatistics(
            **parts,
            gates=gates[..., : len(GATES)],
            states=gates[..., len(GATES) :].reshape(*gates.shape[:2], SAMPLES, len(STATES)),
        )


@dataclass(frozen=True)
class StepStatistics:
    """Statistics of one step, columns as `custom_ops.monitoring` names them.

    Attributes:
        finite: [layers, ranks, FINITE]
        attention: [attention layers, ranks, ATTENTION]
        gates: [Gated DeltaNet layers, ranks, GATES]
        states: [Gated DeltaNet layers, ranks, samples, STATES]
        routing: [layers with experts, ranks, ROUTING and two counts an expert]
    """

    finite: np.ndarray
    attention: np.ndarray
    gates: np.ndarray
    states: np.ndarray
    routing: np.ndarray
