"""The safetensors files of a checkpoint: which tensors they hold, what is wrong with them, and their data.

Data of published files are read, not mapped: others write these files, and one that is cut short meanwhile is an error of
`read`, while a mapping of it ends the process.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch

from torchqwen_tpu.checkpoint.header import DTYPES, CheckpointError, TensorEntry, read_header
from torchqwen_tpu.checkpoint.names import scale_of

__all__ = ["INDEX", "SINGLE", "CheckpointError", "CheckpointFiles", "TensorEntry"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class CheckpointFiles:
    """Tensors of a checkpoint folder by name. Headers are read and checked at once, data when a tensor is asked for.

    Files stay open for as long as this object lives, so what it reads stays what it was when the folder is written anew.

    Args:
        names: the files to read; None for those of a published checkpoint.
    """

    def __init__(self, folder: Path, names: Sequence[str] | None = None):
        self.folder = folder
        self.tensors: dict[str, TensorEntry] = {}
        self._open_files: dict[Path, int] = {}
        self._maps: dict[Path, torch.Tensor] = {}
        weakref.finalize(self, _close, self._open_files)
        expected = self._expected() if names is None else {}
        files = [folder / SINGLE] if names is None else [folder / name for name in names]
        for file in sorted(set(expected.values())) or files:
            self._open(file)
        for name, file in expected.items():
            if name not in self.tensors or self.tensors[name].file != file:
                raise CheckpointError(f"{folder / INDEX} places {name} in {file.name}, which does not hold it")

    def _expected(self) -> dict[str, Path]:
        """What the index says: tensor name → file. Empty for a checkpoint of one file."""
        index = self.folder / INDEX
        if not index.exists():
            if not (self.folder / SINGLE).exists():
                raise CheckpointError(f"{self.folder} holds neither {SINGLE} nor {INDEX}")
            return {}
        try:
            names = dict(json.loads(index.read_text())["weight_map"])
            missing = sorted({name for name in names.values() if not (self.folder / name).is_file()})
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{index} is not a valid index: {error!r}") from error
        if missing:
            raise CheckpointError(f"{index} names {', '.join(missing)}, which {self.folder} does not hold")
        return {tensor: self.folder / name for tensor, name in names.items()}

    def _open(self, file: Path) -> None:
        entries = read_header(file)
        for name in entries:
            if name in self.tensors:
                raise CheckpointError(f"{name} is in both {self.tensors[name].file.name} and {file.name}")
        self.tensors |= entries
        self._open_files[file] = os.open(file, os.O_RDONLY)

    def read(self, name: str) -> torch.Tensor:
        """The tensor `name` of the files, in memory of its own."""
        entry = self.tensors[name]
        result = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        self.read_into(name, result)
        return result

    def read_into(self, name: str, result: torch.Tensor, start: int = 0) -> None:
        """Fill `result`, which is contiguous, with the bytes of the tensor `name` from its byte `start` on.

        Raises:
            CheckpointError: the file has become unreadable, or shorter.
        """
        entry = self.tensors[name]
        rest, at = memoryview(result.reshape(-1).view(torch.uint8).numpy()), entry.offset + start
        while len(rest):
            try:
                count = os.preadv(self._open_files[entry.file], [rest], at)
            except OSError as error:
                raise CheckpointError(f"{name} in {entry.file} cannot be read: {error}") from error
            if count == 0:
                raise CheckpointError(f"{entry.file} is truncated: it ends at byte {at}, within {name}; fetch the file again")
            rest, at = rest[count:], at + count

    def map(self, name: str) -> torch.Tensor:
        """The tensor `name` in pages of its file, which come into memory when they are touched: for files that nobody changes
        in place (they may be removed). Pages that are written to become copies; the file stays as it is."""
        entry, dtype = self.tensors[name], DTYPES[self.tensors[name].dtype]
        if entry.offset % dtype.itemsize or not entry.bytes:
            return self.read(name)
        if entry.file not in self._maps:
            descriptor = self._open_files[entry.file]
            size = os.fstat(descriptor).st_size
            self._maps[entry.file] = torch.from_file(f"/proc/self/fd/{descriptor}", size=size, dtype=torch.uint8)
        data = self._maps[entry.file][entry.offset : entry.offset + entry.bytes]
        return data.view(dtype).view(entry.shape)

    def scale_dtype(self, name: str) -> torch.dtype:
        """The type in which the block scales of the tensor `name` were published."""
        entry = self.tensors.get(scale_of(name))
        return DTYPES[entry.dtype] if entry else torch.float32

    def prefetch(self, name: str, start: int = 0, length: int | None = None) -> None:
        """Have the system start to read a tensor, or a part of it, without waiting for it."""
        entry = self.tensors[name]
        count = entry.bytes if length is None else length
        if count:  # zero stands for the rest of the file
            os.posix_fadvise(self._open_files[entry.file], entry.offset + start, count, os.POSIX_FADV_WILLNEED)


def _close(open_files: dict[Path, int]) -> None:
    for descriptor in open_files.values():
        os.close(descriptor)
