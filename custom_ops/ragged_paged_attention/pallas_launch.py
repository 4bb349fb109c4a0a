"""How the kernels are called: one program, small arrays whole in memory, pools left in HBM and updated in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

VMEM_BYTES = 60 << 20


def launch(
    kernel: Callable[[dict[str, Any]], None], name: str, interpret: bool, *, memory: Mapping[str, Any],
    scalars: Mapping[str, jax.Array], pools: Mapping[str, jax.Array], arrays: Mapping[str, jax.Array] = MappingProxyType({}),
    far: Mapping[str, jax.Array] = MappingProxyType({}),
    outputs: Mapping[str, jax.ShapeDtypeStruct] = MappingProxyType({}),
) -> list[jax.Array]:  # fmt: skip
    """Run `kernel` with references by name: to scalars, to arrays (in memory, those in `far` in HBM), to outputs and pools, and
    to `memory` of its own.

    Returns:
        The outputs, then the pools.
    """
    names = [*scalars, *arrays, *far, *(f"{pool} before" for pool in pools), *outputs, *pools, *memory]
    in_hbm, in_vmem = pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pltpu.VMEM)

    def body(*refs):
        # Pools are read and written by their outputs' references: only those see what was written.
        kernel({name: ref for name, ref in zip(names, refs, strict=True) if not name.endswith(" before")})

    first = len(scalars) + len(arrays) + len(far)
    return pl.pallas_call(
        body,
        name=name,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=[in_vmem] * len(arrays) + [in_hbm] * (len(far) + len(pools)),
            out_specs=[in_vmem] * len(outputs) + [in_hbm] * len(pools),
            scratch_shapes=list(memory.values()),
        ),
        out_shape=[*outputs.values(), *(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools.values())],
        input_output_aliases={first + number: len(outputs) + number for number in range(len(pools))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=VMEM_BYTES,
            disable_bounds_checks=True,  # page tables are the host's own; a check for each copy costs more than the copy
        ),
        interpret=interpret,
    )(*scalars.values(), *arrays.values(), *far.values(), *pools.values())
