"""Product of tokens with an FP8 matrix, the tokens quantised as they come."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from custom_ops.ragged_moe.quantized import quantize_rows


def quantized_matmul(rows, weight, scale):
    """rows [R, in] · weight [in, out] in float8_e4m3fn, with a float32 scale of each output channel [out].

    Each row is quantised by its own largest magnitude. FP8 is multiplied by FP8 and summed in float32.

    Returns: [R, out] in the dtype of rows.
    """
    quantized, row_scale = quantize_rows(rows)
    product = lax.dot_general(quantized, weight, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return (product * row_scale[:, None] * scale).astype(rows.dtype)
