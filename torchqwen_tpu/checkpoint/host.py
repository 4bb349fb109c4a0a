"""Whether numbers on the host are finite."""

from __future__ import annotations

import numpy as np
import torch

_NOT_FINITE = {
    # signed and unsigned integers of the type's width, and the least bits of a positive number that is not finite
    torch.float8_e4m3fn: (np.int8, np.uint8, 0x7F),
    torch.bfloat16: (np.int16, np.uint16, 0x7F80),
    torch.float16: (np.int16, np.uint16, 0x7C00),
    torch.float32: (np.int32, np.uint32, 0x7F800000),
}


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
