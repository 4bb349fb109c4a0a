"""Tensors into safetensors files, one at a time: the host holds no more of them than the one that is being written."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from tqdm.auto import tqdm
from transformers.utils import logging

from torchqwen_tpu.checkpoint.files import INDEX
from torchqwen_tpu.checkpoint.header import header_bytes

_PATTERN = "model{suffix}.safetensors"


@dataclass(frozen=True)
class Saved:
    """A tensor to be written: shape and type as a meta tensor, and its data on the host when it is asked for."""

    meta: torch.Tensor
    read: Callable[[], torch.Tensor]


def write_weights(folder: Path, tensors: dict[str, Saved], max_shard_size: int | str) -> None:
    """Write tensors to shards, with an index if there are several. The same tensors give the same bytes.

    Raises:
        OSError: naming the file and the tensor that could not be written, for example on a full disk.
    """
    plan = split_state_dict_into_shards_factory(
        {name: tensors[name].meta for name in sorted(tensors)},
        get_storage_size=_size,
        get_storage_id=lambda tensor: None,
        filename_pattern=_PATTERN,
        max_shard_size=max_shard_size,
    )
    total = sum(_size(saved.meta) for saved in tensors.values())
    with tqdm(
        total=total, desc="Saving weights", unit="B", unit_scale=True, disable=not logging.is_progress_bar_enabled()
    ) as bar:
        for file, names in plan.filename_to_tensors.items():
            # Wide types first, so that every tensor is aligned in a file that is mapped.
            ordered = sorted(names, key=lambda name: (-tensors[name].meta.element_size(), name))
            _write_file(folder / file, {name: tensors[name] for name in ordered}, bar)
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _write_file(file: Path, tensors: dict[str, Saved], bar: tqdm) -> None:
    with file.open("wb", buffering=0) as stream:  # a buffer would fail a second time, as the file is closed
        with _naming("the header", file):
            _write(stream, header_bytes({name: saved.meta for name, saved in tensors.items()}, {"format": "pt"}))
        for name, saved in tensors.items():
            tensor = saved.read()
            with _naming(name, file):
                _write_tensor(stream, name, saved.meta, tensor)
            bar.update(_size(tensor))


class PlacedFile:
    """A safetensors file whose tensors (given on the meta device) may be written in any order."""

    def __init__(self, path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]):
        self.path = path
        header = header_bytes(tensors, metadata)
        self._metas, self._places, at = tensors, {}, len(header)
        for name, meta in tensors.items():
            self._places[name] = at
            at += _size(meta)
        self._stream = path.open("wb", buffering=0)
        _write(self._stream, header)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write the tensor `name`.

        Raises:
            OSError: naming the file and the tensor that could not be written, for example on a full disk.
        """
        with _naming(name, self.path):
            self._stream.seek(self._places[name])
            _write_tensor(self._stream, name, self._metas[name], tensor)

    def close(self) -> None:
        self._stream.close()


@contextlib.contextmanager
def _naming(what: str, file: Path) -> Iterator[None]:
    """An OSError names the tensor that could not be written, and its file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{what} could not be written to {file.name}: {error.strerror}") from error


def _write_tensor(stream: FileIO, name: str, meta: torch.Tensor, tensor: torch.Tensor) -> None:
    if (tensor.dtype, tensor.shape) != (meta.dtype, meta.shape):
        raise RuntimeError(f"{name} is {tensor.dtype} {list(tensor.shape)}, and its header says otherwise")
    _write(stream, tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def _write(stream: FileIO, data) -> None:
    rest = memoryview(data)
    while len(rest):
        rest = rest[stream.write(rest) :]


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
