"""Reduce-scatter over a mesh of chips × cores: every device keeps its rows of the sum over all devices.

Every implementation is a function with this signature, called inside `jax.shard_map`:

    reduce_scatter(partial, *, shape, axes=("chip", "core")) -> output

    partial   [rows, hidden] float32 or bfloat16, this device's terms of the sum for the rows of all devices
    shape     `ReduceScatterShape`; `ReduceScatterShape.of(partial, axes)` makes it
    axes      mesh axes of the chips and of the cores of a chip; device number = cores * chip + core

    output    [rows / devices, hidden] in the dtype of partial: the sum of this device's contiguous rows, which are those of
              `lax.psum_scatter(partial, axes, scatter_dimension=0, tiled=True)`

Sums are FP32. What travels between the devices is `partial`'s dtype: FP32 is never rounded before the result; a BF16
partial sum is rounded each time it leaves a core, which in `pallas_tpu` is once for each dimension of the hypercube of
chips (the first exchange sends `partial` as it is), and `pallas_tpu` keeps what stays on the core in FP32.
"""

from custom_ops.reduce_scatter.shapes import ReduceScatterShape

__all__ = ["ReduceScatterShape"]
