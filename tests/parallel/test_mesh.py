"""Memory of the host that is given to a device: a CPU that is the only one uses it where it lies, if it can."""

from __future__ import annotations

import gc
import resource
from pathlib import Path

import pytest
import torch
import torch_xla.core.xla_model as xm

from torchqwen_tpu.parallel import build_mesh

FILLED = 5.0


@pytest.fixture(scope="module")
def mesh():
    return build_mesh()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_memory_is_used_where_it_lies(mesh, dtype):
    array = torch.zeros(300, 7, dtype=dtype)
    given = mesh.give(array, (None, None))
    array.fill_(FILLED)
    assert given.dtype == dtype and torch.equal(given.cpu(), array)


@pytest.mark.parametrize(
    "array",
    [
        torch.arange(100.0)[1:], torch.arange(12.0).view(3, 4).t(), torch.zeros(0, 3), torch.tensor(2.0),
        torch.arange(60).to(torch.float8_e4m3fn), torch.arange(9, dtype=torch.int32),
    ],
    ids=["not aligned", "transposed", "empty", "scalar", "FP8", "integers"],
)  # fmt: skip
def test_what_cannot_be_used_where_it_lies_is_copied(mesh, array):
    given = mesh.give(array, (None,) * array.dim()).cpu()
    assert given.dtype == array.dtype and torch.equal(given.float(), array.float())


def test_writing_on_the_device_leaves_the_host_alone(mesh):
    array = torch.zeros(1000)
    given = mesh.give(array, (None,))
    given.add_(1)
    assert given.cpu().eq(1).all() and array.eq(0).all()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_memory_is_given_back(mesh):
    """With the tensor on the device, and not before."""
    size = 64 << 20
    array = torch.ones(size // 4)
    given = mesh.give(array, (None,))
    before = resident()
    del array
    assert given.sum().item() == size // 4 and resident() > before - size // 2
    del given
    gc.collect()
    xm.wait_device_ops()
    assert resident() < before - size // 2
