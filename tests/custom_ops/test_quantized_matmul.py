"""Tokens quantised as they come, times an FP8 matrix."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from custom_ops.quantized_matmul import quantized_matmul
from custom_ops.tpu_compiler import compile_jax

FP8 = jnp.float8_e4m3fn


def arguments(rows: int, inputs: int, outputs: int, dtype=jnp.float32):
    generator = np.random.default_rng(rows)
    x = generator.normal(size=(rows, inputs)) * np.logspace(-3, 3, rows)[:, None]
    weight = generator.normal(size=(inputs, outputs)) * 100
    scale = jnp.asarray(generator.uniform(0.001, 0.1, outputs), jnp.float32)
    return jnp.asarray(x, dtype), jnp.asarray(weight).astype(FP8), scale


@pytest.mark.parametrize("shape", [(1, 16, 8), (5, 130, 33), (64, 256, 7)], ids=str)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_error_is_that_of_rounding_the_tokens(shape, dtype):
    """Every number of a row is off by at most 2⁻⁴ of itself or the least step of FP8 at the row's scale."""
    x, weight, scale = arguments(*shape, dtype)
    result = quantized_matmul(x, weight, scale)
    assert result.dtype == dtype and result.shape == (shape[0], shape[2])
    numbers, widened = (np.asarray(array.astype(jnp.float32), np.float64) for array in (x, weight))
    expected = numbers @ widened * np.asarray(scale, np.float64)
    step = np.abs(numbers).max(axis=1, keepdims=True) / 448 * 2.0**-10
    bound = (np.maximum(np.abs(numbers) * 2.0**-4, step) @ np.abs(widened)) * np.asarray(scale, np.float64)
    slack = 0 if dtype == jnp.float32 else 2.0**-8 * np.abs(expected)
    assert (np.abs(np.asarray(result, np.float64) - expected) <= bound * (1 + 1e-5) + slack).all()


def test_a_row_of_zeros():
    _, weight, scale = arguments(3, 16, 8)
    assert not np.asarray(quantized_matmul(jnp.zeros((3, 16)), weight, scale)).any()


def test_a_row_does_not_depend_on_the_others():
    x, weight, scale = arguments(9, 64, 16)
    np.testing.assert_array_equal(quantized_matmul(x, weight, scale)[4:5], quantized_matmul(x[4:5], weight, scale))


def test_it_compiles_for_a_tpu_which_holds_the_weight_in_fp8():
    shapes = ((64, 2048), jnp.bfloat16), ((2048, 1024), FP8), ((1024,), jnp.float32)
    text = compile_jax(quantized_matmul, *(jax.ShapeDtypeStruct(*shape) for shape in shapes)).as_text()
    assert "f8e4m3fn[2048,1024]" in text.splitlines()[0]
