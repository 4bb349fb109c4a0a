"""Run by test_reduce_scatter.py in a process of several CPU devices: the kernel in JAX's TPU interpreter.

`python simulated_reduce_scatter.py '[case, ...]'` prints a JSON list with what came of each case. A case is an object: chips,
rows, hidden, dtype; cut [rows a micro-batch, calls] or null for the plan's own; values 'integers' or 'normal'; fault null or
a name of FAULTS.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from simulation import SIMULATOR, watched

from custom_ops.hypercube import layout
from custom_ops.reduce_scatter import ReduceScatterShape, pallas_kernel, pallas_tpu, plan, reference, xla


def one_buffer_for_both_phases(partial, output, *, swapped, received, **rest) -> None:
    pallas_kernel.kernel(partial, output, swapped=swapped, received=swapped, **rest)


FAULTS: dict[str, Callable] = {
    # What a neighbour sends in a step may arrive while what came in the step before is still being read.
    "one region for all steps": lambda: mock.patch.object(
        layout, "step_slabs", lambda step, chips: (0, chips >> (step + 1))
    ),
    # A neighbour that is ahead writes where the other core of the chip still has to write, or this core to read.
    "one buffer for both phases": lambda: mock.patch.object(pallas_tpu, "kernel", one_buffer_for_both_phases),
    # A device that is ahead writes micro-batch m + 2 over what was not read of m.
    "no credits": lambda: mock.patch.multiple(
        pallas_kernel, take_credit=lambda *arguments: None, give_credit=lambda *arguments: None
    ),
}


def run(case: dict) -> dict:
    """Whether the result equals psum_scatter's, its largest error over the largest value, and whether there was a race."""
    devices = case["chips"] * 2
    shape = ReduceScatterShape(case["chips"], 2, case["rows"], case["hidden"], case["dtype"])
    terms = values(case["values"], (devices, case["rows"], case["hidden"])).astype(case["dtype"])
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(-1, 2), ("chip", "core"))
    spec = PartitionSpec(("chip", "core"))

    def result(function, **static):
        sharded = jax.shard_map(
            functools.partial(function, shape=shape, **static), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
        return in_float64(jax.jit(sharded)(terms.reshape(-1, case["hidden"])))

    with ExitStack() as stack:
        states = stack.enter_context(watched())
        if case["cut"]:
            stack.enter_context(mock.patch.object(plan, "plan", lambda shape: cut_into(shape, *case["cut"])))
        if case["fault"]:
            stack.enter_context(FAULTS[case["fault"]]())
        simulated = result(pallas_tpu.reduce_scatter, interpret=SIMULATOR)
    exact = in_float64(terms).sum(axis=0)
    return {
        "equals psum_scatter": np.array_equal(simulated, result(xla.reduce_scatter)),
        "equals reference": np.array_equal(simulated, result(reference.reduce_scatter)),
        "error": float(np.abs(simulated - exact).max() / np.abs(exact).max()),
        "calls": len(states),
        "race": any(state.races_found for state in states),
    }


def in_float64(array: jax.Array) -> np.ndarray:
    return np.asarray(array.astype(jnp.float32)).astype(np.float64)


def values(kind: str, shape: tuple[int, ...]) -> jax.Array:
    """Integers, whose sums neither FP32 nor BF16 rounds, or normal numbers."""
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.integers(-8, 9, shape) if kind == "integers" else rng.standard_normal(shape), jnp.float32)


def cut_into(shape: ReduceScatterShape, rows: int, calls: int) -> plan.Plan:
    """A plan with micro-batches of `rows` rows and so many calls of the kernel."""
    columns = -(-shape.hidden // layout.LANES) * layout.LANES
    return plan.Plan(rows, -(-shape.rows_per_device // rows), layout.streams(0, columns, calls), 0.0)


if __name__ == "__main__":
    print(json.dumps([run(case) for case in json.loads(sys.argv[1])]))
