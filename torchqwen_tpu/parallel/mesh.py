"""The devices as a mesh of chips × cores, and the only place that speaks torch_xla's SPMD."""

from __future__ import annotations

import functools
import math
import os
from dataclasses import dataclass

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as spmd
import torch_xla.runtime as xr
from jax.sharding import AbstractMesh, PartitionSpec
from torch_xla.utils import dlpack

from custom_ops.tpu_options import use_graph_options
from torchqwen_tpu.config import ParallelConfig
from torchqwen_tpu.parallel.rules import LAYOUT_RULES

Axes = tuple[str | None, ...]
"""Logical axis of each dimension of a tensor; None where it is not split."""
ALIGNMENT = 64
"""Bytes that the address of memory is a multiple of which XLA:CPU uses where it lies."""


@dataclass(frozen=True)
class DeviceMesh:
    """Chips × cores under a layout. A mesh of one device annotates nothing."""

    chips: int
    cores: int
    layout: str

    @property
    def devices(self) -> int:
        return self.chips * self.cores

    def axes(self, logical: str) -> tuple[str, ...]:
        """Mesh axes that split a logical axis."""
        return LAYOUT_RULES[self.layout][logical] if self.devices > 1 else ()

    def shards(self, logical: str) -> int:
        """How many shards a logical axis is split into."""
        sizes = {"chip": self.chips, "core": self.cores}
        return math.prod(sizes[axis] for axis in self.axes(logical))

    @property
    def ranks(self) -> int:
        """Data-parallel ranks: each owns whole requests."""
        return self.shards("tokens")

    @property
    def abstract(self) -> AbstractMesh | None:
        """The mesh for `jax.shard_map`; None for one device."""
        return AbstractMesh((self.chips, self.cores), ("chip", "core")) if self.devices > 1 else None

    def spec(self, axes: Axes) -> PartitionSpec:
        """How a tensor with these logical axes is split, for `jax.shard_map`."""
        return PartitionSpec(*((self.axes(axis) or None) if axis else None for axis in axes))

    def shard(self, tensor: torch.Tensor, axes: Axes) -> torch.Tensor:
        """Annotate a tensor on the device with its logical axes; returns the tensor."""
        if self.devices > 1:
            spmd.mark_sharding(tensor, self._spmd_mesh, tuple(self.spec(axes)))
        return tensor

    def put(self, array: torch.Tensor, axes: Axes) -> torch.Tensor:
        """A tensor of the host on the device, split by its logical axes."""
        return self.shard(array.to(torch_xla.device()), axes)

    def give(self, array: torch.Tensor, axes: Axes) -> torch.Tensor:
        """As `put`, of a tensor that nobody writes to any more: a CPU that is the only device uses its memory where it lies,
        if XLA can, in place of a copy."""
        if self.devices == 1 and xr.device_type() == "CPU" and _is_usable_in_place(array):
            return dlpack.from_dlpack(array)
        return self.put(array, axes)

    def get(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the device on the host, however it is split."""
        if self.devices == 1:
            return tensor.cpu()
        # `cpu()` would compile a graph that gathers the shards, anew in every call.
        xm.wait_device_ops()
        result = torch.empty(tensor.shape, dtype=tensor.dtype)
        for shard in spmd.XLAShardedTensor(tensor).local_shards:
            if shard.replica_id == 0:
                result[shard.indices] = shard.unpadded_data
        return result

    @property
    def _spmd_mesh(self) -> spmd.Mesh:
        return _spmd_mesh(self.chips, self.cores)


def _is_usable_in_place(array: torch.Tensor) -> bool:
    """Whether XLA:CPU takes the memory of a tensor: aligned, and of a type that DLPack knows, which FP8 is not for
    torch_xla."""
    return (
        array.numel() > 0
        and array.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and array.is_contiguous()
        and array.data_ptr() % ALIGNMENT == 0
    )


@functools.cache
def _spmd_mesh(chips: int, cores: int) -> spmd.Mesh:
    return spmd.Mesh(np.arange(chips * cores), (chips, cores), ("chip", "core"))


def build_mesh(config: ParallelConfig | None = None) -> DeviceMesh:
    """The mesh that `config` asks for, with torch_xla started for it.

    Raises:
        RuntimeError: torch_xla already runs with another number of devices, or has too few.
    """
    config = config or ParallelConfig()
    use_graph_options()
    on_cpu = xr.device_type() == "CPU"
    chips, cores = config.chips, config.cores
    if on_cpu:
        chips, cores = chips or 1, cores or 1
        if chips * cores > 1:
            # torch_xla reads this once, when it opens its devices.
            os.environ.setdefault("CPU_NUM_DEVICES", str(chips * cores))
    elif chips is None or cores is None:
        available = xr.global_runtime_device_count()
        cores = cores or (2 if available % 2 == 0 else 1)
        chips = chips or available // cores
    mesh = DeviceMesh(chips, cores, config.layout)
    if mesh.devices > 1:
        xr.use_spmd()
    _check_devices(mesh)
    return mesh


def _check_devices(mesh: DeviceMesh) -> None:
    attached = xr.global_runtime_device_count()
    if mesh.devices > 1 and attached != mesh.devices:
        raise RuntimeError(
            f"a mesh of {mesh.chips} chips × {mesh.cores} cores needs {mesh.devices} devices and torch_xla runs {attached}. "
            "Ask for a mesh of all devices; on a CPU their number is fixed by the first model of the process, so start a "
            "new process (or set CPU_NUM_DEVICES before torch_xla starts)."
        )
