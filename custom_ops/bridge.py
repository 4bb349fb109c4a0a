"""A JAX function becomes an operation in a torch_xla graph.

torch_xla and JAX meet in HLO: the function is lowered once per set of shapes for the platform at hand, and its
computation is called from the lazy graph like any other operation. Where it communicates, or works on one device's
share of the data, it runs inside `jax.shard_map` over an abstract mesh, so that no JAX device is ever touched: torch_xla
owns them all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import jax
import torch
import torch_xla.core.xla_builder as xla_builder
import torch_xla.runtime as xr
from jax.sharding import AbstractMesh, PartitionSpec

# JAX only traces and lowers here. Kept on its CPU backend it cannot take a TPU that torch_xla is about to open.
jax.config.update("jax_platforms", "cpu")
# torch_xla 2.9 partitions with GSPMD; a module with Shardy annotations would be refused.
jax.config.update("jax_use_shardy_partitioner", False)

_JAX_DTYPES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.bool: "bool",
}


class LoweringError(RuntimeError):
    """A JAX function could not be lowered for the shapes and the platform that it was called with."""


@dataclass(frozen=True)
class JaxOp:
    """A JAX function as a torch_xla operation.

    Args:
        name: how the operation is called in the HLO and in errors.
        function: arrays in, one array or a tuple of arrays out; with a mesh it sees one device's shards.
        static: keyword arguments that are part of the program (hashable), as (name, value) pairs.
        mesh: the devices; None runs the function on whole arrays.
        in_specs, out_specs: how inputs and outputs are split over `mesh`, as for `jax.shard_map`.

    Calling it with torch_xla tensors adds it to the lazy graph and returns a tuple of tensors.
    """

    name: str
    function: Callable
    static: tuple[tuple[str, Hashable], ...] = ()
    mesh: AbstractMesh | None = None
    in_specs: tuple[PartitionSpec, ...] = ()
    out_specs: tuple[PartitionSpec, ...] = ()

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        shapes = tuple((tuple(tensor.shape), _jax_dtype(self.name, tensor.dtype)) for tensor in tensors)
        outputs = _lower(self, current_platform(), shapes)(tensors)
        return tuple(outputs) if isinstance(outputs, (list, tuple)) else (outputs,)


def current_platform() -> str:
    """The platform that torch_xla runs on, by JAX's name for it: 'cpu' or 'tpu'."""
    return xr.device_type().lower()


def _jax_dtype(name: str, dtype: torch.dtype) -> str:
    try:
        return _JAX_DTYPES[dtype]
    except KeyError:
        raise LoweringError(f"{name}: no JAX dtype for {dtype}") from None


@functools.cache
def _lower(op: JaxOp, platform: str, shapes: tuple[tuple[tuple[int, ...], str], ...]) -> Callable:
    function = functools.partial(op.function, **dict(op.static))
    if op.mesh is not None:
        function = jax.shard_map(function, mesh=op.mesh, in_specs=op.in_specs, out_specs=op.out_specs, check_vma=False)

    def named(*arrays):
        with jax.named_scope(op.name):
            return function(*arrays)

    named.__name__ = op.name
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    try:
        lowered = jax.jit(named, keep_unused=True).trace(*arguments).lower(lowering_platforms=(platform,))
        module = lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()
    except Exception as error:
        listed = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in shapes)
        raise LoweringError(f"{op.name} could not be lowered for {platform} with arguments ({listed}): {error}") from error
    return xla_builder.xla_computation_as_func(xla_builder.computation_from_module_proto(op.name, module), op.name)
