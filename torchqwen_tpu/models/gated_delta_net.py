"""The Gated DeltaNet layer: projections here; convolution, gates and delta rule in one operation."""

from __future__ import annotations

import torch
from torch import nn

from torchqwen_tpu.batch import RaggedBatch
from torchqwen_tpu.models.layers import GatedRMSNorm, Linear
from torchqwen_tpu.ops import Operations, gated_delta_net_shape
from torchqwen_tpu.recording import Taps
from torchqwen_tpu.runtime.graph import fence


class GatedDeltaNet(nn.Module):
    """`in_proj_qkvz` and `in_proj_ba` are grouped by key head: its query, key and values (the kernel's order of channels,
    which `conv1d` has too), then the output gates of its value heads; betas, then decays.

    (`state_dict()` and checkpoints hold `in_proj_qkv`, `in_proj_z`, `in_proj_b` and `in_proj_a`, and the published order of
    channels: queries, keys, values.)
    """

    def __init__(self, config):
        super().__init__()
        self.shape = gated_delta_net_shape(config)
        value_size = self.shape.value_heads * self.shape.value_dim
        self.in_proj_qkvz = Linear(config.hidden_size, self.shape.channels + value_size)
        self.in_proj_ba = Linear(config.hidden_size, 2 * self.shape.value_heads)
        width = config.linear_conv_kernel_dim
        self.conv1d = nn.Conv1d(self.shape.channels, self.shape.channels, width, groups=self.shape.channels, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(self.shape.value_heads))
        self.A_log = nn.Parameter(torch.empty(self.shape.value_heads))
        self.norm = GatedRMSNorm(self.shape.value_dim, config.rms_norm_eps)
        self.out_proj = Linear(value_size, config.hidden_size)

    def forward(
        self, hidden: torch.Tensor, batch: RaggedBatch, state: tuple[torch.Tensor, torch.Tensor], number: torch.Tensor,
        ops: Operations, taps: Taps | None = None,
    ):  # fmt: skip
        """hidden [tokens, hidden size] and (convolution windows, recurrent states) of all such layers → output and both
        with those of layer `number` renewed."""
        tokens = hidden.shape[0]
        grouped = fence(self.in_proj_qkvz(hidden)).view(tokens, self.shape.key_heads, -1)
        qkv, gate = grouped.split([self.shape.channels // self.shape.key_heads, self.shape.group * self.shape.value_dim], -1)
        # The gates stay FP32 from the projection on: they are exponentiated and multiplied over whole sequences.
        b, a = self.in_proj_ba(hidden.float()).view(tokens, self.shape.key_heads, 2, -1).unbind(2)
        output, *state = ops.gated_delta_net(
            qkv.flatten(1), b.flatten(1), a.flatten(1),
            self.conv1d.weight.squeeze(1).t(), self.A_log.float(), self.dt_bias.float(),
            batch, *state, number, shape=self.shape,
        )  # fmt: skip
        if taps is not None:
            gates = {"b": b.flatten(1), "a": a.flatten(1), "A_log": self.A_log.float(), "dt_bias": self.dt_bias.float()}
            taps |= {f"gated_delta_net.{name}": value for name, value in {**gates, "state": state[1]}.items()}
        gate = gate.reshape(tokens, -1, self.shape.value_dim)
        return self.out_proj(self.norm(output, gate).view(tokens, -1)), tuple(state)
