"""Tensors of the host: memory for large ones, and whether their numbers are finite."""

from __future__ import annotations

import math
import mmap
from pathlib import Path

import numpy as np
import torch

LARGE = 64 << 20
"""Bytes from which a tensor is given huge pages."""

_NOT_FINITE = {
    # signed and unsigned integers of the type's width, and the least bits of a positive number that is not finite
    torch.float8_e4m3fn: (np.int8, np.uint8, 0x7F),
    torch.bfloat16: (np.int16, np.uint16, 0x7F80),
    torch.float16: (np.int16, np.uint16, 0x7C00),
    torch.float32: (np.int32, np.uint32, 0x7F800000),
}


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose numbers are not set, in huge pages if it is large and the system has them free.

    The first write to a page is what filling a new tensor costs beside the copy, and huge pages halve it. Where files fill the
    memory they double it: the system has to make room for each.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < LARGE or not hasattr(mmap, "MADV_HUGEPAGE") or _free_bytes() < 2 * size:
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)  # which keeps the memory


def _free_bytes() -> int:
    """Memory that nothing uses, not even the cache of files."""
    (line,) = (line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemFree:"))
    return int(line.split()[1]) << 10


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
