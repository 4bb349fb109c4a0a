"""Run by test_ragged_moe_sharded.py in a process of eight CPU devices: prints errors against one device as JSON."""

from __future__ import annotations

import functools
import json

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from custom_ops.implementations import IMPLEMENTATIONS

TOKENS, EXPERTS, HIDDEN, WIDTH, TOP_K = 64, 16, 32, 8, 5
CHIPS, CORES = 4, 2
LAYOUTS = {"dp": ("chip", "core"), "dp_tp": ("chip",), "tp": ()}
"""Mesh axes of the tokens; those of the experts are always both."""
CASES = ("uniform", "skewed", "empty ranks", "one expert")


def arguments(case: str):
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((TOKENS, EXPERTS))
    if case == "skewed":
        logits += np.linspace(6, 0, EXPERTS)
    if case == "one expert":
        logits[:, 3] = 50
    valid = rng.uniform(size=TOKENS) < 0.8
    if case == "empty ranks":
        valid[: TOKENS // CHIPS] = False  # the first rank of every layout has no token, the others have
    gate_up, down = rng.standard_normal((EXPERTS, 2 * WIDTH, HIDDEN)), rng.standard_normal((EXPERTS, HIDDEN, WIDTH))
    arrays = [rng.standard_normal((TOKENS, HIDDEN)), logits, gate_up, down]
    hidden, logits, gate_up, down = (array.astype(np.float32) for array in arrays)
    return hidden, logits, valid, gate_up, down


def sharded(implementation: str, token_axes: tuple[str, ...]):
    """The operation inside shard_map, as the model runs it."""
    rows, experts = PartitionSpec(token_axes or None), PartitionSpec(("chip", "core"))
    function = functools.partial(
        IMPLEMENTATIONS["ragged_moe"][implementation], top_k=TOP_K, token_axes=token_axes, expert_axes=("chip", "core")
    )
    mesh = Mesh(np.array(jax.devices()).reshape(CHIPS, CORES), ("chip", "core"))
    in_specs = (rows, rows, rows, experts, experts)
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=rows, check_vma=False))


def main() -> None:
    single = jax.jit(functools.partial(IMPLEMENTATIONS["ragged_moe"]["reference"], top_k=TOP_K))
    errors = {}
    for implementation in IMPLEMENTATIONS["ragged_moe"]:
        for layout, token_axes in LAYOUTS.items():
            run = sharded(implementation, token_axes)
            for case in CASES:
                args = arguments(case)
                result, expected = np.asarray(run(*args)), np.asarray(single(*args))
                error = float(np.abs(result - expected).max() / np.abs(expected).max())
                errors[f"{implementation} {layout} {case}"] = [error, bool(result[~args[2]].any())]
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
