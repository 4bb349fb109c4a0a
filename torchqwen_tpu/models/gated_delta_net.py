"""The Gated DeltaNet layer: projections and gates here, convolution and delta rule in one operation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from torchqwen_tpu.batch import RaggedBatch
from torchqwen_tpu.models.layers import GatedRMSNorm, Linear
from torchqwen_tpu.ops import Operations, gated_delta_net_shape


class GatedDeltaNet(nn.Module):
    """Channels of `in_proj_qkv` and `conv1d` are in the kernel's order (grouped by key head) on the device and in the
    published order (queries, keys, values) in `state_dict()` and on disk."""

    def __init__(self, config):
        super().__init__()
        self.shape = gated_delta_net_shape(config)
        value_size = self.shape.value_heads * self.shape.value_dim
        self.in_proj_qkv = Linear(config.hidden_size, self.shape.channels)
        self.in_proj_z = Linear(config.hidden_size, value_size)
        self.in_proj_b = Linear(config.hidden_size, self.shape.value_heads)
        self.in_proj_a = Linear(config.hidden_size, self.shape.value_heads)
        width = config.linear_conv_kernel_dim
        self.conv1d = nn.Conv1d(self.shape.channels, self.shape.channels, width, groups=self.shape.channels, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(self.shape.value_heads))
        self.A_log = nn.Parameter(torch.empty(self.shape.value_heads))
        self.norm = GatedRMSNorm(self.shape.value_dim, config.rms_norm_eps)
        self.out_proj = Linear(value_size, config.hidden_size)

    def forward(self, hidden: torch.Tensor, batch: RaggedBatch, state: tuple[torch.Tensor, torch.Tensor], ops: Operations):
        """hidden [tokens, hidden size] and the layer's (convolution window, recurrent state) → output and the new ones."""
        gate = self.in_proj_z(hidden).view(hidden.shape[0], -1, self.shape.value_dim)
        # The gates stay FP32 from the projection on: they are exponentiated and multiplied over whole sequences.
        beta = torch.sigmoid(self.in_proj_b(hidden.float()))
        decay = -self.A_log.float().exp() * F.softplus(self.in_proj_a(hidden.float()) + self.dt_bias.float())
        output, *state = ops.gated_delta_net(
            self.in_proj_qkv(hidden), beta, decay, self.conv1d.weight.squeeze(1).t(), batch, *state, shape=self.shape
        )
        return self.out_proj(self.norm(output, gate).reshape(hidden.shape[0], -1)), tuple(state)
