"""The safetensors files of a checkpoint: which tensors they hold, and what is wrong with them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Types of tensors that can be carried from file to file, by safetensors' names."""
WEIGHT_DTYPES = ("F32", "BF16", "F16")
"""Types that the weights of a model may have."""


class CheckpointError(ValueError):
    """A checkpoint cannot be loaded; the message names the file or the tensor."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a file, by its header."""

    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        size = DTYPES[self.dtype].itemsize
        for length in self.shape:
            size *= length
        return size


class CheckpointFiles:
    """Tensors of a checkpoint folder by name. Headers are read and checked at once, data when a tensor is asked for."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._open: dict[Path, safe_open] = {}
        self.tensors: dict[str, TensorEntry] = {}
        expected = self._expected()
        for file in dict.fromkeys(expected.values()) if expected else [folder / SINGLE]:
            self._read_header(file)
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

    def _read_header(self, file: Path) -> None:
        try:
            handle = safe_open(file, framework="pt")
            names = list(handle.keys())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is truncated or not a safetensors file: {error}") from error
        self._open[file] = handle
        for name in names:
            if name in self.tensors:
                raise CheckpointError(f"{name} is in both {self.tensors[name].file.name} and {file.name}")
            part = handle.get_slice(name)
            if part.get_dtype() not in DTYPES:
                raise CheckpointError(f"{name} in {file} is {part.get_dtype()}; there can be: {', '.join(DTYPES)}")
            self.tensors[name] = TensorEntry(file, tuple(part.get_shape()), part.get_dtype())

    def read(self, name: str) -> torch.Tensor:
        """The tensor `name`, on the host."""
        entry = self.tensors[name]
        try:
            return self._open[entry.file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{name} cannot be read from {entry.file}: {error}") from error
