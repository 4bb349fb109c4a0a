"""JAX functions as operations in a torch_xla graph."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch_xla
import torch_xla.core.xla_builder as xla_builder
from jax.experimental import pallas as pl
from jax.sharding import AbstractMesh, PartitionSpec
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch_xla import _XLAC
from torch_xla.debug import metrics
from torch_xla.experimental.scan import _scan_impl_pytree as scan

from custom_ops.bridge import JaxOp, LoweringError, current_platform, lowering_for


def on_device(array) -> torch.Tensor:
    return torch.from_numpy(np.asarray(array)).to(torch_xla.device())


def scaled_product(left, right, *, scale):
    return jnp.tanh(left @ right) * scale


def sum_and_index(values):
    return jnp.sum(values, axis=1), jnp.argmax(values, axis=1).astype(jnp.int32)


def put_row(state, index, row):
    """state with `row` at `index`, which XLA does in place where it may; and the sum of what was there."""
    return state.at[index].set(row), jnp.sum(state[index])


def halved(interpret: bool):
    """A Pallas kernel that halves its argument in place."""

    def kernel(in_ref, out_ref):
        out_ref[...] = in_ref[...] * 0.5

    def function(array):
        shape = jax.ShapeDtypeStruct(array.shape, array.dtype)
        return pl.pallas_call(
            kernel, name="halved", out_shape=shape, input_output_aliases={0: 0}, interpret=interpret
        )(array)

    return function


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


def test_int64_is_refused_where_jax_would_narrow_it():
    with pytest.raises(LoweringError, match="flip.*int64"):
        JaxOp("flip", jnp.flip)(torch.arange(4).to(torch_xla.device()))


def test_platform():
    assert current_platform() in ("cpu", "tpu")


def test_platform_to_lower_for():
    outside = current_platform()
    with pytest.raises(KeyError), lowering_for("tpu"):
        assert current_platform() == "tpu"
        with lowering_for("cpu"):
            assert current_platform() == "cpu"
        assert current_platform() == "tpu"
        raise KeyError
    assert current_platform() == outside
    with pytest.raises(ValueError, match="no platform 'gpu'"), lowering_for("gpu"):
        pass


@pytest.mark.parametrize("kind", ["meta", "fake", "fake on the device"])
def test_shapes_without_data(kind, values):
    """The shape rule traces and does not lower: this kernel could not be lowered for a CPU."""

    def function(array):
        return halved(interpret=False)(array).sum(1), jnp.argmax(array, axis=1).astype(jnp.int32)

    mode = FakeTensorMode()
    tensor = {
        "meta": lambda: torch.empty(8, 8, device="meta"),
        "fake": lambda: mode.from_tensor(torch.empty(8, 8)),
        "fake on the device": lambda: mode.from_tensor(on_device(values)),
    }[kind]()
    total, index = JaxOp("function", function)(tensor)
    assert total.shape == index.shape == (8,)
    assert total.dtype == torch.float32 and index.dtype == torch.int32
    for result in (total, index):
        assert result.device == tensor.device and result.is_meta == tensor.is_meta
        assert isinstance(result, FakeTensor) == isinstance(tensor, FakeTensor)


def test_shapes_of_a_sharded_operation_are_those_of_whole_arrays():
    rows = PartitionSpec(("chip", "core"))
    op = JaxOp("double", lambda share: share[:1] * 2, (), AbstractMesh((4, 2), ("chip", "core")), (rows,), rows)
    (result,) = op(torch.empty(32, 3, dtype=torch.bfloat16, device="meta"))
    assert result.shape == (8, 3) and result.dtype == torch.bfloat16


def test_shapes_that_do_not_fit_are_found_without_data():
    op = JaxOp("scaled_product", scaled_product, (("scale", 1.0),))
    with pytest.raises(LoweringError, match=r"scaled_product.*float32\[8, 8\].*float32\[3, 8\]"):
        op(torch.empty(8, 8, device="meta"), torch.empty(3, 8, device="meta"))


def test_placeholders_build_a_graph_without_data():
    tensor = xla_builder.create_placeholder_tensor((8, 128), torch.float32)
    (result,) = JaxOp("halved", halved(interpret=True))(tensor + 1)
    assert result.shape == (8, 128) and result.dtype == torch.float32
    hlo = _XLAC._get_xla_tensors_hlo([result])
    assert "custom-call" not in hlo and "jit(halved)/halved" in hlo


def test_a_kernel_lowered_for_a_tpu_from_a_cpu():
    tensor = xla_builder.create_placeholder_tensor((8, 128), torch.float32)
    op = JaxOp("halved", halved(interpret=False))
    with lowering_for("tpu"):
        hlo = _XLAC._get_xla_tensors_hlo(list(op(tensor)))
    assert 'custom_call_target="tpu_custom_call"' in hlo and "output_to_operand_aliasing" in hlo
    with lowering_for("cpu"), pytest.raises(LoweringError, match=r"halved .* cpu .*float32\[8, 128\]"):
        op(tensor)


def test_a_donated_state_is_updated_in_place_and_spent(values):
    op = JaxOp("put_row", put_row, donated=(0,))
    state = on_device(np.ones((64, 8), np.float32))
    row = on_device(values[0])
    index = on_device(np.array(3, np.int32))
    torch_xla.sync(wait=True)  # a buffer has an address once it is there
    buffer = _XLAC._unsafe_buffer_pointer(state)
    new, total = op(state, index, row)
    torch_xla.sync(wait=True)
    assert _XLAC._unsafe_buffer_pointer(new) == buffer
    np.testing.assert_allclose(new.cpu()[3], values[0])
    assert total.item() == 8 and new.cpu()[4].sum() == 8
    with pytest.raises(RuntimeError):
        state.cpu()


def test_a_state_computed_in_the_graph_may_be_declared_donated(values):
    op = JaxOp("put_row", put_row, donated=(0,))
    state, row, index = on_device(values), on_device(values[0]), on_device(np.array(3, np.int32))
    new, _ = op(state * 2, index, row)
    torch_xla.sync()
    np.testing.assert_allclose(new.cpu()[3], values[0])
    np.testing.assert_allclose(state.cpu(), values)


def test_undeclared_arguments_stay(values):
    op = JaxOp("put_row", put_row)
    state, row, index = on_device(values), on_device(values[0]), on_device(np.array(3, np.int32))
    before = metrics.metric_data("InputOutputAliasCount")
    op(state, index, row)
    torch_xla.sync()
    assert metrics.metric_data("InputOutputAliasCount") == before
    np.testing.assert_allclose(state.cpu(), values)


@pytest.mark.parametrize("function", [halved(interpret=True), lambda array: array * 0.5], ids=["pallas", "xla"])
def test_inside_a_scan(function, values):
    op = JaxOp("halved", function, donated=(0,))

    def step(state, number):
        (state,) = op(state + number)
        return state, state.sum()

    numbers = np.arange(4, dtype=np.float32)
    state, sums = scan(step, on_device(values), on_device(numbers))
    expected, totals = values, []
    for number in numbers:
        expected = (expected + number) * 0.5
        totals.append(expected.sum())
    np.testing.assert_allclose(state.cpu(), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(sums.cpu(), totals, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def on_mesh(tmp_path_factory):
    """What a process of eight devices says of a Pallas kernel and of an XLA function: see bridged_on_mesh.py."""
    folder = tmp_path_factory.mktemp("dump")
    settings = {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": "8",
        "XLA_FLAGS": f"--xla_dump_to={folder} --xla_dump_hlo_as_text",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(Path(__file__).with_name("bridged_on_mesh.py")), str(folder)]
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.spmd
@pytest.mark.parametrize("name", ["pallas_update", "xla_update"])
def test_on_eight_devices(on_mesh, name):
    assert on_mesh[name]["alone"] <= 1e-4 and on_mesh[name]["in a scan"] <= 1e-4


@pytest.mark.spmd
@pytest.mark.parametrize("name", ["pallas_update", "xla_update"])
def test_a_state_split_over_eight_devices_is_updated_in_place(on_mesh, name):
    assert on_mesh[name]["aliased"] and on_mesh[name]["copies"] == 0
