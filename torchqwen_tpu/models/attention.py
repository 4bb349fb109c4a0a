"""Gated full attention with partial rotary embedding over paged keys and values."""

from __future__ import annotations

import torch
from torch import nn

from torchqwen_tpu.batch import RaggedBatch
from torchqwen_tpu.models.layers import Linear, RMSNorm, rotate
from torchqwen_tpu.ops import Operations
from torchqwen_tpu.recording import Taps
from torchqwen_tpu.runtime.graph import fence


class Attention(nn.Module):
    """`qkv_proj` is grouped by key-value head: for each of its query heads a query and an output gate, then key and value.

    (`state_dict()` and checkpoints hold `q_proj`, `k_proj` and `v_proj`.)
    """

    def __init__(self, config):
        super().__init__()
        self.head_dim = config.head_dim
        self.group = config.num_attention_heads // config.num_key_value_heads
        query_size, kv_size = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.qkv_proj = Linear(config.hidden_size, 2 * query_size + 2 * kv_size, bias=config.attention_bias)
        self.o_proj = Linear(query_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(
        self, hidden: torch.Tensor, batch: RaggedBatch, rotary, paged: tuple[torch.Tensor, ...], number: torch.Tensor,
        ops: Operations, taps: Taps | None = None,
    ):  # fmt: skip
        """hidden [tokens, hidden size], and the pages (and their scales) of all attention layers → output, and those with what
        belongs to layer `number` renewed."""
        tokens = hidden.shape[0]
        grouped = fence(self.qkv_proj(hidden)).view(tokens, -1, 2 * self.group + 2, self.head_dim)
        queries, key, value = grouped[:, :, :-2], grouped[:, :, -2], grouped[:, :, -1]
        query, gate = queries.reshape(tokens, -1, 2, self.head_dim).unbind(2)
        query = rotate(self.q_norm(query), rotary)
        key = rotate(self.k_norm(key), rotary)
        output, *paged = ops.attention(query, key, value, paged, number, batch, scale=self.head_dim**-0.5)
        if taps is not None:
            taps |= {"attention.query": query, "attention.key": key, "attention.pages": tuple(paged)}
        return self.o_proj((output * torch.sigmoid(gate)).reshape(tokens, -1)), tuple(paged)
