"""Tokens to all devices and results back to their owners: the only communication of a mixture of experts."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax


def dispatch(arrays, token_axes: tuple[str, ...]):
    """Rows of all devices, in the order of the devices. Without token axes the rows are already whole."""
    if not token_axes:
        return arrays
    return tuple(lax.all_gather(array, token_axes, axis=0, tiled=True) for array in arrays)


def combine(partial, token_axes: tuple[str, ...], expert_axes: tuple[str, ...]):
    """Sum of every device's `partial` results [all tokens, hidden size], each device keeping its own rows."""
    only_experts = tuple(axis for axis in expert_axes if axis not in token_axes)
    if only_experts:
        partial = lax.psum(partial, only_experts)
    if token_axes:
        partial = lax.psum_scatter(partial, token_axes, scatter_dimension=0, tiled=True)
    return partial


def first_local_expert(local_experts: int, expert_axes: tuple[str, ...]):
    """Number of this device's first expert."""
    return lax.axis_index(expert_axes) * local_experts if expert_axes else jnp.int32(0)
