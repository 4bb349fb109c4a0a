"""A checkpoint in the form that the devices hold, on disk: what a start after the first reads in place of converting anew.

A prepared folder holds every parameter in the layout of the device, tensors that are not built here as they are, the
configuration and the tokenizer. `prepared.json` says what it was made of and for; a start that wants something else is refused.
Files are mapped, so that a CPU computes from their pages and another device is fed from them. Of each file the length and the
header are checked, which names the preparation; numbers were checked as they were written and are not read again for that.
It is no checkpoint to transformers, and comes into being by one renaming: a crash before it leaves nothing that loads.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from pathlib import Path

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import PretrainedConfig
from transformers.utils import logging

from torchqwen_tpu.checkpoint.atomic import to_disk
from torchqwen_tpu.checkpoint.files import INDEX, CheckpointFiles
from torchqwen_tpu.checkpoint.forms import Filling, scale_parameter, set_parameter
from torchqwen_tpu.checkpoint.header import DTYPES, CheckpointError, header_digest
from torchqwen_tpu.checkpoint.names import SCALE, is_carried
from torchqwen_tpu.checkpoint.preparation import Preparation
from torchqwen_tpu.checkpoint.reader import Place, ahead
from torchqwen_tpu.checkpoint.resolve import PATTERNS
from torchqwen_tpu.checkpoint.writer import PlacedFile
from torchqwen_tpu.models.stacking import unstacked
from torchqwen_tpu.parallel.mesh import ALIGNMENT

DESCRIPTION = "prepared.json"
_FILE_BYTES = 5 << 30


class PreparedFiles(CheckpointFiles):
    """The files of a prepared folder.

    Raises:
        CheckpointError: they are damaged.
    """

    def __init__(self, folder: Path):
        file = folder / DESCRIPTION
        try:
            description = json.loads(file.read_text())
            self.preparation = Preparation(**{field.name: description[field.name] for field in fields(Preparation)})
            self.requantization_error = dict(description["requantization_error"])
            self._scales = DTYPES[description["scales"]]
            self._digests = {str(name): str(digest) for name, digest in description["files"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{file} does not describe a prepared checkpoint: {error!r}") from error
        missing = [name for name in self._digests if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(f"{file} names {', '.join(missing)}, which {folder} does not hold")
        super().__init__(folder, list(self._digests))

    def scale_dtype(self, name: str) -> torch.dtype:
        return self._scales

    def check_headers(self) -> None:
        """Raises CheckpointError if a file is not the one that was written with the others."""
        for name, digest in self._digests.items():
            if header_digest(self.folder / name) != digest:
                raise CheckpointError(
                    f"{self.folder / name} is not the file that {DESCRIPTION} was written with; remove the folder to have it "
                    "prepared anew"
                )

    def check(self, wanted: Preparation) -> None:
        """Raises CheckpointError if this was prepared for something else, naming it; what is None was not asked for."""
        for field in fields(Preparation):
            own, other = getattr(self.preparation, field.name), getattr(wanted, field.name)
            if own != other and other is not None and not (own is None and field.name == "quantization"):
                raise CheckpointError(
                    f"{self.folder} was prepared with {field.name} {own}, and {other} is asked for; ask for the same, or "
                    "remove the folder (or name another) to have it prepared anew"
                )


def is_prepared(folder: Path) -> bool:
    return (folder / DESCRIPTION).is_file()


def prepared_folder(folder: Path, target: Path | None) -> Path | None:
    """Where to load from: the model's `folder` if it is a prepared one, or `target` if that is; None for neither.

    Raises:
        ValueError: a prepared checkpoint is to be prepared, or `target` holds something else.
    """
    if is_prepared(folder):
        if target is not None:
            raise ValueError(f"{folder} is a prepared checkpoint; load it without save_prepared, or name the published one")
        return folder
    if target is None:
        return None
    if is_prepared(target):
        return target
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ValueError(f"{target} is there and is no prepared checkpoint; name a new folder for it")
    return None


class Preparer:
    """Writes a prepared folder while the model is loaded: `keep` takes each parameter, `finish` the rest.

    Made by `new_prepared`.
    """

    def __init__(
        self, partial: Path, files: CheckpointFiles, parameters: dict[str, torch.Tensor], preparation: Preparation
    ):
        self._partial, self._files, self._preparation = partial, files, preparation
        carried = {name: entry for name, entry in files.tensors.items() if is_carried(name)}
        metas = parameters | {
            name: torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta") for name, entry in carried.items()
        }
        size = sum(_size(meta) for meta in metas.values())
        free = shutil.disk_usage(partial).free
        if size > free:
            raise OSError(f"{partial.parent} has {free:,} bytes free and the prepared checkpoint takes {size:,}")
        self._carried = list(carried)
        self._written: dict[str, PlacedFile] = {}
        for number, group in enumerate(_groups(metas), start=1):
            name, metadata = f"prepared-{number:05}.safetensors", {"preparation": preparation.digest}
            file = PlacedFile(partial / name, group, metadata)
            self._written |= dict.fromkeys(group, file)

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """Write one parameter, or its layer of a stack, in its form on the device."""
        self._written[name].write(name, tensor)

    def finish(self, config: PretrainedConfig, requantization_error: dict[str, float]) -> None:
        """Write what is no parameter, and the description at the end."""
        for name in tqdm(self._carried, desc="Copying other tensors", disable=not logging.is_progress_bar_enabled()):
            self.keep(name, self._files.read(name))
        for file in set(self._written.values()):
            file.close()
        for pattern in PATTERNS:
            for file in self._files.folder.glob(pattern):
                if file.suffix != ".safetensors" and file.name != INDEX:
                    shutil.copyfile(file, self._partial / file.name)
        config.save_pretrained(self._partial)
        scales = {entry.dtype for name, entry in self._files.tensors.items() if name.endswith(SCALE) and not is_carried(name)}
        description = {
            **asdict(self._preparation),
            "requantization_error": requantization_error,
            "scales": scales.pop() if len(scales) == 1 else "F32",
            "files": {path.name: header_digest(path) for path in sorted({file.path for file in self._written.values()})},
        }
        (self._partial / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n")


@contextlib.contextmanager
def new_prepared(
    target: Path, files: CheckpointFiles, model: nn.Module, fillings: list[Filling], preparation: Preparation
) -> Iterator[Preparer]:
    """A prepared folder that grows beside `target` and takes its name on leaving.

    Raises:
        OSError: the disk is too small, or a tensor could not be written.
    """
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a start that was killed
    partial.mkdir(parents=True)
    try:
        yield Preparer(partial, files, _parameters(model, fillings), preparation)
        for file in partial.iterdir():
            to_disk(file)
        to_disk(partial)
        os.rename(partial, target)
        to_disk(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def load_prepared(files: PreparedFiles, model: nn.Module, place: Place) -> None:
    """Fill a model on the meta device.

    Raises:
        CheckpointError: tensors that are missing, unexpected or of a wrong shape.
    """
    jobs = _adopt(files, model)
    files.check_headers()
    total = sum(files.tensors[name].bytes for name in jobs)

    def start(name: str, submit: Callable) -> Callable[[], torch.Tensor]:
        files.prefetch(name)
        return lambda: files.map(name)

    with tqdm(
        total=total, desc="Loading weights", unit="B", unit_scale=True, disable=not logging.is_progress_bar_enabled()
    ) as bar:
        for name, value in ahead(jobs, start, lambda name: files.tensors[name].bytes):
            place(jobs[name][0], value, jobs[name][1])
            del value  # before the next is waited for
            bar.update(files.tensors[name].bytes)


def _adopt(files: PreparedFiles, model: nn.Module) -> dict[str, tuple[str, int | None]]:
    """Give the parameters of `model` the types that the files have, and those of scales.

    Returns: by tensor of the files, in their order, the parameter that it fills, and its place in a stack.
    """
    places: dict[str, tuple[str, int | None]] = {}
    for holder, value in list(model.named_parameters()):
        layers = unstacked(holder)
        for name, index in layers:
            entry = files.tensors.get(name)
            if entry is None:
                raise CheckpointError(f"{files.folder} holds no {name}")
            own = tuple(value.shape if index is None else value.shape[1:])
            if entry.shape != own:
                raise CheckpointError(f"{name} in {entry.file} has shape {list(entry.shape)}, the model {list(own)}")
            places[name] = holder, index
            if scale_parameter(name) in files.tensors:
                places[scale_parameter(name)] = scale_parameter(holder), index
        first = layers[0][0]
        for name, parameter in ((first, holder), (scale_parameter(first), scale_parameter(holder))):
            if name in files.tensors:
                entry, stack = files.tensors[name], (len(layers),) if layers[0][1] is not None else ()
                meta = torch.empty((*stack, *entry.shape), dtype=DTYPES[entry.dtype], device="meta")
                set_parameter(model, parameter, meta)
    unexpected = [name for name in files.tensors if name not in places and not is_carried(name)]
    if unexpected:
        raise CheckpointError(f"no parameter takes {unexpected[0]} in {files.tensors[unexpected[0]].file}")
    return {name: places[name] for name in files.tensors if name in places}


def _parameters(model: nn.Module, fillings: list[Filling]) -> dict[str, torch.Tensor]:
    """Every parameter and its scales as they will be on the device, layer by layer, on the meta device."""
    own = dict(model.named_parameters())
    result = {}
    for filling in fillings:
        for name, holder in ((filling.name, filling.holder), (scale_parameter(filling.name), scale_parameter(filling.holder))):
            if holder in own:
                result[name] = own[holder].to("meta") if filling.index is None else own[holder].to("meta")[0]
    return result


def _groups(metas: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Tensors of one file each, in an order in which large ones are aligned for XLA and all for their types."""

    def in_order(group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(sorted(group.items(), key=lambda item: (_size(item[1]) % ALIGNMENT != 0, -item[1].element_size())))

    group: dict[str, torch.Tensor] = {}
    held = 0
    for name, meta in metas.items():
        if group and held + _size(meta) > _FILE_BYTES:
            yield in_order(group)
            group, held = {}, 0
        group[name] = meta
        held += _size(meta)
    if group:
        yield in_order(group)


def _size(meta: torch.Tensor) -> int:
    return meta.numel() * meta.element_size()
