"""Gated full attention with partial rotary embedding over paged keys and values."""

from __future__ import annotations

import torch
from torch import nn

from torchqwen_tpu.batch import RaggedBatch
from torchqwen_tpu.models.layers import Linear, RMSNorm, rotate
from torchqwen_tpu.ops import Operations


class Attention(nn.Module):
    """`q_proj` holds a query and an output gate for each head, side by side."""

    def __init__(self, config):
        super().__init__()
        self.head_dim = config.head_dim
        query_size, kv_size = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = Linear(config.hidden_size, 2 * query_size, bias=config.attention_bias)
        self.k_proj = Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.v_proj = Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.o_proj = Linear(query_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, batch: RaggedBatch, rotary, state: tuple[torch.Tensor], ops: Operations):
        """hidden [tokens, hidden size] and the layer's (pages,) → output and the new (pages,)."""
        tokens = hidden.shape[0]
        query, gate = self.q_proj(hidden).view(tokens, -1, 2, self.head_dim).unbind(2)
        query = rotate(self.q_norm(query), rotary)
        key = rotate(self.k_norm(self.k_proj(hidden).view(tokens, -1, self.head_dim)), rotary)
        value = self.v_proj(hidden).view(tokens, -1, self.head_dim)
        output, pages = ops.attention(query, key, value, state[0], batch, scale=self.head_dim**-0.5)
        return self.o_proj((output * torch.sigmoid(gate)).reshape(tokens, -1)), (pages,)
