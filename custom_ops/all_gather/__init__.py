"""All-gather over a mesh of chips × cores: every device gets the rows of all devices, in the order of the devices.

Every implementation is a function with this signature, called inside `jax.shard_map`:

    all_gather(rows, *, shape, axes=("chip", "core")) -> gathered

    rows      [rows, columns] of this device
    shape     `AllGatherShape`; `AllGatherShape.of(rows, axes)` makes it
    axes      mesh axes of the chips and of the cores of a chip; device number = cores * chip + core

    gathered  [devices * rows, columns] in the dtype of rows: `lax.all_gather(rows, axes, axis=0, tiled=True)`
"""

from custom_ops.all_gather.shapes import AllGatherShape

__all__ = ["AllGatherShape"]
