"""Run by test_bridge.py in a process of eight CPU devices: operations of the bridge under SPMD, alone and in a scan.

Prints JSON: errors against numpy, and what the compiled HLO in the folder of its argument says of the donated state.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch_xla
import torch_xla.runtime as xr
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AbstractMesh, PartitionSpec
from torch_xla.distributed import spmd
from torch_xla.experimental.scan import _scan_impl_pytree as scan

from custom_ops.bridge import JaxOp

STEPS, ROWS, WIDTH = 3, 16, 128
MESH = AbstractMesh((4, 2), ("chip", "core"))
SPLIT = PartitionSpec(("chip", "core"))


def pallas_update(rows, state):
    """state [n, width] ← state / 2 + rows, and its sums [n, 1]; the state in place."""

    def kernel(rows_ref, state_ref, sum_ref, out_ref):
        new = state_ref[...] * 0.5 + rows_ref[...]
        out_ref[...] = new
        sum_ref[...] = jnp.sum(new, axis=1, keepdims=True)

    shapes = (jax.ShapeDtypeStruct((state.shape[0], 1), state.dtype), jax.ShapeDtypeStruct(state.shape, state.dtype))
    return pl.pallas_call(kernel, out_shape=shapes, input_output_aliases={1: 1}, interpret=True)(rows, state)


def xla_update(rows, state):
    """The same with a collective: each device also adds what all devices' rows sum up to, times zero."""
    everything = lax.psum(jnp.sum(rows), ("chip", "core"))
    new = state * 0.5 + rows + 0 * everything
    return jnp.sum(new, axis=1, keepdims=True), new


def expected(rows, state, steps: int):
    for step in range(steps):
        state = state * 0.5 + rows * (step + 1)
    return state.sum(1, keepdims=True), state


def run(name: str, function) -> dict[str, float]:
    op = JaxOp(name, function, (), MESH, (SPLIT, SPLIT), (SPLIT, SPLIT), donated=(1,))
    mesh = spmd.Mesh(np.arange(8), (4, 2), ("chip", "core"))
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((ROWS, WIDTH)).astype(np.float32) for _ in range(2)]

    def placed(array):
        tensor = torch.from_numpy(array).to(torch_xla.device())
        spmd.mark_sharding(tensor, mesh, (("chip", "core"), None))
        return tensor

    def error(results, steps: int) -> float:
        torch_xla.sync()
        pairs = zip(results, expected(*arrays, steps), strict=True)
        return max(float(np.abs(result.cpu().numpy() - want).max()) for result, want in pairs)

    rows, state = map(placed, arrays)
    alone = error(op(rows, state), 1)

    rows, state = map(placed, arrays)
    numbers = torch.arange(1, STEPS + 1, dtype=torch.float32).to(torch_xla.device())

    def step(carry, number):
        total, state = op(rows * number, carry[1])
        return (total, state), number

    results, _ = scan(step, (torch.zeros(ROWS, 1, device=torch_xla.device()), state), numbers)
    return {"alone": alone, "in a scan": error(results, STEPS)}


def compiled_with(name: str, folder: Path) -> str:
    """The compiled HLO of the graph that calls the operation by itself."""
    for file in sorted(folder.glob("*after_optimizations.txt")):
        text = file.read_text()
        if f"/{name}/" in text and "num_partitions=8" in text.splitlines()[0]:
            return text
    raise FileNotFoundError(f"no compiled module names {name}")


def main(folder: Path) -> None:
    xr.use_spmd()
    answers = {}
    for name, function in (("pallas_update", pallas_update), ("xla_update", xla_update)):
        errors = run(name, function)
        hlo = compiled_with(name, folder)
        answers[name] = errors | {
            "aliased": "input_output_alias={ {1}:" in hlo.splitlines()[0],
            "copies": len(re.findall(rf"f32\[{ROWS // 8},{WIDTH}\]\S* copy\(", hlo)),
        }
    print(json.dumps(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
