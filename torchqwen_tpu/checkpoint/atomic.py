"""A folder's files replaced all together: a crash at any moment leaves the old checkpoint or none that loads."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from torchqwen_tpu.checkpoint.files import INDEX

PARTIAL = ".partial-save"
"""Folder, inside the one that is saved to, where the new files grow."""
CONFIG = "config.json"


@contextlib.contextmanager
def replaced_checkpoint(folder: Path) -> Iterator[Path]:
    """A folder to write a whole checkpoint into; on leaving, its files replace those of `folder`.

    Nothing of the old checkpoint is touched before the new one is complete on the disk. Then config.json goes first and
    comes last, and between the two the index is gone before a shard is: whatever is there when the process dies in between
    is no checkpoint, to this library or to transformers. Files of other names stay.
    """
    partial = folder / PARTIAL
    shutil.rmtree(partial, ignore_errors=True)  # of a save that was killed
    partial.mkdir(parents=True)
    try:
        yield partial
        for file in partial.iterdir():
            to_disk(file)
        _swap(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _swap(partial: Path, folder: Path) -> None:
    for old in (folder / CONFIG, folder / INDEX, *folder.glob("model*.safetensors")):
        old.unlink(missing_ok=True)
    to_disk(folder)
    last = [name for name in (INDEX, CONFIG) if (partial / name).exists()]
    others = sorted(file.name for file in partial.iterdir() if file.name not in last)
    for name in [*others, *last]:
        os.replace(partial / name, folder / name)
    to_disk(folder)


def to_disk(path: Path) -> None:
    """Have the file, or the names in the folder, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
