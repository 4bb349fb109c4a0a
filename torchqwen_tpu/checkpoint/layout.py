"""The order of channels on the device against the published one: converted at load and save, never in a step."""

from __future__ import annotations

import torch

from custom_ops.gated_delta_net import GatedDeltaNetShape

GROUPED_BY_KEY_HEAD = ("linear_attn.in_proj_qkv.weight", "linear_attn.conv1d.weight")
"""Ends of the names of parameters whose first dimension is grouped by key head on the device."""


def to_device_order(name: str, tensor: torch.Tensor, shape: GatedDeltaNetShape) -> torch.Tensor:
    """A parameter as the device holds it, from its published form."""
    if not name.endswith(GROUPED_BY_KEY_HEAD):
        return tensor
    return tensor[torch.tensor(shape.published_channels(), device=tensor.device)]


def to_published_order(name: str, tensor: torch.Tensor, shape: GatedDeltaNetShape) -> torch.Tensor:
    """A parameter in its published form, from what the device holds."""
    if not name.endswith(GROUPED_BY_KEY_HEAD):
        return tensor
    return tensor[torch.argsort(torch.tensor(shape.published_channels(), device=tensor.device))]
