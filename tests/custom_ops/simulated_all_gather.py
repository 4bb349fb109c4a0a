"""Run by test_all_gather.py in a process of several CPU devices: the kernel in JAX's TPU interpreter.

`python simulated_all_gather.py '[case, ...]'` prints a JSON list with what came of each case. A case is an object: chips, rows
(of a device), columns, dtype; pieces, how many, or null for the plan's own; fault null or a name of FAULTS.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from simulation import SIMULATOR, watched

from custom_ops.all_gather import AllGatherShape, pallas_kernel, pallas_tpu, reference, xla
from custom_ops.hypercube.partners import Partners

Core = pallas_kernel._Core


def waits_at_the_end(core, part, finish=Core.finish, wait=Core.wait_for_step) -> None:
    for step in range(core.steps):
        wait(core, part, step)
    finish(core, part)


def as_the_first_core(partners, *arguments, place=Partners.__init__) -> None:
    place(partners, *arguments)
    partners.swapped_with, partners.core = 1 - partners.core, 0


def to_the_other_core(partners):
    return {"chip": partners.chip, "core": partners.swapped_with}


FAULTS: dict[str, Callable] = {
    # A place is read while the neighbour still writes it.
    "sent on before it has arrived": lambda: mock.patch.multiple(
        Core, finish=waits_at_the_end, wait_for_step=lambda *arguments: None
    ),
    # The other core's rows are written where the chips' are, and read, at the same time.
    "one place for both cores": lambda: mock.patch.multiple(
        Partners, __init__=as_the_first_core, other_core=to_the_other_core, neighbour=lambda partners, dimension: {
            "chip": partners.chip ^ (1 << dimension), "core": 1 - partners.swapped_with,
        },
    ),  # fmt: skip
}


def run(case: dict) -> dict:
    """Whether the result is that of lax.all_gather and of the reference, bit for bit, and whether there was a race."""
    devices = case["chips"] * 2
    shape = AllGatherShape(case["chips"], 2, case["rows"], case["columns"], case["dtype"])
    rows = np.random.default_rng(0).integers(-100, 100, (devices * case["rows"], case["columns"])).astype(case["dtype"])
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(-1, 2), ("chip", "core"))
    spec = PartitionSpec(("chip", "core"))

    def result(function, **static):
        """What each device has."""
        gather = functools.partial(function, shape=shape, **static)
        sharded = jax.shard_map(lambda own: gather(own)[None], mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return np.asarray(jax.jit(sharded)(rows)).view(np.uint8)

    with ExitStack() as stack:
        states = stack.enter_context(watched())
        if case["pieces"]:
            stack.enter_context(mock.patch.object(pallas_tpu, "plan", lambda shape: cut_into(shape, case["pieces"])))
        if case["fault"]:
            stack.enter_context(FAULTS[case["fault"]]())
        simulated = result(pallas_tpu.all_gather, interpret=SIMULATOR)
    (state,) = states
    return {
        "equals all_gather": np.array_equal(simulated, result(xla.all_gather)),
        "equals reference": np.array_equal(simulated, result(reference.all_gather)),
        "race": state.races_found,
    }


plan = pallas_tpu.plan


def cut_into(shape: AllGatherShape, pieces: int):
    """The plan with so many pieces, of any number of rows."""
    edges = [index * shape.rows // pieces for index in range(pieces + 1)]
    return replace(plan(shape), pieces=tuple(zip(edges[:-1], edges[1:], strict=True)))


if __name__ == "__main__":
    print(json.dumps([run(case) for case in json.loads(sys.argv[1])]))
