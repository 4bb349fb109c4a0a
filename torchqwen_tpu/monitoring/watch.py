"""The numerical watch: sees every step of a model, warns of what is beyond its limits, keeps what a report shows."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TextIO

import numpy as np
import torch

from custom_ops.monitoring import ROUTING
from torchqwen_tpu.models.causal_lm import CausalLM
from torchqwen_tpu.monitoring.limits import Finding, Growth, Limits, Loads, exceeds
from torchqwen_tpu.monitoring.recorder import Statistics, StepStatistics
from torchqwen_tpu.monitoring.report import write_report
from torchqwen_tpu.monitoring.summary import Place, layer_summaries, not_finite
from torchqwen_tpu.runtime.observation import Records
from torchqwen_tpu.runtime.shapes import DecodeShape, ExtendShape


class NumericalWarning(UserWarning):
    """A model computes something that is beyond a limit; the message names the layer."""


class Watch(AbstractContextManager):
    """A watch over one model, as `watch` makes it.

    Attributes:
        findings: what was beyond a limit, the first time for each layer and limit.
        steps: how many steps were seen; decode steps that run in one go count once.
        loads: tokens of every expert, for a mixture of experts.
        growth: norms of the recurrent states over their positions.
        attention: (step, [attention layers] smallest logit, [attention layers] largest) of every look.
    """

    def __init__(self, model: CausalLM, limits: Limits, stream: TextIO | None, every: int = 1):
        if every < 1:
            raise ValueError(f"every must be at least 1, not {every}; 1 looks at every step")
        self.model, self.limits, self.every = model, limits, every
        self.recorder = Statistics.of(model.config)
        self.findings: list[Finding] = []
        self.steps = 0
        self.growth = Growth()
        self.loads = None
        if self.recorder.experts:
            self.loads = Loads(len(self.recorder.kinds), model.mesh.ranks, self.recorder.experts)
        self.attention: list[tuple[int, np.ndarray, np.ndarray]] = []
        self._stream = stream
        self._steps_of = Counter()
        self._pending: tuple[Place, torch.Tensor] | None = None
        self._poisoned = False

    def __enter__(self) -> Watch:
        steps = self.model.steps
        if steps.observer is not None:
            raise RuntimeError("the model is being watched already; leave the first watch before another one begins")
        steps.observer = self
        return self

    def __exit__(self, *error) -> None:
        self.model.steps.observer = None
        self.settle()

    def due(self, shape: ExtendShape | DecodeShape) -> bool:
        """See `Observer`. Prefill and decode take turns in a generation, so each is counted on its own."""
        kind = type(shape)
        self._steps_of[kind] += 1
        return self._steps_of[kind] % self.every == 1 % self.every

    def extended(self, shape: ExtendShape, header: torch.Tensor, records: Records) -> None:
        """See `Observer`."""
        self._take(Place.of_extend(shape, header), records)

    def decoded(self, shape: DecodeShape, header: torch.Tensor, records: Records) -> None:
        """See `Observer`."""
        self._take(Place.of_decode(shape, header), records)

    def _take(self, place: Place, records: Records) -> None:
        # One step behind: the host looks at the last step while the device works on this one.
        self.settle()
        self._pending = place, records["statistics"]

    def settle(self) -> None:
        """Look at what the last step left; done before the next step and at the end."""
        if self._pending is None:
            return
        (place, tensor), self._pending = self._pending, None
        values = self.model.mesh.get(tensor).numpy()
        values = values if place.is_decode else values[None]
        first, broken = self.recorder.unpack(values[0]), []
        for number in np.flatnonzero(self.recorder.any_not_finite(values)):
            broken += not_finite(self.recorder, self.recorder.unpack(values[number]), place, int(number))
        spoilt = min((entry["layer"] for entry in broken if entry["number"] == 0), default=len(self.recorder.kinds))
        self._look(first, place, spoilt)
        self._warn_not_finite(broken)
        if self._stream is not None:
            layers = layer_summaries(self.recorder, first, self.model.mesh.devices)
            entry = {"step": self.steps, "kind": place.kind, "tokens": place.tokens, "not_finite": broken, "layers": layers}
            self._stream.write(json.dumps(entry) + "\n")
        self.steps += 1

    def _look(self, step: StepStatistics, place: Place, spoilt: int) -> None:
        """Layers deeper than `spoilt` get values that are not finite: what they make of them says nothing about them."""
        kinds, limits = self.recorder.kinds, self.limits
        full = [number for number, kind in enumerate(kinds) if kind != "linear_attention"]
        linear = [number for number, kind in enumerate(kinds) if kind == "linear_attention"]
        heads, saturated = step.attention[..., 0].sum(1), step.attention[..., 4].sum(1)
        if (heads > 0).any():
            sampled = step.attention[..., 0] > 0
            smallest = np.where(sampled, step.attention[..., 1], np.inf).min(1)
            largest = np.where(sampled, step.attention[..., 2], -np.inf).max(1)
            self.attention.append((self.steps, smallest, largest))
            for layer, low, high, share in zip(full, smallest, largest, saturated / np.maximum(heads, 1), strict=True):
                if exceeds(max(-low, high), limits.attention_logit):
                    self._find("attention_logit", layer, f"attention logits from {low:.4g} to {high:.4g}")
                if exceeds(share, limits.saturated):
                    self._find("saturated", layer, f"{share:.0%} of sampled softmaxes put more than 99.9 % on one key")
        for layer, ranks in zip(linear, step.states, strict=True):
            for rank, samples in enumerate(ranks):
                for sequence, position, norm in samples[samples[:, 1] > 0]:
                    self._look_at_state(layer, rank * place.rows + int(sequence), int(position), float(norm))
        if self.loads is not None:
            self._look_at_routing(np.where(np.arange(len(kinds))[:, None, None] > spoilt, 0, step.routing))

    def _look_at_state(self, layer: int, sequence: int, position: int, norm: float) -> None:
        exponent = self.growth.add(layer, sequence, position, norm)
        where = f"the recurrent state of sequence {sequence} at {position} tokens"
        if exceeds(norm, self.limits.state_norm):
            self._find("state_norm", layer, f"{where} has a head of norm {norm:.4g}")
        if exponent is not None and exceeds(exponent, self.limits.state_growth):
            self._find("state_growth", layer, f"{where} grows like its length to the power of {exponent:.2g}")

    def _look_at_routing(self, routing: np.ndarray) -> None:
        limits, experts = self.limits, self.recorder.experts
        tokens = routing[:, :, 0].sum(1)
        if not tokens.max():
            return
        shares = self.loads.add(tokens, routing[:, :, len(ROUTING) : len(ROUTING) + experts])
        if shares is None:
            return
        relative = routing[:, :, 1].sum(1) / np.maximum(tokens, 1) / np.log(experts)
        devices = self.model.mesh.devices
        by_device = shares.reshape(len(shares), devices, -1).sum(2)
        imbalance = by_device.max(1) / np.maximum(by_device.mean(1), 1e-9)
        for layer, own in enumerate(shares):
            busiest = int(own.argmax())
            if exceeds(own[busiest], limits.expert_share):
                self._find("expert_share", layer, f"expert {busiest} takes {own[busiest]:.0%} of the tokens")
            if devices > 1 and exceeds(imbalance[layer], limits.device_imbalance):
                number = int(by_device[layer].argmax())
                message = f"the experts of device {number} have {imbalance[layer]:.2g} times the mean load of a device"
                self._find("device_imbalance", layer, message)
            if tokens[layer] and limits.router_entropy is not None and relative[layer] < limits.router_entropy:
                message = f"the router's mean entropy is {relative[layer]:.2%} of that of equal probabilities"
                self._find("router_entropy", layer, message)

    def _warn_not_finite(self, broken: list[dict]) -> None:
        """Name the place where it began: what follows in deeper layers and later steps is its consequence."""
        if not broken or self._poisoned:
            return
        self._poisoned = True
        first = min(broken, key=lambda entry: (entry["number"], entry["layer"]))
        experts = first.get("experts")
        cause = f"; all of them went to expert {', '.join(map(str, experts))}" if experts else ""
        self._find(
            "not_finite", first["layer"],
            f"NaN or infinity after the {first['part']} in {first['tokens']} tokens, the first of them token "
            f"{first['position']} of sequence {first['sequence']}{cause}",
        )  # fmt: skip

    def _find(self, kind: str, layer: int, message: str) -> None:
        if any(finding.kind == kind and finding.layer == layer for finding in self.findings):
            return
        finding = Finding(kind, layer, self.steps, f"layer {layer} ({self.recorder.kinds[layer]}): {message}")
        self.findings.append(finding)
        warnings.warn(finding.message, NumericalWarning, stacklevel=2)

    def report(self, path: str | Path) -> None:
        """Write what was seen as an HTML page: findings, load of the experts, norms of the states, ranges of logits."""
        self.settle()
        write_report(self, Path(path))
