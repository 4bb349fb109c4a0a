"""Starts that prepare a checkpoint and are killed at one change of the disk after the other; run in a process of its own.

Each start is a child that dies by SIGKILL at its n-th step. What it leaves at the target is printed, a line a step: "absent",
"whole", or what is wrong.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2])]

import torch
from saves_that_die import counting, die_at_each_step
from torch import nn

from torchqwen_tpu.checkpoint import prepared, writer
from torchqwen_tpu.checkpoint.files import CheckpointFiles
from torchqwen_tpu.checkpoint.forms import Filling
from torchqwen_tpu.checkpoint.preparation import LAYOUT_VERSION, Preparation
from torchqwen_tpu.checkpoint.resolve import load_config


def prepare(folder: Path, target: Path) -> None:
    """A model of two parameters, of a checkpoint whose other tensors come along."""
    files = CheckpointFiles(folder)
    model = nn.Module()
    fillings = []
    for name in ("first", "second"):
        model.register_parameter(name, nn.Parameter(torch.empty(50, device="meta")))
        fillings.append(Filling(name, name, None, "plain", torch.float32, {}))
    own = Preparation(LAYOUT_VERSION, "0", "float32", None, False, "1x1 dp")
    with prepared.new_prepared(target, files, model, fillings, own) as preparer:
        for filling in fillings:
            preparer.keep(filling.name, torch.ones(50))
        preparer.finish(load_config(folder), {})


def state_of(target: Path) -> str:
    if not target.exists():
        return "absent"
    files = prepared.PreparedFiles(target)
    values = {value for name in ("first", "second") for value in files.read(name).tolist()}
    return "whole" if values == {1.0} and (target / "config.json").exists() else f"half: {values}"


def main() -> None:
    folder, root = Path(sys.argv[1]), Path(sys.argv[2])
    target = root / "prepared"

    def run(step) -> None:
        writer._write, os.rename = counting(writer._write, step), counting(os.rename, step)
        shutil.copyfile, Path.write_text = counting(shutil.copyfile, step), counting(Path.write_text, step)
        prepare(folder, target)

    die_at_each_step(run, lambda: state_of(target), 200)


if __name__ == "__main__":
    main()
