"""What a prepared checkpoint was made of and for."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

import torch

from torchqwen_tpu.checkpoint.files import CheckpointFiles
from torchqwen_tpu.checkpoint.plan import QUANTIZED_DTYPE

LAYOUT_VERSION = 2
"""Counts the changes to what a parameter looks like on the device (`WeightLayout`, `forms`) and to prepared folders."""
SAMPLE = 4096
"""Bytes of each tensor that a checkpoint's hash takes in."""


@dataclass(frozen=True)
class Preparation:
    """What a prepared checkpoint was made of and for.

    Attributes:
        checkpoint: `checkpoint_hash` of the published one.
        dtype: of parameters that are not FP8.
        quantization: what became of FP8 weights; None if there were none.
        mesh: chips × cores and layout.
    """

    layout_version: int
    checkpoint: str | None
    dtype: str
    quantization: str | None
    scan_layers: bool
    mesh: str

    @property
    def digest(self) -> str:
        """SHA-256 of all of it."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()


def checkpoint_hash(files: CheckpointFiles) -> str:
    """SHA-256 of a published checkpoint: config.json, what the headers say, and 4 KiB from the middle of every tensor.

    Reading all of a checkpoint takes as long as loading it. Another model, another training run or another conversion
    differs in the middle of its tensors; what goes unseen is damage to single bytes elsewhere.
    """
    digest = hashlib.sha256((files.folder / "config.json").read_bytes())
    samples = {}
    for name, entry in files.tensors.items():
        length = min(entry.bytes, SAMPLE)
        samples[name] = (entry.bytes - length) // 2, length
        files.prefetch(name, *samples[name])
    for name, (start, length) in samples.items():
        entry, sample = files.tensors[name], torch.empty(length, dtype=torch.uint8)
        files.read_into(name, sample, start)
        digest.update(f"{entry.file.name} {name} {entry.dtype} {entry.shape} {entry.offset}\n".encode())
        digest.update(sample.numpy())
    return digest.hexdigest()


def quantization_of(files: CheckpointFiles, policy: str) -> str | None:
    """The policy, if there is anything that it applies to."""
    return policy if any(entry.dtype == QUANTIZED_DTYPE for entry in files.tensors.values()) else None
