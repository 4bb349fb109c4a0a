"""Weights of experts in FP8: how their scales lie beside them."""

from __future__ import annotations

import jax.numpy as jnp

BLOCK = 128
"""Rows and columns of a weight that share a scale where there is one for each block."""
FP8 = jnp.float8_e4m3fn
FP8_LARGEST = 448.0


def is_fp8(array) -> bool:
    return array.dtype == FP8


def check_scales(rows, gate_up, down, gate_up_scale, down_scale, row_scale) -> None:
    """That FP8 arrays come with scales of a shape that fits, and no others do.

    Raises:
        ValueError: it names the array and the shapes that would fit.
    """
    experts, outputs, hidden = gate_up.shape
    for name, weight, scale in (("gate_up", gate_up, gate_up_scale), ("down", down, down_scale)):
        channels, blocks = weight.shape[:2], (experts, *(-(-size // BLOCK) for size in weight.shape[1:]))
        _check(name, weight, scale, channels, blocks)
    _check("rows", rows, row_scale, rows.shape[:1])
    if gate_up_scale is not None and gate_up_scale.ndim != down_scale.ndim:
        raise ValueError("gate_up and down must both have a scale for each output channel, or both for each block")


def _check(name: str, array, scale, *shapes: tuple[int, ...]) -> None:
    expected = " or ".join(str(list(shape)) for shape in shapes)
    if not is_fp8(array):
        if scale is not None:
            raise ValueError(f"{name} of type {array.dtype} takes no scale; scales belong to float8_e4m3fn")
    elif scale is None:
        raise ValueError(f"{name} of type float8_e4m3fn needs a float32 scale of shape {expected}")
    elif scale.shape not in shapes:
        raise ValueError(f"the scale of {name} has shape {list(scale.shape)}, not {expected}")


def of_elements(scale, shape: tuple[int, int]):
    """The scale of every element of one expert's weight [outputs, inputs], from scales by channel or by block."""
    if scale.ndim == 1:
        return scale[:, None]
    outputs, inputs = shape
    return jnp.repeat(jnp.repeat(scale, BLOCK, axis=0)[:outputs], BLOCK, axis=1)[:, :inputs]


def quantize_rows(rows):
    """[rows, columns] → float8_e4m3fn and the scale of each row [rows] float32: the largest value becomes 448.

    A row with a value that is not finite becomes one whose products are NaN.
    """
    rows = rows.astype(jnp.float32)
    scale = jnp.max(jnp.abs(rows), axis=-1) / FP8_LARGEST
    scale = jnp.maximum(scale, jnp.finfo(jnp.float32).tiny)  # zeros, and what is too small for its scale to be a number
    return (rows / scale[:, None]).astype(FP8), scale
