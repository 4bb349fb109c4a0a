"""The TPU compiler without a TPU: functions for one core and for a mesh, torch_xla graphs for eight cores."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import pytest
from graphs_for_tpu import compiled_graph
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from custom_ops import tpu_compiler
from custom_ops.tpu_compiler import TpuCompilerMissing, compile_graph, compile_jax, device_mesh, environment_with, topology


def test_a_machine_of_ironwood_has_eight_cores():
    devices = topology("tpu7x:2x2x1").devices
    assert len(devices) == 8 and {device.device_kind for device in devices} == {"TPU7x"}


def test_devices_of_a_mesh_come_chip_by_chip():
    mesh = device_mesh(AbstractMesh((4, 2), ("chip", "core")))
    for chip in mesh.devices:
        assert len({tuple(device.coords) for device in chip}) == 1


def test_the_environment_is_left_as_it_was():
    before = dict(os.environ)
    topology.cache_clear()
    topology()
    assert dict(os.environ) == before


def test_unknown_topology():
    with pytest.raises(ValueError, match="tpu99:2x2"):
        topology("tpu99:2x2")


def test_a_mesh_larger_than_the_topology():
    with pytest.raises(ValueError, match="8 devices.*16"):
        device_mesh(AbstractMesh((8, 2), ("chip", "core")))


def test_libtpu_missing(monkeypatch):
    topology.cache_clear()
    monkeypatch.setattr(tpu_compiler.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TpuCompilerMissing, match=r"pip install 'torchqwen-tpu\[tpu\]'"):
        topology()


def test_one_core_and_a_donated_argument():
    state, row = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 128), (128,)))
    compiled = compile_jax(lambda state, row: (state.at[3].set(row), jnp.sum(row)), state, row, donated=[0])
    assert compiled.memory_analysis().alias_size_in_bytes == 64 * 128 * 4


def test_a_mesh_of_cores():
    mesh = device_mesh(AbstractMesh((4, 2), ("chip", "core")))
    rows = jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(("chip", "core"))))
    compiled = compile_jax(lambda rows: jnp.sum(rows, axis=0), rows)
    assert "all-reduce" in compiled.as_text()
    assert compiled.memory_analysis().argument_size_in_bytes == 64 * 128 * 4 // 8


def test_a_kernel_may_ask_what_tpu_it_is_for():
    from jax.experimental.pallas import tpu as pltpu

    generations = []

    def function(array):
        generations.append(pltpu.get_tpu_info().generation)
        return array + 1

    compile_jax(function, jax.ShapeDtypeStruct((8, 128), jnp.float32))
    assert generations == [7]


def test_options_for_a_new_process_join_those_there(monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--first=1")
    assert environment_with("--second=2")["LIBTPU_INIT_ARGS"] == "--first=1 --second=2"


def test_a_graph_that_reads_more_than_its_inputs():
    import torch
    import torch_xla.core.xla_builder as xla_builder

    left, right = (xla_builder.create_placeholder_tensor((8, 128), torch.float32) for _ in range(2))
    mesh = AbstractMesh((1,), ("core",))
    with pytest.raises(ValueError, match="not among its inputs.*8x128"):
        compile_graph([left * right * 3], [left], [PartitionSpec()], mesh)
    unread = xla_builder.create_placeholder_tensor((8, 128), torch.float32)
    inputs = [left, unread, right]
    executable = compile_graph([left * right * 3], inputs, [PartitionSpec()] * 3, mesh, donated={2: 0})
    assert executable.get_compiled_memory_stats().alias_size_in_bytes == 8 * 128 * 4


@pytest.mark.spmd
def test_a_graph_on_eight_cores_updates_its_state_in_place():
    graph = compiled_graph("toy")
    assert [name.split(".")[0] for name in graph["kernels"]] == ["state_update"] * 2
    assert graph["operations"] == ["toy_update"]
    assert graph["copies"] == [0] and graph["aliased bytes"] == graph["state bytes"]


@pytest.mark.spmd
@pytest.mark.parametrize("name, kernel", [("decode", "gated_delta_net_decode"), ("prefill", "gated_delta_net_chunk")])
def test_gated_delta_net_on_eight_cores_updates_its_states_in_place(name, kernel):
    """The heads of 397B, BF16 states, every core with its own requests."""
    graph = compiled_graph(name)
    assert any(found.startswith(kernel) for found in graph["kernels"])
    assert "gated_delta_net" in graph["operations"]
    assert graph["aliased bytes"] >= graph["state bytes"]
    # The windows are copied to the kernel's layout: where their pool has a multiple of 8 slots, XLA stores it with the
    # slots between taps and channels.
    _, recurrent = graph["copies"]
    assert recurrent == 0
