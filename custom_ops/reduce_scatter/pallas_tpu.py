"""Hierarchical reduce-scatter on TPU: `pallas_kernel` for each block of columns that `plan` cuts."""

from __future__ import annotations

import functools
import logging

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from custom_ops.hypercube import layout
from custom_ops.hypercube.layout import CORES
from custom_ops.reduce_scatter import plan as planning
from custom_ops.reduce_scatter.pallas_kernel import kernel, scratch_shapes
from custom_ops.reduce_scatter.plan import VMEM_BYTES, Plan
from custom_ops.reduce_scatter.shapes import ReduceScatterShape

COLLECTIVE = 1
"""Number of the barrier semaphore, no other kernel's. All calls may share it: they have the same partners, and a device that
is ahead by a call has its partners' terms of the call before, so they have left that one's barrier."""

_log = logging.getLogger(__name__)


@functools.cache
def supports(shape: ReduceScatterShape) -> bool:
    """Whether the kernel takes this shape; where it does not, the log says why, once a shape."""
    reason = _refusal(shape)
    if reason:
        _log.warning("XLA's psum_scatter instead of the hierarchical reduce-scatter for %s: %s", shape, reason)
    return reason is None


def _refusal(shape: ReduceScatterShape) -> str | None:
    if reason := layout.refusal(shape.chips, shape.cores):
        return reason
    if shape.dtype not in ("float32", "bfloat16"):
        return "the terms have to be float32 or bfloat16"
    if not shape.rows or not shape.hidden:
        return "there is nothing to add"
    if planning.plan(shape) is None:
        return f"not even the smallest micro-batch fits into {VMEM_BYTES // 2**20} MiB of VMEM"
    return None


def reduce_scatter(
    partial,
    *,
    shape: ReduceScatterShape,
    axes: tuple[str, str] = ("chip", "core"),
    interpret: bool | pltpu.InterpretParams = False,
):
    """See `custom_ops.reduce_scatter` for arguments and results.

    interpret: parameters of JAX's TPU interpreter, which simulates DMAs and semaphores on CPU devices.

    Raises:
        ValueError: a shape that `supports` refuses, or one that is not that of `partial` and the mesh.
    """
    if shape != ReduceScatterShape.of(partial, axes):
        raise ValueError(f"partial and the mesh have {ReduceScatterShape.of(partial, axes)}, not {shape}")
    reason = _refusal(shape)
    if reason:
        raise ValueError(f"the hierarchical reduce-scatter does not take {shape}: {reason}")
    if interpret is True:
        raise ValueError(
            "the hierarchical reduce-scatter runs on TPUs and in JAX's simulation of them (pltpu.InterpretParams); elsewhere "
            "use the implementation 'xla'"
        )
    cut = planning.plan(shape)
    rows, hidden = shape.rows_per_device, shape.hidden
    # A dimension of its own for the devices: their rows may then start anywhere, whatever the tiles of memory.
    partial = partial.reshape(shape.chips, CORES, rows, hidden)
    if (cut.padded_rows, cut.padded_hidden) != (rows, hidden):
        partial = jnp.pad(partial, ((0, 0), (0, 0), (0, cut.padded_rows - rows), (0, cut.padded_hidden - hidden)))
    results = []
    for block in cut.column_blocks:
        if results:
            # Calls share a barrier semaphore and have to come in the same order everywhere.
            partial, results[-1] = lax.optimization_barrier((partial, results[-1]))
        results.append(_call(partial, shape, cut, block, axes, interpret))
    result = results[0] if len(results) == 1 else jnp.concatenate(results, axis=1)
    return result[:rows, :hidden]


def _call(partial, shape: ReduceScatterShape, cut: Plan, block: tuple[int, int], axes: tuple[str, str], interpret):
    """The columns of `block` of all rows of this device."""
    columns = block[1] - block[0]
    return pl.pallas_call(
        functools.partial(kernel, shape=shape, cut=cut, block=block, axes=axes),
        name="reduce_scatter",
        out_shape=jax.ShapeDtypeStruct((cut.padded_rows, columns), partial.dtype),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        scratch_shapes=scratch_shapes(shape, cut, columns, partial.dtype),
        compiler_params=pltpu.CompilerParams(collective_id=COLLECTIVE, vmem_limit_bytes=VMEM_BYTES + 8 * 2**20),
        interpret=interpret,
    )(partial)
