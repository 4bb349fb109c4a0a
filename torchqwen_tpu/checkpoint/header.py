"""The header of a safetensors file: which tensors it holds and where, every claim checked against the file's length.

Format: 8 bytes of header length (little endian), the header in JSON, then the tensors' bytes without gaps; `data_offsets`
count from the end of the header (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from torchqwen_tpu.parallel.mesh import ALIGNMENT

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
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
METADATA = "__metadata__"
LENGTH = struct.Struct("<Q")


class CheckpointError(ValueError):
    """A checkpoint cannot be loaded; the message names the file and the tensor."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a file: type and shape, and its first byte, counted from the start of the file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def bytes(self) -> int:
        return DTYPES[self.dtype].itemsize * math.prod(self.shape)


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of a file by name, in the order of their bytes.

    Raises:
        CheckpointError: the file cannot be read, is cut short, or its header says what cannot be.
    """
    try:
        size = os.path.getsize(file)
        with file.open("rb") as stream:
            prefix = stream.read(LENGTH.size)
            length = LENGTH.unpack(prefix)[0] if len(prefix) == LENGTH.size else 0
            if not 0 < length <= size - LENGTH.size:
                raise CheckpointError(
                    f"{file} is truncated or not a safetensors file: it has {size} bytes and no whole header; "
                    "fetch it again"
                )
            text = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    entries = _entries(file, text, LENGTH.size + length)
    _check_places(file, entries, LENGTH.size + length, size)
    return entries


def header_digest(file: Path) -> str:
    """SHA-256 of the header (with its length) of a file whose header is sound."""
    with file.open("rb") as stream:
        prefix = stream.read(LENGTH.size)
        return hashlib.sha256(prefix + stream.read(*LENGTH.unpack(prefix))).hexdigest()


def header_bytes(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> bytes:
    """The header (with its length) of a file that holds `tensors` in this order; they may be on the meta device. Its padding
    aligns them in a file that is mapped."""
    header: dict[str, object] = {METADATA: metadata}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH.size + len(text)) % ALIGNMENT)
    return LENGTH.pack(len(text)) + text


def _entries(file: Path, text: bytes, start: int) -> dict[str, TensorEntry]:
    def unique(pairs: Iterable[tuple[str, object]]) -> dict[str, object]:
        result: dict[str, object] = {}
        for name, value in pairs:
            if name in result:
                raise CheckpointError(f"{name} is in the header of {file} twice")
            result[name] = value
        return result

    try:
        header = json.loads(text, object_pairs_hook=unique)
        if not isinstance(header, dict):
            raise TypeError("not an object")
    except CheckpointError:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged or not a safetensors file: its header is no JSON object ({error})") from error
    header.pop(METADATA, None)
    entries = {name: _entry(file, name, value, start) for name, value in header.items()}
    return dict(sorted(entries.items(), key=lambda item: (item[1].offset, item[1].bytes)))


def _entry(file: Path, name: str, value: object, start: int) -> TensorEntry:
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        numbers = (*shape, begin, end)
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{file} is damaged: its header does not describe {name} ({error!r})") from error
    if dtype not in DTYPES:
        raise CheckpointError(f"{name} in {file} is {dtype}; there can be: {', '.join(DTYPES)}")
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise CheckpointError(f"{file} is damaged: shape {list(shape)} or offsets {[begin, end]} of {name} cannot be")
    entry = TensorEntry(file, shape, dtype, start + begin)
    if end - begin != entry.bytes:
        raise CheckpointError(
            f"{file} is damaged: {name} is {dtype} {list(shape)}, {entry.bytes} bytes, and its offsets "
            f"{[begin, end]} span {end - begin}"
        )
    return entry


def _check_places(file: Path, entries: dict[str, TensorEntry], start: int, size: int) -> None:
    """The tensors lie one after the other and fill the file."""
    at = start
    for name, entry in entries.items():
        if entry.offset != at:
            what = "overlaps the tensor before it" if entry.offset < at else "leaves a gap before it"
            raise CheckpointError(f"{file} is damaged: {name} {what} (it starts at byte {entry.offset}, not {at})")
        at += entry.bytes
        if at > size:
            raise CheckpointError(f"{file} is truncated: {name} ends at byte {at} of {size}; fetch the file again")
    if at != size:
        raise CheckpointError(f"{file} is damaged: its tensors end at byte {at} and the file at {size}")
