"""The decoder of Qwen 3.5: what one step computes, from token embeddings to the last norm.

Every tensor is flat: rows are tokens of several sequences, told apart by the `RaggedBatch`. The states of all layers of a
kind are one array: (convolution windows, recurrent states) of the Gated DeltaNet layers, then (pages,) of the attention
layers, or (pages, scales) where pages are FP8. They come in and go out, updated in place.

Layers that repeat with a period may be scanned: their weights are stacked, and one period is traced, whatever the depth.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.func import functional_call

from torchqwen_tpu.batch import RaggedBatch
from torchqwen_tpu.models.attention import Attention
from torchqwen_tpu.models.gated_delta_net import GatedDeltaNet
from torchqwen_tpu.models.layers import MLP, RMSNorm, RotaryEmbedding
from torchqwen_tpu.models.moe import SparseMoeBlock
from torchqwen_tpu.models.stacking import Run, layer_runs, stack_name, stack_parameters
from torchqwen_tpu.ops import Operations
from torchqwen_tpu.recording import Recorder, Taps
from torchqwen_tpu.runtime.graph import scan

States = tuple[torch.Tensor, ...]
Record = dict[str, torch.Tensor]
"""What one recorder keeps of one layer."""
WHOLE = "mlp.experts."
"""Start of the names of parameters that a layer gets as whole stacks, with its number: a slice of them would be a copy, and
they are most of a model's bytes."""


class Place(NamedTuple):
    """Which layer is at hand: its number among those of its kind, [] int32, and that among its stack, None without one."""

    of_kind: torch.Tensor
    in_stack: torch.Tensor | None = None


class DecoderOutput(NamedTuple):
    """hidden [tokens, hidden size] after the last norm; the new states; for each recorder what it keeps of every layer."""

    hidden: torch.Tensor
    states: States
    records: list[list[Record]]


class DecoderLayer(nn.Module):
    def __init__(self, config, index: int):
        super().__init__()
        self.is_linear = config.layer_types[index] == "linear_attention"
        self.first_paged = 2 if "linear_attention" in config.layer_types else 0  # of the states
        if self.is_linear:
            self.linear_attn = GatedDeltaNet(config)
        else:
            self.self_attn = Attention(config)
        self.is_sparse = hasattr(config, "num_experts")
        self.mlp = SparseMoeBlock(config) if self.is_sparse else MLP(config, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, hidden: torch.Tensor, batch: RaggedBatch, rotary, states: States, place: Place, ops: Operations,
        recorders: tuple[Recorder, ...],
    ) -> tuple[torch.Tensor, States, list[Record]]:  # fmt: skip
        """The layer's output, the states of all layers with this one's new, and what each recorder keeps."""
        taps: Taps | None = {"input": hidden, "number": place.of_kind} if recorders else None
        mixed = self.input_layernorm(hidden)
        if self.is_linear:
            mixed, own = self.linear_attn(mixed, batch, states[:2], place.of_kind, ops, taps)
            states = (*own, *states[2:])
        else:
            mixed, own = self.self_attn(mixed, batch, rotary, states[self.first_paged :], place.of_kind, ops, taps)
            states = (*states[: self.first_paged], *own)
        hidden = hidden + mixed
        mixed = self.post_attention_layernorm(hidden)
        mixed = self.mlp(mixed, batch, place.in_stack, ops, taps) if self.is_sparse else self.mlp(mixed)
        output = hidden + mixed
        if taps is not None:
            taps |= {"mixed": hidden, "output": output}
        return output, states, [recorder.layer(taps, batch, ops) for recorder in recorders]


class TextModel(nn.Module):
    """Embedding, decoder layers and the last norm, under the published names.

    `layers` is the list of the layers; or, where some are stacked, a dictionary of those that are not under their numbers and
    of the stacks, one module each under a name such as `0:60:4` for layers 0, 4, 8 to 56, whose parameters have a dimension
    more, the first. (`state_dict()` and checkpoints
    have the published names in both forms.)
    """

    def __init__(self, config, scan_layers: bool = False):
        super().__init__()
        self.kinds = list(config.layer_types)
        self.runs = layer_runs(self.kinds, scan_layers)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        layers = {}
        for stack in (stack for run in self.runs for stack in run):
            layer = DecoderLayer(config, stack[0])
            layers[stack_name(stack)] = stack_parameters(layer, len(stack)) if len(stack) > 1 else layer
        stacked = len(layers) < len(self.kinds)
        self.layers = nn.ModuleDict(layers) if stacked else nn.ModuleList(layers.values())
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config)

    def forward(
        self, embeddings: torch.Tensor, batch: RaggedBatch, states: States, ops: Operations,
        recorders: tuple[Recorder, ...] = (),
    ) -> DecoderOutput:  # fmt: skip
        """embeddings [tokens, hidden size] → `DecoderOutput`."""
        hidden = ops.mesh.shard(embeddings, ("tokens", None))
        rotary = self.rotary_emb(batch.positions, hidden.dtype)
        # Numbers of layers are parts of a constant: of a number PyTorch would make an argument of the graph.
        numbers = torch.arange(len(self.kinds), dtype=torch.int32, device=hidden.device)
        kept: dict[int, list[Record]] = {}
        for run in self.runs:
            if len(run[0]) == 1:
                (index,), place = run[0], Place(numbers[self._of_kind(run[0])][0])
                hidden, states, kept[index] = self.layers.get_submodule(stack_name(run[0]))(
                    hidden, batch, rotary, states, place, ops, recorders
                )
            else:
                hidden, states, records = self._scan(run, numbers, hidden, batch, rotary, states, ops, recorders)
                kept |= records
        by_recorder = [[kept[index][number] for index in sorted(kept)] for number in range(len(recorders))]
        return DecoderOutput(self.norm(hidden), states, by_recorder)

    def _of_kind(self, stack: range) -> slice:
        """Numbers of a stack's layers among those of their kind."""
        first, last = (self.kinds[:index].count(self.kinds[index]) for index in (stack[0], stack[-1]))
        return slice(first, last + 1, max((last - first) // max(len(stack) - 1, 1), 1))

    def _scan(self, run: Run, numbers, hidden, batch: RaggedBatch, rotary, states: States, ops: Operations, recorders):
        """One run of stacks; returns the output, the states and by layer what the recorders keep of it."""
        of_kind, in_stack = [numbers[self._of_kind(stack)] for stack in run], numbers[: len(run[0])]
        layers = [self.layers.get_submodule(stack_name(stack)) for stack in run]
        own = [{name: value for name, value in layer.named_parameters() if not name.startswith(WHOLE)} for layer in layers]

        flags = {name: value for name, value in vars(batch).items() if not isinstance(value, torch.Tensor)}

        def period(carry, slices):
            hidden, states, shared = carry
            records = []
            for layer, weights, of_kind in zip(layers, slices["weights"], slices["of_kind"], strict=True):
                place = Place(of_kind, slices["in_stack"])
                arguments = (hidden, RaggedBatch(**shared["batch"], **flags), shared["rotary"], states, place, ops)
                hidden, states, recorded = functional_call(layer, weights, (*arguments, recorders))
                records.append(recorded)
            return (hidden, states, shared), records

        # What a layer reads is part of the carry even where it never changes: what scan finds by itself it computes
        # again in every turn.
        tensors = {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
        carry = (hidden, states, {"batch": tensors, "rotary": rotary})
        (hidden, states, _), records = scan(period, carry, {"weights": own, "of_kind": of_kind, "in_stack": in_stack})
        by_layer = {
            index: [{name: value[turn] for name, value in record.items()} for record in stacked]
            for stack, stacked in zip(run, records, strict=True)
            for turn, index in enumerate(stack)
        }
        return hidden, states, by_layer
