"""The TPU compiler without a TPU: libtpu compiles for a named topology on any x86-64 Linux machine.

`compile_jax` takes a JAX function, `compile_graph` a torch_xla graph that was traced on placeholder tensors inside
`custom_ops.bridge.lowering_for("tpu")`. What they return cannot run here; it tells memory, schedule and HLO.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax._src.interpreters import mlir as jax_mlir
from jax._src.lib import xla_client
from jax._src.lib.mlir import ir
from jax.experimental import topologies
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from custom_ops.tpu_options import GRAPH_OPTIONS

if TYPE_CHECKING:
    import torch

IRONWOOD_HOST = "tpu7x:2x2x1"
"""One machine of TPU7x: four chips, eight cores. Devices come chip by chip, two cores each."""

# libtpu reads these once, when it is loaded: they keep it from asking the cloud what machine this is, from insisting on being
# the only process that has it open, and from leaving logs behind.
_SETTINGS = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "tpu7x-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
    "TPU_MIN_LOG_LEVEL": "3",
}
_ONE_CHIP = {"chips_per_host_bounds": (1, 1, 1)}


class TpuCompilerMissing(RuntimeError):
    """libtpu, which holds the TPU compiler, is not installed."""


@functools.cache
def topology(name: str = IRONWOOD_HOST) -> topologies.TopologyDescription:
    """Devices to compile for, e.g. 'tpu7x:2x2x1' (chips along each axis, in multiples of a host's 2x2x1, or a part of one),
    'v6e:2x4'.

    Raises:
        TpuCompilerMissing: libtpu is not installed.
        ValueError: the compiler knows no such topology.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise TpuCompilerMissing("compiling for a TPU needs libtpu: pip install 'torchqwen-tpu[tpu]'")
    with _environment(_SETTINGS):
        try:
            return topologies.get_topology_desc(platform="tpu", topology_name=name, **(_ONE_CHIP if _in_a_host(name) else {}))
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(f"the TPU compiler has no topology '{name}': {error}") from error


def _in_a_host(name: str) -> bool:
    """Whether a topology is a part of a host of 2x2x1 chips, or all of it."""
    return all(length in ("1", "2") for length in name.partition(":")[2].split("x"))


def device_mesh(mesh: AbstractMesh, topology_name: str = IRONWOOD_HOST) -> Mesh:
    """The devices of a topology in the shape of `mesh`: its last axis runs over the cores of a chip.

    Raises:
        ValueError: the topology has fewer devices.
    """
    devices = topology(topology_name).devices
    if mesh.size > len(devices):
        raise ValueError(f"{topology_name} has {len(devices)} devices, the mesh {dict(mesh.shape)} needs {mesh.size}")
    return Mesh(np.array(devices[: mesh.size]).reshape(mesh.axis_sizes), mesh.axis_names)


def compile_jax(
    function: Callable,
    *arguments: jax.ShapeDtypeStruct,
    donated: Sequence[int] = (),
    topology_name: str = IRONWOOD_HOST,
) -> jax.stages.Compiled:
    """A function compiled for one core, or for the mesh of its arguments' shardings (see `device_mesh`).

    Args:
        donated: positions of arguments that outputs may overwrite.

    Raises:
        jax.errors.JaxRuntimeError: the TPU compiler refuses the program.
    """
    core = NamedSharding(device_mesh(AbstractMesh((1,), ("core",)), topology_name), PartitionSpec())
    placed = [
        argument if argument.sharding else jax.ShapeDtypeStruct(argument.shape, argument.dtype, sharding=core)
        for argument in arguments
    ]
    # Kernels that ask what TPU they are for (`pltpu.get_tpu_info`) are told by the default device.
    with jax.default_device(topology(topology_name).devices[0]):
        return jax.jit(function, donate_argnums=tuple(donated), keep_unused=True).lower(*placed).compile()


def compile_graph(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    specs: Sequence[PartitionSpec],
    mesh: AbstractMesh,
    *,
    donated: Mapping[int, int | None] = MappingProxyType({}),
    topology_name: str = IRONWOOD_HOST,
) -> xla_client.LoadedExecutable:
    """A torch_xla graph compiled for a mesh of TPU cores.

    Args:
        outputs: what the graph computes.
        inputs: the placeholder tensors that it was traced on; all that it reads must be among them but scalars, which
            PyTorch makes of the numbers in a function.
        specs: how each input is split over `mesh`.
        donated: position of an input → that of the output which takes its buffer, or None for what torch_xla does at run
            time. (Told only that a buffer is free, XLA gives it to the first output of that size, and copies a state whose
            buffer another output has taken.)

    Raises:
        ValueError: the graph reads a tensor that is not an input.
        jax.errors.JaxRuntimeError: the TPU compiler refuses the graph.
    """
    from torch_xla import _XLAC

    devices = device_mesh(mesh, topology_name).devices.ravel()
    context = _XLAC.lowering.LoweringContext("graph")
    context.build(list(outputs))
    attributes: dict[int, dict[str, ir.Attribute]] = {}
    with jax_mlir.make_ir_context():
        for position, (tensor, spec) in enumerate(zip(inputs, specs, strict=True)):
            sharding = NamedSharding(mesh, spec)._to_xla_hlo_sharding(tensor.dim())
            described = {"mhlo.sharding": ir.StringAttr.get(str(sharding))}
            if donated.get(position, -1) is None:
                described["jax.buffer_donor"] = ir.BoolAttr.get(True)
            elif position in donated:
                described["tf.aliasing_output"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), donated[position])
            attributes[context.tensor_parameter_id(tensor)] = described
        attributes.pop(-1, None)  # inputs that the graph does not read
        computation = xla_client.XlaComputation(context.hlo())
        module = ir.Module.parse(xla_client._xla.mlir.xla_computation_to_mlir_module(computation))
        main = next(function for function in module.body.operations if str(function.name).strip('"') == "main")
        replicated = {"mhlo.sharding": ir.StringAttr.get("{replicated}")}
        for number, kind in enumerate(main.type.inputs):
            if number not in attributes and ir.RankedTensorType(kind).rank:
                raise ValueError(f"the graph reads a tensor that is not among its inputs: {kind}")
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(
            [ir.DictAttr.get(attributes.get(number, replicated)) for number in range(len(main.type.inputs))]
        )
        return devices[0].client.compile(module, xla_client.DeviceList(tuple(devices)), _partitioned(len(devices)))


def environment_with(*options: str) -> dict[str, str]:
    """Environment for a new process whose compiler gets these options ('--name=value').

    libtpu takes them when it is loaded and never again, so they cannot be set in a running process.
    """
    return {**os.environ, "LIBTPU_INIT_ARGS": " ".join([os.environ.get("LIBTPU_INIT_ARGS", ""), *options]).strip()}


def _partitioned(devices: int) -> xla_client.CompileOptions:
    options = xla_client.CompileOptions()
    build = options.executable_build_options
    options.num_partitions = build.num_partitions = devices
    options.num_replicas = build.num_replicas = 1
    options.env_option_overrides = list(GRAPH_OPTIONS.items())
    build.use_spmd_partitioning, build.use_shardy_partitioner = devices > 1, False
    build.allow_spmd_sharding_propagation_to_output = [True]
    options.device_assignment = xla_client.DeviceAssignment.create(np.arange(devices).reshape(1, devices))
    return options


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
