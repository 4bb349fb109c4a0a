"""A small kernel to schedule, for test_schedule.py: a matrix product by tiles, and a case of it that cannot compile."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from custom_ops.schedule.cases import Case, Program

ROWS, DEPTH, COLUMNS, TILE = 256, 256, 4096, 256


def product(left, right, *, tile: int):
    def kernel(left_ref, right_ref, out_ref):
        out_ref[...] = jnp.dot(left_ref[...], right_ref[...], preferred_element_type=jnp.float32).astype(out_ref.dtype)

    return pl.pallas_call(
        kernel,
        name="toy_product",
        grid=(COLUMNS // tile,),
        in_specs=[pl.BlockSpec((ROWS, DEPTH), lambda column: (0, 0)), pl.BlockSpec((DEPTH, tile), lambda column: (0, column))],
        out_specs=pl.BlockSpec((ROWS, tile), lambda column: (0, column)),
        out_shape=jax.ShapeDtypeStruct((ROWS, COLUMNS), left.dtype),
    )(left, right)


def build(tile: int) -> Program:
    arguments = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((ROWS, DEPTH), (DEPTH, COLUMNS))]
    return Program(functools.partial(product, tile=tile), tuple(arguments))


BYTES = 2 * (ROWS * DEPTH + DEPTH * COLUMNS + ROWS * COLUMNS)
FLOPS = 2 * ROWS * DEPTH * COLUMNS
CASES = [
    Case("product", "pallas_tpu", functools.partial(build, TILE), "toy_product", BYTES, FLOPS),
    Case("odd tile", "pallas_tpu", functools.partial(build, 100), "toy_product", BYTES, FLOPS),
    Case("missing", "elsewhere", functools.partial(build, TILE), "toy_product", BYTES, FLOPS, requires="no_such_package"),
]
