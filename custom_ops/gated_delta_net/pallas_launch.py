"""How both kernels are called: blocks of rows in and out, the weights whole, the pools left in HBM and updated in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def launch(
    kernel: Callable, name: str, scalars: Sequence, rows: Sequence, weights: Sequence, pools: Sequence,
    *, steps, of_rows: Callable[..., pl.BlockSpec], output: jax.ShapeDtypeStruct, scratch: Sequence, vmem_bytes: int,
    interpret: bool,
):  # fmt: skip
    """Run `kernel` for each of `steps`.

    Args:
        scalars: arrays that are read ahead of the steps.
        rows: qkv, b and a; of_rows(array) is the block of one, or of the output, that a step sees.
        weights: conv_weight, A_log and dt_bias.
        pools: the convolution windows and the states, which the kernel copies itself.
        output: shape and dtype.

    Returns:
        The output and the pools.
    """
    conv_weight, a_log, dt_bias = weights
    weights = (conv_weight, a_log[None], dt_bias[None])
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    first_pool = len(scalars) + len(rows) + len(weights)

    def whole(array):
        return pl.BlockSpec(array.shape, lambda step, *_: (0, 0))

    return pl.pallas_call(
        kernel,
        name=name,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(steps,),
            in_specs=[*map(of_rows, rows), *map(whole, weights), in_hbm, in_hbm],
            out_specs=[of_rows(output), in_hbm, in_hbm],
            scratch_shapes=list(scratch),
        ),
        out_shape=[output, *(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools)],
        input_output_aliases={first_pool: 1, first_pool + 1: 2},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=vmem_bytes,
            disable_bounds_checks=True,  # slots are checked on the host; a check for each copy costs more than the copy
        ),
        interpret=interpret,
    )(*scalars, *rows, *weights, *pools)
