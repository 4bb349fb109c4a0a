"""Mixture of experts: router, routed experts and the gated shared expert."""

from __future__ import annotations

import torch
from torch import nn

from torchqwen_tpu.batch import RaggedBatch
from torchqwen_tpu.models.layers import MLP, Linear
from torchqwen_tpu.ops import Operations
from torchqwen_tpu.recording import Taps


class Router(Linear):
    """Logits of all experts and of the shared expert's gate, FP32 unless `round_router` asks for the model's dtype.

    (`state_dict()` and checkpoints hold `gate` and `shared_expert_gate`.)
    """

    def __init__(self, config):
        self.experts = config.num_experts
        super().__init__(config.hidden_size, self.experts + 1)

    def forward(self, hidden: torch.Tensor, rounded: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [tokens, hidden size] → [tokens, experts], [tokens, 1], both float32."""
        logits = super().forward(hidden).float() if rounded else super().forward(hidden.float())
        return logits[:, : self.experts], logits[:, self.experts :]


class Experts(nn.Module):
    """Weights of all experts, gate rows before up rows.

    FP8 weights have scales (see `custom_ops.ragged_moe`); the checkpoint reader adds them.
    """

    def __init__(self, config):
        super().__init__()
        experts, hidden, width = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, width))
        self.register_parameter("gate_up_scale", None)
        self.register_parameter("down_scale", None)


class SparseMoeBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.router = Router(config)
        self.experts = Experts(config)
        self.shared_expert = MLP(config, config.shared_expert_intermediate_size)

    def forward(
        self, hidden: torch.Tensor, batch: RaggedBatch, number: torch.Tensor | None, ops: Operations, taps: Taps | None = None
    ) -> torch.Tensor:
        """[tokens, hidden size] → the same. The experts' parameters are stacks of which this is layer `number`, or, without
        one, this layer's."""
        logits, shared_gate = self.router(hidden, ops.round_router)
        if taps is not None:
            taps |= {"router.logits": logits, "experts.input": hidden}
        experts = self.experts
        routed = ops.experts(
            hidden, logits, batch.valid, experts.gate_up_proj, experts.down_proj, number, top_k=self.top_k,
            gate_up_scale=experts.gate_up_scale, down_scale=experts.down_scale,
        )  # fmt: skip
        return routed + torch.sigmoid(shared_gate).to(hidden.dtype) * self.shared_expert(hidden)
