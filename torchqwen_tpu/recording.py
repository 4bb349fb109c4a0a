"""What leaves a step besides its result: values from inside the layers, reduced on the device.

Modules name what they compute in a dictionary that each call of a layer gets for its own (`Taps`), or get None and name
nothing. A `Recorder` says what is kept of it. Neither touches what the model computes, and without recorders a step's graph
is what it would be if there were none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from torchqwen_tpu.batch import RaggedBatch
from torchqwen_tpu.ops import Operations

Taps = dict[str, torch.Tensor]
"""Values of one call of one layer, by name. All layers have

    input                  [tokens, hidden size]
    number                 [] int32, the layer's among those of its kind, whose states it has
    mixed                  [tokens, hidden size] after attention or Gated DeltaNet, the residual added
    output                 [tokens, hidden size]
attention layers
    attention.query, .key  [tokens, heads, head dim] rotated
    attention.pages        of all attention layers, as the layer leaves them, with their scales where they have any
Gated DeltaNet layers
    gated_delta_net.b, .a  [tokens, value heads], what the gates are made of
    gated_delta_net.A_log, .dt_bias   [value heads]
    gated_delta_net.state  the recurrent states of all such layers, as the layer leaves them
and mixtures of experts
    router.logits          [tokens, experts] float32
    experts.input          [tokens, hidden size]
"""


class Recorder(Protocol):
    """What a step keeps of the values inside its layers.

    A recorder is frozen and hashable: steps are compiled for it.

    Attributes:
        names: of the tensors that `step` returns.
    """

    names: tuple[str, ...]

    def layer(self, taps: Taps, batch: RaggedBatch, ops: Operations) -> dict[str, torch.Tensor]:
        """What is kept of one layer, traced where the layer is.

        Names, shapes and dtypes depend on the kind of the layer alone, so that equal layers can share one traced call.
        """

    def step(
        self,
        layers: list[dict[str, torch.Tensor]],
        batch: RaggedBatch,
        select: Callable[[torch.Tensor], torch.Tensor],
        ops: Operations,
    ) -> tuple[torch.Tensor, ...]:
        """The tensors of a step, from what was kept of every layer, in the order of `names`.

        Args:
            select: takes per-token values [tokens, ...] to those of the wanted tokens, in the order of the step's logits.
        """


@dataclass(frozen=True)
class LayerInputs:
    """The rows of the wanted tokens that go into every layer: a step gives `inputs` [layers, selected, hidden size]."""

    names = ("inputs",)

    def layer(self, taps: Taps, batch: RaggedBatch, ops: Operations) -> dict[str, torch.Tensor]:
        """[tokens, hidden size]."""
        return {"input": taps["input"]}

    def step(self, layers, batch, select, ops) -> tuple[torch.Tensor, ...]:
        """See `Recorder`."""
        return (torch.stack([select(layer["input"]) for layer in layers]),)


@dataclass(frozen=True)
class Routing:
    """The experts of every wanted token and their weights, as the model uses them.

    A step gives `experts` [layers with experts, selected, top_k] int32 and `weights`, the same in float32, the largest weight
    first.
    """

    top_k: int
    names = ("experts", "weights")

    def layer(self, taps: Taps, batch: RaggedBatch, ops: Operations) -> dict[str, torch.Tensor]:
        """{} for a dense layer; otherwise experts and weights [tokens, top_k]."""
        if "router.logits" not in taps:
            return {}
        experts, weights = ops.route(taps["router.logits"], batch.valid, top_k=self.top_k)
        if ops.round_router:
            weights = weights.to(taps["output"].dtype).float()
        return {"experts": experts, "weights": weights}

    def step(self, layers, batch, select, ops) -> tuple[torch.Tensor, ...]:
        """See `Recorder`."""
        return tuple(torch.stack([select(layer[name]) for layer in layers if layer]) for name in self.names)
