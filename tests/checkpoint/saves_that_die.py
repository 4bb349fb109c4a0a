"""Saves over an old checkpoint that are killed at one system call after the other; run in a process of its own.

`python saves_that_die.py FOLDER OLD:NEW ...` takes sizes of the shards of the old checkpoint and of the new one. Each save is
a child that dies by SIGKILL at its n-th step. What it leaves is printed, a line a step: "old" or "new" for a whole checkpoint
with those weights, "refused" where nothing loads, or what went wrong. A line "OLD:NEW" goes before those of a pair.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2])]

import torch

from torchqwen_tpu.checkpoint import atomic, writer
from torchqwen_tpu.checkpoint.files import CheckpointError, CheckpointFiles

NAMES = ("a.weight", "b.weight", "c.weight")
LENGTH = 1000


def save(folder: Path, value: float, shard_size: int, step=lambda: None) -> None:
    """A checkpoint of three tensors that hold `value`; `step` is called before everything that changes the disk."""

    def read() -> torch.Tensor:
        step()
        return torch.full((LENGTH,), value)

    meta = torch.empty(LENGTH, device="meta")
    with atomic.replaced_checkpoint(folder) as partial:
        writer.write_weights(partial, {name: writer.Saved(meta, read) for name in NAMES}, shard_size)
        step()
        (partial / atomic.CONFIG).write_text("{}")
        step()


def die_at(number: int):
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return step


def counting(function, step):
    def counted(*args, **kwargs):
        step()
        return function(*args, **kwargs)

    return counted


def state_of(folder: Path) -> str:
    """As a loader sees it: with the configuration of the folder, or with one that it was given."""
    try:
        files = CheckpointFiles(folder)
    except CheckpointError:
        return "refused"
    if sorted(files.tensors) != sorted(NAMES):
        return f"half a checkpoint: {sorted(files.tensors)}"
    values = {value for name in NAMES for value in files.read(name).tolist()}
    if len(values) > 1:
        return f"a mixture of weights: {values}"
    return {1.0: "old", 2.0: "new"}[values.pop()]


def die_at_each_step(run, state, most: int) -> None:
    """Run `run(step)` in a child that dies at its first step, in one that dies at its second and so on until one lives to the
    end, at most so many; print `state()` after each."""
    for number in range(1, most):
        child = os.fork()
        if child == 0:
            run(die_at(number))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(state(), flush=True)
        if not os.WIFSIGNALED(status):
            return


def save_over(folder: Path, old_size: int, new_size: int) -> None:
    save(folder, 1.0, old_size)

    def run(step) -> None:
        os.replace, Path.unlink = counting(os.replace, step), counting(Path.unlink, step)
        save(folder, 2.0, new_size, step)

    def state() -> str:
        left = state_of(folder)
        save(folder, 1.0, old_size)
        return left

    die_at_each_step(run, state, 100)


def main() -> None:
    for pair in sys.argv[2:]:
        print(pair, flush=True)
        save_over(Path(sys.argv[1]) / pair, *map(int, pair.split(":")))


if __name__ == "__main__":
    main()
