"""Memory of the host that is given to a device: a CPU that is the only one uses it where it lies, if it can."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

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


def test_memory_is_given_back(mesh):
    """With the tensor on the device."""
    array = torch.zeros(1000)
    memory = weakref.ref(array.untyped_storage())
    given = mesh.give(array, (None,))
    del array
    gc.collect()
    assert given.sum().item() == 0
    del given
    gc.collect()
    assert memory() is None
