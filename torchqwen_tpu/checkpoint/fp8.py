"""FP8 weights (float8_e4m3fn) and their scales on the host: blocks as published, and output channels as the TPU wants them.

A published weight [..., rows, columns] has a scale for each 128×128 block, [..., ⌈rows / 128⌉, ⌈columns / 128⌉], by which
its numbers are multiplied (`weight_scale_inv`); blocks at the edges may be partial.
"""

from __future__ import annotations

import torch

BLOCK = 128
FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max


def blocks(length: int) -> int:
    """Blocks that a dimension is cut into."""
    return -(-length // BLOCK)


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the block scales of a weight of this shape."""
    return (*shape[:-2], blocks(shape[-2]), blocks(shape[-1]))


def row_scales(scale: torch.Tensor, rows: int) -> torch.Tensor:
    """Block scales [⌈rows / 128⌉, column blocks] → the same for every row, float32 [rows, column blocks]."""
    return scale.float().repeat_interleave(BLOCK, dim=0)[:rows]


def dequantize(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """FP8 [rows, columns] times its block scales → float32."""
    result = weight.float()
    scale = row_scales(scale, weight.shape[0])
    for block in range(scale.shape[1]):
        result[:, block * BLOCK : (block + 1) * BLOCK] *= scale[:, block, None]
    return result


def quantize_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, columns] → FP8 and float32 block scales, each block's largest number at FP8's largest.

    Quantising the result of `dequantize` again, rounded to bfloat16 or not, gives the same FP8 numbers and scales.
    """
    rows, columns = weight.shape
    padded = weight.new_zeros(blocks(rows) * BLOCK, blocks(columns) * BLOCK, dtype=torch.float32)
    padded[:rows, :columns] = weight
    grid = padded.view(blocks(rows), BLOCK, blocks(columns), BLOCK)
    scale = _scale_of(grid.abs().amax(dim=(1, 3)))
    quantized = _to_fp8(grid / scale[:, None, :, None]).view(padded.shape)
    return quantized[:rows, :columns].contiguous(), scale


def quantize_channels(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[output channels, inputs] → FP8 and the float32 scale of each output channel."""
    weight = weight.float()
    scale = _scale_of(weight.abs().amax(dim=1))
    return _to_fp8(weight / scale[:, None]), scale


def _scale_of(largest: torch.Tensor) -> torch.Tensor:
    """The scale that takes these largest magnitudes to FP8's largest; 1 where all is zero."""
    return torch.where(largest > 0, largest / LARGEST, 1.0)


def _to_fp8(numbers: torch.Tensor) -> torch.Tensor:
    """Rounded to the nearest; a conversion beyond the largest number would give NaN."""
    return numbers.clamp(-LARGEST, LARGEST).to(FP8)
