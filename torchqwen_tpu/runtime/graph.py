"""A function of torch_xla tensors, traced and compiled once, then run from the compiled graph.

Lazy tracing costs tens of milliseconds for a deep model, every time. A `CompiledGraph` traces its function once and from
then on hands the inputs straight to the executable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch_xla import _XLAC
from torch_xla.debug import metrics


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
        donated: positions of inputs that outputs may overwrite. After a call such an input is spent.

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
        position_of = {_XLAC._xla_get_tensor_id(tensor): position for position, tensor in enumerate(inputs)}
        outputs = list(function(*inputs))
        ids, tensors = _XLAC._get_tensors_xla_device_data_node(outputs)
        self._order = [position_of.get(tensor_id, tensor) for tensor_id, tensor in zip(ids, tensors, strict=True)]
        self._hash = _XLAC._get_graph_hash(outputs)
        _XLAC._xla_warm_up_cache(outputs, [])
        for position in donated:
            _XLAC._set_buffer_donation(inputs[position], False)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        # torch_xla refuses an input that an earlier graph has been asked for and that its thread has not launched yet.
        xm.wait_device_ops()
        return _XLAC._run_cached_graph(
            self._hash, [inputs[entry] if isinstance(entry, int) else entry for entry in self._order]
        )
