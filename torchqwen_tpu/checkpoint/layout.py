"""The form of parameters on the device against the published one: converted at load and save, never in a step.

- Matrices that multiply tokens are [in, out] on the device (published: [out, in]): XLA:CPU packs the other form anew in
  every product, and the kernels of the TPU want this one.
- Channels of Gated DeltaNet are grouped by key head on the device (see `GatedDeltaNetShape`).
"""

from __future__ import annotations

import torch

from custom_ops.gated_delta_net import GatedDeltaNetShape

_GROUPED_BY_KEY_HEAD = ("linear_attn.in_proj_qkv.weight", "linear_attn.conv1d.weight")


def _is_transposed(name: str, tensor: torch.Tensor) -> bool:
    return tensor.dim() == 2 and not name.endswith("embed_tokens.weight")


def to_device_form(name: str, tensor: torch.Tensor, shape: GatedDeltaNetShape) -> torch.Tensor:
    """A parameter as the device holds it, from its published form; `shape` has the heads of a whole layer.

    The channels of a tensor of a wrong size stay as they are: whoever loads it complains about its shape.
    """
    if name.endswith(_GROUPED_BY_KEY_HEAD) and len(tensor) == shape.channels:
        tensor = tensor[torch.tensor(shape.published_channels(), device=tensor.device)]
    return tensor.t() if _is_transposed(name, tensor) else tensor


def to_published_form(name: str, tensor: torch.Tensor, shape: GatedDeltaNetShape) -> torch.Tensor:
    """A parameter in its published form, from what the device holds."""
    if _is_transposed(name, tensor):
        tensor = tensor.t()
    if name.endswith(_GROUPED_BY_KEY_HEAD):
        tensor = tensor[torch.tensor(shape.published_channels()).argsort().to(tensor.device)]
    return tensor
