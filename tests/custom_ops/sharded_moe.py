"""Run by test_ragged_moe_sharded.py in a process of eight CPU devices: prints errors against one device as JSON."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
from comparison import relative_error
from jax.sharding import Mesh, PartitionSpec

from custom_ops.implementations import IMPLEMENTATIONS

TOKENS, EXPERTS, HIDDEN, WIDTH, TOP_K = 64, 16, 32, 8, 5
CHIPS, CORES = 4, 2
LAYOUTS = {"dp": ("chip", "core"), "dp_tp": ("chip",), "tp": ()}
"""Mesh axes of the tokens; those of the experts are always both."""
CASES = ("uniform", "skewed", "empty ranks", "one expert")
WIRES = {
    "bfloat16": None, "float8_e4m3fn": "channels", "float8_e4m3fn in blocks": "blocks", "int8": "channels",
    "int8 in blocks": "blocks", "int8 and BF16": None,
}  # fmt: skip
"""Name of the wire first, and how FP8 weights are scaled; None for weights in BF16."""


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


def with_weights(args, scaling: str | None):
    """The arguments with weights in BF16, or in FP8 with their scales."""
    hidden, logits, valid, *weights = args
    if scaling is None:
        return hidden, logits, valid, *(jnp.asarray(weight, jnp.bfloat16) for weight in weights)
    axes = (2,) if scaling == "channels" else (1, 2)  # no weight here is larger than a block
    scales = [np.abs(weight).max(axis=axes, keepdims=scaling == "blocks") / 448 for weight in weights]
    whole = [scale if scaling == "blocks" else scale[..., None] for scale in scales]
    quantized = [jnp.asarray(weight / scale, jnp.float8_e4m3fn) for weight, scale in zip(weights, whole, strict=True)]
    return hidden, logits, valid, *quantized, *scales


def sharded(implementation: str, token_axes: tuple[str, ...], arguments: int = 5, **static):
    """The operation inside shard_map, as the model runs it."""
    rows, experts = PartitionSpec(token_axes or None), PartitionSpec(("chip", "core"))
    static |= {"top_k": TOP_K, "token_axes": token_axes, "expert_axes": ("chip", "core")}
    function = functools.partial(IMPLEMENTATIONS["ragged_moe"][implementation], **static)
    mesh = Mesh(np.array(jax.devices()).reshape(CHIPS, CORES), ("chip", "core"))
    in_specs = (rows,) * 3 + (experts,) * (arguments - 3)
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=rows, check_vma=False))


def on_a_wire(name: str, layout: str) -> dict[str, float]:
    """By case: the error against rows that went nowhere, all else equal."""
    wire, inputs = name.split()[0], {case: with_weights(arguments(case), WIRES[name]) for case in CASES}
    run = sharded("xla", LAYOUTS[layout], len(inputs["uniform"]), wire=wire)
    return {case: relative_error(run(*args), single()(*args)) for case, args in inputs.items()}


@functools.cache
def single():
    """The reference on one device."""
    return jax.jit(functools.partial(IMPLEMENTATIONS["ragged_moe"]["reference"], top_k=TOP_K))


def in_micro_batches(layout: str) -> float:
    """The error of two micro-batches against one."""
    args = arguments("skewed")
    return relative_error(sharded("xla", LAYOUTS[layout], micro_batches=2)(*args), single()(*args))


def beside_a_token_that_is_no_number(layout: str) -> tuple[bool, bool]:
    """Whether such tokens get NaN throughout, and whether all others get what they get without them."""
    args = arguments("uniform")
    rows = np.flatnonzero(args[2])[:3]
    hidden, logits = args[0].copy(), args[1].copy()
    hidden[rows[0], 5], logits[rows[1], 7], logits[rows[2], 0] = np.nan, np.nan, np.inf
    run = sharded("xla", LAYOUTS[layout])
    before, after = np.asarray(run(*args)), np.asarray(run(hidden, logits, *args[2:]))
    others = np.setdiff1d(np.arange(TOKENS), rows)
    return bool(np.isnan(after[rows]).all()), bool(np.allclose(before[others], after[others], rtol=1e-5, atol=1e-6))


def main() -> None:
    errors = {}
    for implementation in ("reference", "xla"):
        for layout, token_axes in LAYOUTS.items():
            run = sharded(implementation, token_axes)
            for case in CASES:
                args = arguments(case)
                result, expected = np.asarray(run(*args)), np.asarray(single()(*args))
                error = float(np.abs(result - expected).max() / np.abs(expected).max())
                errors[f"{implementation} {layout} {case}"] = [error, bool(result[~args[2]].any())]
    answers = {
        "errors": errors,
        "wires": {f"{name} {layout}": on_a_wire(name, layout) for name in WIRES for layout in LAYOUTS},
        "micro-batches": {layout: in_micro_batches(layout) for layout in LAYOUTS},
        "not finite": {layout: beside_a_token_that_is_no_number(layout) for layout in LAYOUTS},
    }
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
