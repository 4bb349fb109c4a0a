"""Memory of the host on the way to the devices, and whether what lies in it is finite."""

from __future__ import annotations

import mmap

import numpy as np
import torch

HUGE = 4 << 20
"""From this many bytes on memory is asked for in huge pages: 2 MiB at a time, since 4 KiB at a time it costs about as much to
come by as to fill."""
_NOT_FINITE = {
    # signed and unsigned integers of the type's width, and the least bits of a positive number that is not finite
    torch.float8_e4m3fn: (np.int8, np.uint8, 0x7F),
    torch.bfloat16: (np.int16, np.uint16, 0x7F80),
    torch.float16: (np.int16, np.uint16, 0x7C00),
    torch.float32: (np.int32, np.uint32, 0x7F800000),
}


def host_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor of the host, to be filled once and handed on."""
    size = torch.Size(shape).numel() * dtype.itemsize
    if size < HUGE:
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has no huge pages
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def first_not_finite(tensor: torch.Tensor) -> list[int] | None:
    """Where a contiguous floating-point tensor holds NaN or infinity (for FP8, which has none, NaN); None if nowhere.

    Numbers that are not finite have the largest bits of their sign, so that two maxima find them: of the bits as signed
    integers (positive numbers are the largest) and as unsigned ones (negative ones are). That is as fast as reading.
    """
    signed, unsigned, least = _NOT_FINITE[tensor.dtype]
    bits = tensor.reshape(-1).view(torch.uint8).numpy()
    sign = 1 << (8 * tensor.dtype.itemsize - 1)
    if not bits.size or (bits.view(signed).max() < least and bits.view(unsigned).max() < least + sign):
        return None
    wrong = ~torch.isfinite(tensor.float())
    return wrong.nonzero()[0].tolist()
