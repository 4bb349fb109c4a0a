"""FP8 weights (float8_e4m3fn) and their scales on the host: blocks as published, and output channels as the TPU wants them.

A published weight [..., rows, columns] has a scale for each 128×128 block, [..., ⌈rows / 128⌉, ⌈columns / 128⌉], by which
its numbers are multiplied (`weight_scale_inv`); blocks at the edges may be partial.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from torchqwen_tpu.checkpoint.host import first_not_finite

BLOCK = 128
FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
_ROWS = BLOCK
"""Rows that are converted at once: few enough for a step to find in the cache what the one before it left, and enough for
threads to spend their time in the steps and not in Python between them, where one runs at a time."""
_HALF_UNIT = 256.0
"""What a half-precision number with the bits of an FP8 number has to be multiplied by: their exponents' biases are 15 and 7."""


class Requantized(NamedTuple):
    """FP8 [output channels, inputs] with the float32 scale of each channel, and float64 sums of squares: of the error, and of
    the weights."""

    weight: torch.Tensor
    scale: torch.Tensor
    squares: torch.Tensor


def blocks(length: int) -> int:
    """Blocks that a dimension is cut into."""
    return -(-length // BLOCK)


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the block scales of a weight of this shape."""
    return (*shape[:-2], blocks(shape[-2]), blocks(shape[-1]))


def row_scales(scale: torch.Tensor, rows: int) -> torch.Tensor:
    """Block scales [⌈rows / 128⌉, column blocks] → the same for every row, float32 [rows, column blocks]."""
    return scale.float().repeat_interleave(BLOCK, dim=0)[:rows]


def dequantize(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """FP8 [rows, columns] times its block scales, in float32, rounded to `dtype`."""
    result = torch.empty(weight.shape, dtype=dtype)
    for rows, numbers in _dequantized_rows(weight, scale):
        result[rows] = numbers
    return result


def requantize_channels(weight: torch.Tensor, scale: torch.Tensor) -> Requantized:
    """FP8 [output channels, inputs] with block scales → FP8 with a scale for each output channel."""
    result, scales, squares = torch.empty_like(weight), torch.empty(weight.shape[0]), torch.zeros(2, dtype=torch.float64)
    bits = torch.empty((_ROWS, weight.shape[1]), dtype=torch.int16)
    magnitudes = torch.empty(bits.shape)
    for rows, numbers in _dequantized_rows(weight, scale):
        channel = _scale_of(torch.abs(numbers, out=magnitudes[: len(numbers)]).amax(dim=1))
        scales[rows] = channel
        numbers /= channel[:, None]
        lengths = [torch.linalg.vector_norm(numbers, dim=1)]
        result[rows] = numbers.clamp_(-LARGEST, LARGEST)
        numbers.sub_(_halves(result[rows], bits[: len(numbers)]), alpha=_HALF_UNIT)
        lengths.insert(0, torch.linalg.vector_norm(numbers, dim=1))
        squares += (torch.stack(lengths).double() * channel).square().sum(dim=1)
    return Requantized(result, scales, squares)


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


def _scale_of(largest: torch.Tensor) -> torch.Tensor:
    """The scale that takes these largest magnitudes to FP8's largest; 1 where all is zero."""
    return torch.where(largest > 0, largest / LARGEST, 1.0)


def _to_fp8(numbers: torch.Tensor) -> torch.Tensor:
    """Rounded to the nearest; a conversion beyond the largest number would give NaN."""
    return numbers.clamp(-LARGEST, LARGEST).to(FP8)


def _dequantized_rows(weight: torch.Tensor, scale: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """A few rows at a time, [some rows, columns] in float32, of FP8 [rows, columns] times its block scales.

    The numbers lie in memory that the next rows take: new memory for every step would cost more than the step.
    """
    columns = weight.shape[1]
    room = torch.empty((_ROWS, columns))
    bits = torch.empty(room.shape, dtype=torch.int16)
    for first in range(0, weight.shape[0], _ROWS):
        rows = slice(first, min(first + _ROWS, weight.shape[0]))
        own, numbers = weight[rows], room[: rows.stop - first]
        factors = scale[first // BLOCK].float().repeat_interleave(BLOCK)[:columns]
        if first_not_finite(own) is None:
            numbers.copy_(_halves(own, bits[: len(own)]))
            factors *= _HALF_UNIT
        else:
            numbers.copy_(own)
        yield rows, numbers.mul_(factors)


def _halves(weight: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """FP8 numbers that are finite, divided by `_HALF_UNIT`, in half precision: exact, and several times as fast as PyTorch's
    conversion. They lie in `room`, int16 of the same shape.

    The sign is extended to the upper byte; then exponent and fraction go seven bits up, and the copy of the sign among them
    is taken out.
    """
    bits = room.copy_(weight.view(torch.int8))
    return bits.mul_(1 << 7).bitwise_and_(~(1 << 14)).view(torch.float16)
