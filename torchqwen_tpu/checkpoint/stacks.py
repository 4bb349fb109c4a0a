"""One layer of a stack of parameters on the devices: written as it is loaded, read as it is saved.

Neither holds a second stack: a written stack takes over the buffer of the one before.
"""

from __future__ import annotations

import jax.numpy as jnp
import torch
import torch_xla
from jax import lax

from custom_ops.bridge import JaxOp
from torchqwen_tpu.parallel.mesh import DeviceMesh
from torchqwen_tpu.parallel.rules import parameter_axes


class Stacks:
    """Stacks of parameters on the devices of a mesh, split by the table of rules."""

    def __init__(self, mesh: DeviceMesh):
        self._mesh = mesh

    def write(self, name: str, stack: torch.Tensor, value: torch.Tensor, index: int) -> torch.Tensor:
        """The stack `name` [layers, ...] with `value` of the host as its layer `index`.

        Args:
            stack: spent afterwards; one on the meta device has no layers yet.
        """
        axes = parameter_axes(name, stack.dim())
        value = self._mesh.give(value, axes[1:])
        specs = self._mesh.spec(axes), self._mesh.spec(axes[1:]), self._mesh.spec((None,))
        if stack.is_meta:
            op = JaxOp("first_of_stack", _first, (("layers", len(stack)),), self._mesh.abstract, specs[1:], specs[0])
            (result,) = op(value, _on_device(index))
        else:
            op = JaxOp("write_layer", _write, (), self._mesh.abstract, specs, specs[0], donated=(0,))
            (result,) = op(stack, value, _on_device(index))
        result = self._mesh.shard(result, axes)
        torch_xla.sync()  # one layer at a time
        return result

    def read(self, name: str, stack: torch.Tensor, index: int) -> torch.Tensor:
        """Layer `index` of the stack `name`, on the host."""
        axes = parameter_axes(name, stack.dim())
        specs = self._mesh.spec(axes), self._mesh.spec((None,))
        op = JaxOp("read_layer", _read, (), self._mesh.abstract, specs, self._mesh.spec(axes[1:]))
        layer = self._mesh.shard(op(stack, _on_device(index))[0], axes[1:])
        torch_xla.sync()
        return self._mesh.get(layer)


def _on_device(index: int) -> torch.Tensor:
    """As an argument, so that all layers share a graph."""
    return torch.tensor([index], dtype=torch.int32).to(torch_xla.device())


def _first(value, index, *, layers: int):
    return _write(jnp.zeros((layers, *value.shape), value.dtype), value, index)


def _write(stack, value, index):
    return lax.dynamic_update_index_in_dim(stack, value, index[0], 0)


def _read(stack, index):
    return lax.dynamic_index_in_dim(stack, index[0], keepdims=False)
