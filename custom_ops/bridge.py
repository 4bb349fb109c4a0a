"""A JAX function becomes an operation in a torch_xla graph.

torch_xla and JAX meet in HLO: the function is lowered once per set of shapes for the platform at hand, and its
computation is called from the lazy graph like any other operation. Where it communicates, or works on one device's
share of the data, it runs inside `jax.shard_map` over an abstract mesh, so that no JAX device is ever touched: torch_xla
owns them all.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import jax
import torch
import torch_xla.core.xla_builder as xla_builder
import torch_xla.runtime as xr
from jax.sharding import AbstractMesh, PartitionSpec
from torch._subclasses.fake_tensor import FakeTensor
from torch_xla import _XLAC

# JAX only traces and lowers here. Kept on its CPU backend it cannot take a TPU that torch_xla is about to open.
jax.config.update("jax_platforms", "cpu")
# torch_xla 2.9 partitions with GSPMD; a module with Shardy annotations would be refused.
jax.config.update("jax_use_shardy_partitioner", False)

# No int64: JAX would narrow it to int32 without a word, and the graph would then not fit the function.
_JAX_DTYPES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.int32: "int32",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.bool: "bool",
}
_TORCH_DTYPES = {name: dtype for dtype, name in _JAX_DTYPES.items()}

PLATFORMS = ("cpu", "tpu")
_lowering_platform: ContextVar[str | None] = ContextVar("lowering_platform", default=None)

Shapes = tuple[tuple[tuple[int, ...], str], ...]
"""(shape, JAX dtype) of each argument."""


class LoweringError(RuntimeError):
    """A JAX function could not be traced or lowered for the shapes and the platform that it was called with."""


@dataclass(frozen=True)
class JaxOp:
    """A JAX function as a torch_xla operation.

    Args:
        name: how the operation is called in errors and in the metadata of the compiled HLO (`op_name`).
        function: arrays in, one array or a tuple of arrays out; with a mesh it sees one device's shards.
        static: keyword arguments that are part of the program (hashable), as (name, value) pairs.
        mesh: the devices; None runs the function on whole arrays.
        in_specs, out_specs: how inputs and outputs are split over `mesh`, as for `jax.shard_map`.
        donated: positions of states that the function updates in place. A tensor there that holds data is spent once
            the graph has run: its buffer becomes an output's, and torch_xla refuses to read it again. (A tensor computed
            in the same graph needs no such promise: XLA reuses its buffer as it is.)

    Called with torch_xla tensors, placeholders among them, it joins the lazy graph; called with fake or meta tensors it
    only works out the shapes. Returns a tuple of tensors.

    Raises:
        LoweringError: on calling; it names the operation, the arguments' shapes and the platform.
    """

    name: str
    function: Callable
    static: tuple[tuple[str, Hashable], ...] = ()
    mesh: AbstractMesh | None = None
    in_specs: tuple[PartitionSpec, ...] = ()
    out_specs: tuple[PartitionSpec, ...] | PartitionSpec = ()
    donated: tuple[int, ...] = ()

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        shapes = tuple((tuple(map(int, tensor.shape)), _jax_dtype(self.name, tensor.dtype)) for tensor in tensors)
        for tensor in tensors:
            if isinstance(tensor, FakeTensor) or tensor.is_meta:
                return _empty_like_outputs(_output_shapes(self, current_platform(), shapes), tensor)
        outputs = _lower(self, current_platform(), shapes)(tensors)
        for position in self.donated:
            _donate(tensors[position])
        return tuple(outputs) if isinstance(outputs, (list, tuple)) else (outputs,)


def current_platform() -> str:
    """The platform that operations are lowered for, by JAX's name for it ('cpu' or 'tpu'): torch_xla's own, or the one
    of `lowering_for`."""
    return _lowering_platform.get() or xr.device_type().lower()


@contextlib.contextmanager
def lowering_for(platform: str) -> Iterator[None]:
    """Operations called inside are lowered for `platform` whatever torch_xla runs on.

    For graphs that are compiled ahead of time: traced on placeholder tensors on a machine without a TPU, compiled by
    `custom_ops.tpu_compiler`. A graph that holds such an operation cannot run here.
    """
    if platform not in PLATFORMS:
        raise ValueError(f"no platform '{platform}'; there are: {', '.join(PLATFORMS)}")
    token = _lowering_platform.set(platform)
    try:
        yield
    finally:
        _lowering_platform.reset(token)


def _jax_dtype(name: str, dtype: torch.dtype) -> str:
    try:
        return _JAX_DTYPES[dtype]
    except KeyError:
        raise LoweringError(f"{name}: no JAX dtype for {dtype}") from None


def _donate(tensor: torch.Tensor) -> None:
    # Without this torch_xla ignores donation marks silently.
    _XLAC._xla_set_enable_alias_with_buffer_donor_config(True)
    _XLAC._set_buffer_donation(tensor, True)


def _empty_like_outputs(shapes: Shapes, example: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors without data of these shapes: fake ones of the mode and device of `example`, or meta tensors."""
    with example.fake_mode if isinstance(example, FakeTensor) else contextlib.nullcontext():
        return tuple(torch.empty(shape, dtype=_TORCH_DTYPES[dtype], device=example.device) for shape, dtype in shapes)


@functools.cache
def _output_shapes(op: JaxOp, platform: str, shapes: Shapes) -> Shapes:
    with _errors_named(op, platform, shapes):
        outputs = jax.eval_shape(_traceable(op), *_arguments(shapes))
    outputs = outputs if isinstance(outputs, (list, tuple)) else (outputs,)
    return tuple((output.shape, str(output.dtype)) for output in outputs)


@functools.cache
def _lower(op: JaxOp, platform: str, shapes: Shapes) -> Callable:
    with _errors_named(op, platform, shapes):
        traced = jax.jit(_traceable(op), keep_unused=True).trace(*_arguments(shapes))
        lowered = traced.lower(lowering_platforms=(platform,))
        module = lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()
    return xla_builder.xla_computation_as_func(xla_builder.computation_from_module_proto(op.name, module), op.name)


def _traceable(op: JaxOp) -> Callable:
    """The function over whole arrays, under the operation's name."""
    function = functools.partial(op.function, **dict(op.static))
    if op.mesh is not None:
        function = jax.shard_map(function, mesh=op.mesh, in_specs=op.in_specs, out_specs=op.out_specs, check_vma=False)

    def named(*arrays):
        with jax.named_scope(op.name):
            return function(*arrays)

    named.__name__ = op.name
    return named


def _arguments(shapes: Shapes) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]


@contextlib.contextmanager
def _errors_named(op: JaxOp, platform: str, shapes: Shapes) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        listed = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in shapes)
        raise LoweringError(f"{op.name} could not be lowered for {platform} with arguments ({listed}): {error}") from error
