"""The decoder of Qwen 3.5: what one step computes, from token embeddings to the last norm.

Every tensor is flat: rows are tokens of several sequences, told apart by the `RaggedBatch`. Caches come in and go out, one
entry a layer: (convolution window, recurrent state) for Gated DeltaNet, (pages,) for attention.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from torchqwen_tpu.batch import RaggedBatch
from torchqwen_tpu.models.attention import Attention
from torchqwen_tpu.models.gated_delta_net import GatedDeltaNet
from torchqwen_tpu.models.layers import MLP, RMSNorm, RotaryEmbedding
from torchqwen_tpu.models.moe import SparseMoeBlock
from torchqwen_tpu.ops import Operations
from torchqwen_tpu.recording import Recorder, Taps

LayerState = tuple[torch.Tensor, ...]


class DecoderOutput(NamedTuple):
    """hidden [tokens, hidden size] after the last norm; the layers' new states; the input of every layer, if asked for;
    for each recorder what it keeps of every layer."""

    hidden: torch.Tensor
    states: list[LayerState]
    layer_inputs: list[torch.Tensor]
    records: list[list[dict[str, torch.Tensor]]]


class DecoderLayer(nn.Module):
    def __init__(self, config, index: int):
        super().__init__()
        self.is_linear = config.layer_types[index] == "linear_attention"
        if self.is_linear:
            self.linear_attn = GatedDeltaNet(config)
        else:
            self.self_attn = Attention(config)
        self.is_sparse = hasattr(config, "num_experts")
        self.mlp = SparseMoeBlock(config) if self.is_sparse else MLP(config, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, hidden: torch.Tensor, batch: RaggedBatch, rotary, state: LayerState, ops: Operations, taps: Taps | None = None
    ):
        """hidden [tokens, hidden size] and the layer's states → output and the new states; names values in `taps`."""
        mixed = self.input_layernorm(hidden)
        if self.is_linear:
            mixed, state = self.linear_attn(mixed, batch, state, ops, taps)
        else:
            mixed, state = self.self_attn(mixed, batch, rotary, state, ops, taps)
        hidden = hidden + mixed
        mixed = self.post_attention_layernorm(hidden)
        mixed = self.mlp(mixed, batch, ops, taps) if self.is_sparse else self.mlp(mixed)
        output = hidden + mixed
        if taps is not None:
            taps |= {"mixed": hidden, "output": output}
        return output, state


class TextModel(nn.Module):
    """Embedding, decoder layers and the last norm, under the published names."""

    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config)

    def forward(
        self, embeddings: torch.Tensor, batch: RaggedBatch, states: list[LayerState], ops: Operations,
        keep_inputs: bool = False, recorders: tuple[Recorder, ...] = (),
    ) -> DecoderOutput:  # fmt: skip
        """embeddings [tokens, hidden size] → `DecoderOutput`."""
        hidden = ops.mesh.shard(embeddings, ("tokens", None))
        rotary = self.rotary_emb(batch.positions, hidden.dtype)
        new_states, layer_inputs, records = [], [], [[] for _ in recorders]
        for layer, state in zip(self.layers, states, strict=True):
            if keep_inputs:
                layer_inputs.append(hidden)
            taps = {} if recorders else None
            hidden, state = layer(hidden, batch, rotary, state, ops, taps)
            new_states.append(state)
            for recorder, kept in zip(recorders, records, strict=True):
                kept.append(recorder.layer(taps, batch, ops))
        return DecoderOutput(self.norm(hidden), new_states, layer_inputs, records)
