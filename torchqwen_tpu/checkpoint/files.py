"""The safetensors files of a checkpoint: which tensors they hold, what is wrong with them, and their data, mapped."""

from __future__ import annotations

import json
import mmap
from pathlib import Path

import torch

from torchqwen_tpu.checkpoint.header import DTYPES, CheckpointError, TensorEntry, read_header

__all__ = ["INDEX", "SINGLE", "CheckpointError", "CheckpointFiles", "TensorEntry"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class CheckpointFiles:
    """Tensors of a checkpoint folder by name. Headers are read and checked at once, data when a tensor is asked for.

    Files are mapped for as long as this object lives, so what it reads stays what it was when the folder is written anew.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._maps: dict[Path, mmap.mmap] = {}
        self.tensors: dict[str, TensorEntry] = {}
        expected = self._expected()
        for file in sorted(set(expected.values())) if expected else [folder / SINGLE]:
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
        with file.open("rb") as stream:  # private and writable, as torch wants its memory; nothing writes to it
            self._maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)

    def read(self, name: str) -> torch.Tensor:
        """The tensor `name`: a view of the mapped file, to be read and not to be written."""
        entry = self.tensors[name]
        if not entry.bytes:
            return torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        data = torch.frombuffer(self._maps[entry.file], dtype=torch.uint8, count=entry.bytes, offset=entry.offset)
        if entry.offset % DTYPES[entry.dtype].itemsize:  # the format does not ask for alignment, torch does
            data = data.clone()
        return data.view(DTYPES[entry.dtype]).view(entry.shape)

    def release(self, name: str) -> None:
        """Give up the memory that `read` of this tensor took; reading it again is possible."""
        entry = self.tensors[name]
        start = -(-entry.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (entry.offset + entry.bytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
        if length > 0:
            self._maps[entry.file].madvise(mmap.MADV_DONTNEED, start, length)
