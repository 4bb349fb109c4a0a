"""Local experts: weights and rows in every format, however the rows are spread over the experts."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import relative_error
from moe_experts_cases import FORMATS, Weights, routing, rows_of, weights

from custom_ops.ragged_moe import reference, xla

LOADS = ("uniform", "skewed", "one expert", "every other expert", "no local expert", "invalid rows")
BFLOAT16, FP8 = 4e-3, 4e-2
EXPERTS, TOP_K = 8, 3


@functools.cache
def jitted(experts):
    return jax.jit(experts, static_argnames="num_experts")


def bound(*arrays) -> float:
    return FP8 if any("float8" in str(array.dtype) for array in arrays) else BFLOAT16


def check(experts, rows, row_scale, expert, weight, weights: Weights, num_experts=EXPERTS, at_most=None) -> np.ndarray:
    arguments = (rows, expert, weight, *weights)
    static = {"num_experts": num_experts, "row_scale": row_scale}
    result, expected = (np.asarray(jitted(function)(*arguments, **static)) for function in (experts, reference.experts))
    assert result.dtype == np.float32 and result.shape == expected.shape
    assert relative_error(result, expected) <= (bound(rows, weights.gate_up) if at_most is None else at_most)
    chosen = (expert < len(weights.gate_up)).any(1)
    assert not result[~chosen].any() and np.abs(result[chosen]).max(axis=1, initial=0).all()
    return result


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("rows_dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("sizes", [(32, 24), (160, 72)], ids=str)
def test_xla_with_weights_and_rows_of_every_format(form, rows_dtype, sizes):
    for rows in (1, 70):
        expert, weight = routing("uniform", rows, TOP_K, EXPERTS, EXPERTS // 2)
        check(xla.experts, *rows_of(rows, sizes[0], rows_dtype), expert, weight, weights(EXPERTS // 2, *sizes, form))


def test_reference_dequantizes_as_checkpoints_do():
    """Scales multiply, a block is 128 rows by 128 columns of the whole weight: written out element by element."""
    hidden, width = 160, 72
    (gate_up, down, gate_up_scale, down_scale) = weights(1, hidden, width, "fp8 by block")
    plain = [
        np.array([[[float(w[0, o, i]) * s[0, o // 128, i // 128] for i in range(w.shape[2])] for o in range(w.shape[1])]])
        for w, s in ((np.asarray(gate_up, np.float32), gate_up_scale), (np.asarray(down, np.float32), down_scale))
    ]
    rows, expert, weight = rows_of(2, hidden, "float32")[0], np.zeros((2, 1), np.int32), np.ones((2, 1), np.float32)
    result = reference.experts(rows, expert, weight, gate_up, down, gate_up_scale, down_scale, num_experts=1)
    gate, up = np.split(np.asarray(rows) @ plain[0][0].T, 2, axis=-1)
    assert relative_error(result, (gate / (1 + np.exp(-gate)) * up) @ plain[1][0].T) <= 1e-5


@pytest.mark.parametrize("experts", [reference.experts, xla.experts])
def test_scales_that_do_not_fit_are_refused(experts):
    expert, weight = routing("uniform", 4, TOP_K, EXPERTS, EXPERTS)
    rows, _ = rows_of(4, 160, "bfloat16")
    fp8 = weights(EXPERTS, 160, 72, "fp8 by channel")

    def run(weights, rows=rows, **static):
        return experts(rows, expert, weight, *weights, num_experts=EXPERTS, **static)

    with pytest.raises(ValueError, match=r"gate_up .*needs.*\[8, 144\] or \[8, 2, 2\]"):
        run(fp8._replace(gate_up_scale=None))
    with pytest.raises(ValueError, match=r"scale of down .*\[8, 72\], not \[8, 160\]"):
        run(fp8._replace(down_scale=jnp.ones((8, 72))))
    with pytest.raises(ValueError, match="both"):
        run(fp8._replace(down_scale=weights(EXPERTS, 160, 72, "fp8 by block").down_scale))
    with pytest.raises(ValueError, match="down .*takes no scale"):
        run(weights(EXPERTS, 160, 72, "bfloat16")._replace(down_scale=fp8.down_scale))
    with pytest.raises(ValueError, match=r"rows .*needs.*\[4\]"):
        run(fp8, rows=rows_of(4, 160, "float8_e4m3fn")[0])
