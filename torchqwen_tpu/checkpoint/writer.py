"""From parameters on the devices to a checkpoint in the published layout."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file

from torchqwen_tpu.checkpoint.files import DTYPES, INDEX, CheckpointFiles
from torchqwen_tpu.checkpoint.names import is_carried, is_vision

_PATTERN = "model{suffix}.safetensors"


def save_weights(
    folder: Path, tensors: dict[str, torch.Tensor], read: Callable[[str], torch.Tensor], max_shard_size: int | str
) -> None:
    """Write tensors to shards, with an index if there are several. Old weights in `folder` are replaced at the end.

    Args:
        tensors: published name → tensor of the right shape and dtype (it may be on the meta device).
        read: the data of a tensor by its published name, on the host.
    """
    plan = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: tensor.numel() * tensor.element_size(),
        get_storage_id=lambda tensor: None,
        filename_pattern=_PATTERN,
        max_shard_size=max_shard_size,
    )
    written = []
    for file, names in plan.filename_to_tensors.items():
        partial = folder / f"{file}.partial"
        save_file({name: read(name).contiguous() for name in names}, partial, metadata={"format": "pt"})
        written.append((partial, folder / file))
    for old in [*folder.glob("model*.safetensors"), folder / INDEX]:
        old.unlink(missing_ok=True)
    for partial, file in written:
        os.replace(partial, file)
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def carried_tensors(files: CheckpointFiles | None, vision: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of parts that are not built here, those of the vision part on request, as meta tensors by name."""
    for name, entry in files.tensors.items() if files else ():
        if is_carried(name) and (vision or not is_vision(name)):
            yield name, torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")
