"""Norms, rotary embedding and the dense MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from torchqwen_tpu.models.quantized import scaled_product

STATIC_ROPE_TYPES = ("default", "linear", "yarn", "llama3")
"""RoPE types whose frequencies do not depend on the length of the input."""


class RMSNorm(nn.Module):
    """x / rms(x) · (1 + weight), in FP32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight.float())).to(x.dtype)


class GatedRMSNorm(nn.Module):
    """x / rms(x) · weight · silu(gate) over the value dimension of a Gated DeltaNet head; the weight stays FP32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        return (y * self.weight * F.silu(gate.float())).to(x.dtype)


class Linear(nn.Module):
    """x · weight (+ bias), with the weight [in, out] on the device and [out, in] in `state_dict()` and on disk.

    An FP8 weight has a `weight_scale`, float32, of each output channel [out] or of each output channel and block of 128
    inputs [⌈in / 128⌉, out]; the checkpoint reader adds it.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.register_parameter("weight_scale", None)
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight_scale is None:
            y = x @ self.weight.to(x.dtype)
        else:
            y = scaled_product(x, self.weight, self.weight_scale)
        return y if self.bias is None else y + self.bias


class MLP(nn.Module):
    """down(act(gate(x)) · up(x)), gate and up as one matrix on the device."""

    def __init__(self, config, width: int):
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * width)
        self.down_proj = Linear(width, config.hidden_size)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.activation(gate) * up)


class RotaryEmbedding(nn.Module):
    """Cosines and sines of interleaved multi-axis RoPE for the rotated part of a head.

    Each frequency turns with one of the three position axes: of three neighbours the second follows the height and the
    third the width, as far as `mrope_section` reaches, and all others the temporal axis. With equal axes (text) this is
    plain RoPE. Frequencies and the attention scaling of YaRN come from transformers.
    """

    def __init__(self, config):
        super().__init__()
        kind = config.rope_parameters["rope_type"]
        if kind not in STATIC_ROPE_TYPES:
            raise ValueError(f"rope_type '{kind}' is not supported; use one of {', '.join(STATIC_ROPE_TYPES)}")
        if kind == "default":
            dim = int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
            exponent = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
            frequency, self.scaling = config.rope_parameters["rope_theta"] ** -exponent, 1.0
        else:
            with torch.device("cpu"):  # it makes some tensors without naming a device, and the model is built on meta
                frequency, self.scaling = ROPE_INIT_FUNCTIONS[kind](config, device=torch.device("cpu"))
        axis = torch.zeros(len(frequency), dtype=torch.long, device="cpu")
        for number, section in enumerate(config.rope_parameters.get("mrope_section", ())):
            if number:
                axis[number : 3 * section : 3] = number
        self.register_buffer("frequency", frequency, persistent=False)
        self.register_buffer("axis", axis, persistent=False)

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [3, tokens] → cosines and sines [tokens, 1, rotated dims]."""
        angle = positions.float().index_select(0, self.axis).t() * self.frequency
        angle = torch.cat([angle, angle], dim=-1).unsqueeze(1)
        return (angle.cos() * self.scaling).to(dtype), (angle.sin() * self.scaling).to(dtype)


def rotate(x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate the first dims of each head [tokens, heads, dim], as many as the cosines have; the others pass."""
    cos, sin = rotary
    turned, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    left, right = turned.chunk(2, dim=-1)
    return torch.cat([turned * cos + torch.cat([-right, left], dim=-1) * sin, rest], dim=-1)
