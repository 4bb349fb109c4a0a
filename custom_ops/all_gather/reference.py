"""The definition: every device's bits in their place among zeros, added up."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from custom_ops.all_gather.shapes import AllGatherShape


def all_gather(rows, *, shape: AllGatherShape, axes: tuple[str, ...] = ("chip", "core")):
    """See `custom_ops.all_gather` for arguments and results."""
    bits = lax.bitcast_convert_type(rows, f"uint{8 * shape.itemsize}")
    places = jnp.zeros((shape.devices, *rows.shape), jnp.uint32).at[lax.axis_index(axes)].set(bits.astype(jnp.uint32))
    gathered = lax.psum(places, axes).astype(bits.dtype).reshape(-1, shape.columns)
    return lax.bitcast_convert_type(gathered, rows.dtype)
