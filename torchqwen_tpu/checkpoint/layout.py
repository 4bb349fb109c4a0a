"""The form of parameters on the device against the published one: converted at load and save, never in a step.

- Matrices that multiply tokens are [in, out] on the device (published: [out, in]): XLA:CPU packs the other form anew in
  every product, and the kernels of the TPU want this one.
- Matrices that multiply the same tokens are one matrix on the device: one product in place of two or three. What a layout
  splits by heads is grouped by key-value head, so that any split of the heads is a split of contiguous columns.
- Layers that are scanned are one module whose parameters are stacks (see `torchqwen_tpu.models.stacking`).
- Channels of Gated DeltaNet are grouped by key head on the device (see `GatedDeltaNetShape`).
- The vocabulary is not padded: no layout splits the embedding or the head, so every number of tokens fits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from torchqwen_tpu.models.stacking import layers_of
from torchqwen_tpu.ops import gated_delta_net_shape

_GROUPED_BY_KEY_HEAD = (
    "linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_qkv.weight_scale", "linear_attn.conv1d.weight",
)  # fmt: skip


@dataclass(frozen=True)
class _Merged:
    """Published matrices that are one on the device: `parts` beside each other, in each of `groups` groups."""

    parts: tuple[str, ...]
    rows: tuple[int, ...]
    groups: int = 1


class WeightLayout:
    """Both forms of the parameters of one model; `config` is its text configuration.

    Names are those of `named_parameters()` on the device's side and of `state_dict()` on the published side.
    """

    def __init__(self, config):
        self._gdn = gated_delta_net_shape(config)
        self._merged = dict(_merged_matrices(config, self._gdn))

    def parts(self, name: str) -> tuple[str, ...]:
        """Published names of what the device's parameter `name` holds."""
        return tuple(part for layer in layers_of(name) or (name,) for part in self._parts(layer))

    def _parts(self, name: str) -> tuple[str, ...]:
        suffix = self._suffix(name)
        return tuple(name.removesuffix(suffix) + part for part in self._merged[suffix].parts) if suffix else (name,)

    def to_published(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the device's parameter `name` holds, in the published form by published name."""
        if layers := layers_of(name):
            published = {}
            for layer, value in zip(layers, tensor.unbind(0), strict=True):
                published |= self.to_published(layer, value)
            return published
        if _is_transposed(name, tensor):
            tensor = tensor.t()
        suffix = self._suffix(name)
        tensors = [tensor]
        if suffix:
            merged = self._merged[suffix]
            grouped = tensor.reshape(merged.groups, -1, *tensor.shape[1:])
            split = grouped.split([rows // merged.groups for rows in merged.rows], dim=1)
            tensors = [part.reshape(rows, *tensor.shape[1:]) for part, rows in zip(split, merged.rows, strict=True)]
        named = dict(zip(self._parts(name), tensors, strict=True))
        for part, value in named.items():
            if part.endswith(_GROUPED_BY_KEY_HEAD):
                named[part] = value.index_select(0, torch.tensor(self._gdn.published_channels()).argsort().to(value.device))
        return named

    def to_device(self, name: str, published: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The device's parameter `name` from its parts, which have the published names and shapes."""
        if layers := layers_of(name):
            return torch.stack([self.to_device(layer, published) for layer in layers])
        tensors = []
        for part in self._parts(name):
            value = published[part]
            if part.endswith(_GROUPED_BY_KEY_HEAD):
                value = value.index_select(0, torch.tensor(self._gdn.published_channels(), device=value.device))
            tensors.append(value)
        suffix = self._suffix(name)
        if suffix:
            groups = self._merged[suffix].groups
            grouped = [value.reshape(groups, -1, *value.shape[1:]) for value in tensors]
            tensors = [torch.cat(grouped, dim=1).flatten(0, 1)]
        return tensors[0].t() if _is_transposed(name, tensors[0]) else tensors[0]

    def _suffix(self, name: str) -> str | None:
        return next((suffix for suffix in self._merged if name.endswith(suffix)), None)


def _is_transposed(name: str, tensor: torch.Tensor) -> bool:
    return tensor.dim() == 2 and not name.endswith("embed_tokens.weight") and ".mlp.experts." not in name


def _merged_matrices(config, gdn):
    """Suffixes of merged parameters on the device, and what each holds. Scales and biases are merged as the rows of the
    matrices are."""
    for name, parts, rows, groups in _merged_modules(config, gdn):
        for kind in ("weight", "weight_scale", "bias"):
            yield f"{name}.{kind}", _Merged(tuple(f"{part}.{kind}" for part in parts), rows, groups)


def _merged_modules(config, gdn):
    """Modules on the device, the published ones that each is, their rows, and the groups of rows."""
    values = gdn.value_heads * gdn.value_dim
    parts = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z")
    yield "linear_attn.in_proj_qkvz", parts, (gdn.channels, values), gdn.key_heads
    parts = ("linear_attn.in_proj_b", "linear_attn.in_proj_a")
    yield "linear_attn.in_proj_ba", parts, (gdn.value_heads, gdn.value_heads), gdn.key_heads
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    rows = tuple(count * config.head_dim for count in (2 * heads, kv_heads, kv_heads))  # a query comes with its gate
    yield "self_attn.qkv_proj", tuple(f"self_attn.{letter}_proj" for letter in "qkv"), rows, kv_heads
    if hasattr(config, "num_experts"):
        mlp, width = "mlp.shared_expert", config.shared_expert_intermediate_size
        yield "mlp.router", ("mlp.gate", "mlp.shared_expert_gate"), (config.num_experts, 1), 1
    else:
        mlp, width = "mlp", config.intermediate_size
    yield f"{mlp}.gate_up_proj", (f"{mlp}.gate_proj", f"{mlp}.up_proj"), (width, width), 1
