"""JAX functions as operations in a torch_xla graph."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch_xla

from custom_ops.bridge import JaxOp, LoweringError, current_platform


def on_device(array) -> torch.Tensor:
    return torch.from_numpy(np.asarray(array)).to(torch_xla.device())


def scaled_product(left, right, *, scale):
    return jnp.tanh(left @ right) * scale


def sum_and_index(values):
    return jnp.sum(values, axis=1), jnp.argmax(values, axis=1).astype(jnp.int32)


@pytest.fixture
def values():
    return np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)


def test_result_equals_jit(values):
    op = JaxOp("scaled_product", scaled_product, (("scale", 3.0),))
    (result,) = op(on_device(values), on_device(values.T.copy()))
    expected = jax.jit(scaled_product, static_argnames="scale")(values, values.T, scale=3.0)
    np.testing.assert_allclose(result.cpu(), expected, rtol=1e-6, atol=1e-6)


def test_several_outputs_keep_their_dtypes(values):
    total, index = JaxOp("sum_and_index", sum_and_index)(on_device(values))
    np.testing.assert_allclose(total.cpu(), values.sum(1), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(index.cpu(), values.argmax(1))
    assert total.dtype == torch.float32 and index.dtype == torch.int32


def test_composes_with_torch_operations_in_one_graph(values):
    op = JaxOp("scaled_product", scaled_product, (("scale", 1.0),))
    tensor = on_device(values)
    (result,) = op(tensor * 2, tensor.t() + 1)
    expected = torch.tanh((tensor * 2) @ (tensor.t() + 1)) - 1
    torch.testing.assert_close((result - 1).cpu(), expected.cpu())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, torch.bool], ids=str)
def test_dtypes_survive(dtype):
    tensor = torch.tensor([0, 1, 1, 0]).to(dtype).to(torch_xla.device())
    (result,) = JaxOp("flip", jnp.flip)(tensor)
    assert result.dtype == dtype and torch.equal(result.cpu(), tensor.cpu().flip(0))


def test_unused_arguments_keep_their_places(values):
    (result,) = JaxOp("second", lambda first, second: second + 1)(on_device(values), on_device(values * 2))
    np.testing.assert_allclose(result.cpu(), values * 2 + 1, rtol=1e-6)


def test_shapes_that_do_not_fit_name_the_operation(values):
    op = JaxOp("scaled_product", scaled_product, (("scale", 1.0),))
    with pytest.raises(LoweringError, match=r"scaled_product.*float32\[8, 8\].*float32\[3, 8\]"):
        op(on_device(values), on_device(values[:3].copy()))


def test_dtype_without_a_counterpart_names_the_operation():
    with pytest.raises(LoweringError, match="flip.*complex64"):
        JaxOp("flip", jnp.flip)(torch.zeros(2, dtype=torch.complex64))


def test_lowered_once_for_a_set_of_shapes_and_static_arguments(values):
    traces = []

    def counted(array, *, scale):
        traces.append((array.shape, scale))
        return array * scale

    for _ in range(3):
        JaxOp("counted", counted, (("scale", 2.0),))(on_device(values))
    assert traces == [((8, 8), 2.0)]
    JaxOp("counted", counted, (("scale", 3.0),))(on_device(values))
    JaxOp("counted", counted, (("scale", 2.0),))(on_device(values[:4].copy()))
    JaxOp("counted", counted, (("scale", 2.0),))(on_device(values[:4].copy()))
    assert traces == [((8, 8), 2.0), ((8, 8), 3.0), ((4, 8), 2.0)]


def test_platform():
    assert current_platform() in ("cpu", "tpu")
