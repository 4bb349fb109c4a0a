"""A function of torch_xla tensors, traced and compiled once, then run from the compiled graph.

Lazy tracing costs tens of milliseconds for a deep model, every time. A `CompiledGraph` traces its function once and from
then on hands the inputs straight to the executable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch_xla
import torch_xla.core.xla_builder as xla_builder
from torch_xla import _XLAC
from torch_xla.core.xla_model import optimization_barrier_, wait_device_ops
from torch_xla.debug import metrics
from torch_xla.experimental.scan import _scan_impl_pytree  # the public scan insists on autograd formulas

# A type that torch_xla 2.9 lacks in its table, so that it cannot scan over it.
xla_builder._PT_XLA_TYPE_MAP.setdefault(torch.float8_e4m3fn, "f8e4m3fn")


def scan(function: Callable, carry, slices):
    """`function(carry, slice) -> (carry, result)` over the first dimension of all tensors in `slices`, as one loop of the
    graph → the last carry and the results, stacked. Nothing may be boolean.

    `function` is traced once, and what it reads beside its arguments is traced with it: a tensor with data becomes an
    input of the graph, the computation of any other is repeated in every turn.
    """
    return _scan_impl_pytree(function, carry, slices)


def barrier(*tensors: torch.Tensor) -> None:
    """Have everything that is computed of any of these from here on wait for all of them."""
    optimization_barrier_(list(tensors))


def fence(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, across which XLA moves nothing.

    Where a product's columns are then looked at as [heads, dim], XLA:TPU would make that product one of a matrix of three
    dimensions, and for it turn the weights of a layer, in a copy, in every step.
    """
    tensor = tensor * 1  # the barrier works in place
    barrier(tensor)
    return tensor


def compilations() -> int:
    """How many graphs torch_xla has compiled in this process."""
    data = metrics.metric_data("CompileTime")
    return 0 if data is None else data[0]


class CompiledGraph:
    """`function` over XLA tensors as one executable.

    Args:
        function: takes the tensors of `inputs` in order, returns a flat sequence of tensors; each must be computed by
            the function (not an input handed through).
        inputs: example inputs that hold data, with the shapes, dtypes and shardings of every later call.
        donated: positions of inputs that outputs may overwrite. After a call such an input is spent. On a TPU the first
            output of a size takes the first such buffer: put their successors first, in the same order.

    Attributes:
        arguments: of the executable: the position of an input, or a tensor that was closed over.

    Tensors that `function` closes over (the weights) become inputs of the executable, with the values that they have
    when it is traced.
    """

    def __init__(
        self,
        function: Callable[..., Sequence[torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        donated: Sequence[int] = (),
    ):
        torch_xla.sync()  # whatever is pending must not become part of this graph
        # Without this torch_xla ignores donation marks silently.
        _XLAC._xla_set_enable_alias_with_buffer_donor_config(True)
        for position in donated:
            _XLAC._set_buffer_donation(inputs[position], True)
        # By their buffers: the number of a tensor that an earlier graph read may be another's.
        position_of = {handle: position for position, handle in enumerate(_XLAC._get_tensors_handle(list(inputs)))}
        outputs = list(function(*inputs))
        _, tensors = _XLAC._get_tensors_xla_device_data_node(outputs)
        handles = _XLAC._get_tensors_handle(tensors)
        self.arguments = [position_of.get(handle, tensor) for handle, tensor in zip(handles, tensors, strict=True)]
        self._hash = _XLAC._get_graph_hash(outputs)
        _XLAC._xla_warm_up_cache(outputs, [])
        for position in donated:
            _XLAC._set_buffer_donation(inputs[position], False)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        # `_run_cached_graph` waits for its turn on the device without letting go of Python's lock, and the thread that ran the
        # last graph may need that lock to free inputs, before it gives up its turn. This waits for the turn without the lock.
        wait_device_ops()
        return _XLAC._run_cached_graph(
            self._hash, [inputs[entry] if isinstance(entry, int) else entry for entry in self.arguments]
        )
