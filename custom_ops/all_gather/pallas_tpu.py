"""Hierarchical all-gather on TPU: one call of `pallas_kernel`."""

from __future__ import annotations

import functools
import logging

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from custom_ops.all_gather.cost import xla_time
from custom_ops.all_gather.pallas_kernel import kernel, scratch_shapes
from custom_ops.all_gather.plan import BESIDE, gains, plan, refusal
from custom_ops.all_gather.shapes import AllGatherShape

COLLECTIVE = 2
"""Number of the barrier semaphore, no other kernel's. All calls may share it: they have the same partners, and a device that
is ahead by a call has its partners' rows of the call before, so they have left that one's barrier."""

_log = logging.getLogger(__name__)


@functools.cache
def supports(shape: AllGatherShape) -> bool:
    """Whether the kernel takes this shape and gains by it; where not, the log says why, once a shape."""
    chosen = gains(shape)
    if not chosen:
        reason = refusal(shape) or (
            f"modelled at {1e6 * xla_time(shape):.1f} µs, of which {1e6 * BESIDE:.0f} µs may be hidden, against "
            f"{1e6 * plan(shape).time:.1f} µs"
        )
        _log.info("XLA's all-gather instead of the hierarchical one for %s: %s", shape, reason)
    return chosen


def all_gather(
    rows,
    *,
    shape: AllGatherShape,
    axes: tuple[str, str] = ("chip", "core"),
    interpret: bool | pltpu.InterpretParams = False,
):
    """See `custom_ops.all_gather` for arguments and results.

    interpret: parameters of JAX's TPU interpreter, which simulates DMAs and semaphores on CPU devices.

    Raises:
        ValueError: a mesh that the kernel does not take, or a shape that is not that of `rows` and the mesh.
    """
    if shape != AllGatherShape.of(rows, axes):
        raise ValueError(f"rows and the mesh have {AllGatherShape.of(rows, axes)}, not {shape}")
    reason = refusal(shape)
    if reason:
        raise ValueError(f"the hierarchical all-gather does not take {shape}: {reason}")
    if interpret is True:
        raise ValueError(
            "the hierarchical all-gather runs on TPUs and in JAX's simulation of them (pltpu.InterpretParams); elsewhere use "
            "the implementation 'xla'"
        )
    cut = plan(shape)
    # Dimensions of their own for the devices: their rows may then start anywhere, whatever the tiles of memory.
    gathered = pl.pallas_call(
        functools.partial(kernel, shape=shape, cut=cut, axes=axes),
        name="all_gather",
        out_shape=jax.ShapeDtypeStruct((shape.chips, shape.cores, shape.rows, shape.columns), rows.dtype),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        scratch_shapes=scratch_shapes(shape, cut),
        compiler_params=pltpu.CompilerParams(collective_id=COLLECTIVE),
        interpret=interpret,
    )(rows)
    return gathered.reshape(shape.devices * shape.rows, shape.columns)
