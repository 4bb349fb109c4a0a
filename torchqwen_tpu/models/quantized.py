"""Products with FP8 matrices and their scales."""

from __future__ import annotations

import torch

from custom_ops.bridge import JaxOp, current_platform
from custom_ops.quantized_matmul import quantized_matmul

BLOCK = 128
"""Inputs that share a scale where there is one for each block."""


def scaled_product(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x [..., in] · FP8 weight [in, out], multiplied by its scales → [..., out] in the dtype of x.

    With a scale of each output channel, [out], a TPU quantises the tokens too and multiplies FP8 by FP8. A CPU has no such
    product: the weight is widened to the dtype of x, and x stays as it is. So it is everywhere with a scale of each output
    channel and block of inputs, [⌈in / 128⌉, out], which no product could apply to its partial sums.
    """
    if scale.dim() == 2:
        elements = scale.unsqueeze(1).expand(-1, BLOCK, -1).flatten(0, 1)[: weight.shape[0]]
        return x @ (weight.float() * elements).to(x.dtype)
    if current_platform() == "tpu":
        rows = x.reshape(-1, x.shape[-1])
        return JaxOp("quantized_matmul", quantized_matmul)(rows, weight, scale)[0].view(*x.shape[:-1], -1)
    return ((x @ weight.to(x.dtype)) * scale).to(x.dtype)
