"""From checkpoint files to parameters on the devices, a parameter at a time, everything checked before the first is read.

Files are read once, in the order in which tensors lie in them. Threads put parameters together on the host, a bounded number
of bytes ahead of the one that places them on the devices. So the host holds the parameter that is being placed and what was
read ahead, however large the model is.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

import torch
from tqdm.auto import tqdm
from transformers.utils import logging

from torchqwen_tpu.checkpoint.assemble import Assembler
from torchqwen_tpu.checkpoint.files import CheckpointFiles
from torchqwen_tpu.checkpoint.forms import Filling, scale_parameter
from torchqwen_tpu.checkpoint.layout import WeightLayout
from torchqwen_tpu.checkpoint.names import parameter_of, scale_of
from torchqwen_tpu.checkpoint.plan import EMBEDDING, HEAD

logger = logging.get_logger(__name__)
Job, Result = TypeVar("Job"), TypeVar("Result")

READ_AHEAD = 512 << 20
"""Bytes of parameters that may wait on the host to be placed."""
READERS = min(16, (os.cpu_count() or 1) + 2)
"""Threads: one a processor, and some that wait for the disk."""
COMPARED = 64 << 20
"""Bytes that are compared at once."""


class Place(Protocol):
    """Puts a tensor of the host on the devices as the parameter `name`, or as one of a stack of parameters."""

    def __call__(self, name: str, tensor: torch.Tensor, index: int | None = None) -> None: ...


def load_parameters(
    files: CheckpointFiles, layout: WeightLayout, fillings: list[Filling], place: Place,
    keep: Callable[[str, torch.Tensor], None] | None = None,
) -> dict[str, float]:  # fmt: skip
    """Read every parameter and place it, with its scales if it is FP8.

    Args:
        keep: also takes every parameter (of a stack its layers, by the names that they have alone) as it is placed.

    Returns: by kind of weight, the error of requantising it an output channel, relative to the weights (root of the mean
        squares); empty unless something was requantised.

    Raises:
        CheckpointError: scales that no block can have, or a file that has become unreadable.
    """
    assembler = Assembler(files, layout)
    total = sum(_bytes_of(files, filling) for filling in fillings)
    with tqdm(
        total=total, desc="Loading weights", unit="B", unit_scale=True, disable=not logging.is_progress_bar_enabled()
    ) as bar:
        for filling, (value, scale) in ahead(_in_file_order(files, fillings), assembler.start, _device_bytes):
            place(filling.holder, value, filling.index)
            if scale is not None:
                place(scale_parameter(filling.holder), scale, filling.index)
            if keep is not None:
                keep(filling.name, value)
                if scale is not None:
                    keep(scale_parameter(filling.name), scale)
            del value, scale  # before the next is waited for
            bar.update(_bytes_of(files, filling))
    return assembler.errors()


def is_head_tied(files: CheckpointFiles, config) -> bool:
    """Whether the embedding serves as language-model head: as the configuration says, unless the files hold another."""
    head = files.tensors.get(HEAD)
    if head is None:
        return config.tie_word_embeddings or config.get_text_config().tie_word_embeddings
    if not config.get_text_config().tie_word_embeddings:
        return False
    embedding = next((name for name in files.tensors if parameter_of(name)[0] == EMBEDDING), None)
    if embedding is None or _are_equal(files, HEAD, embedding):
        return True
    logger.warning(
        f"config.json of {files.folder} says tie_word_embeddings, and the files hold an {HEAD} that differs from the "
        "embedding: it is used; set tie_word_embeddings to false to silence this"
    )
    return False


def _are_equal(files: CheckpointFiles, one: str, other: str) -> bool:
    """Whether two tensors are the same to the bit; a part of each is held at a time."""
    first, second = files.tensors[one], files.tensors[other]
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    for start in range(0, first.bytes, COMPARED):
        parts = [torch.empty(min(COMPARED, first.bytes - start), dtype=torch.uint8) for _ in range(2)]
        for name, part in zip((one, other), parts, strict=True):
            files.read_into(name, part, start)
        if not torch.equal(*parts):
            return False
    return True


def _in_file_order(files: CheckpointFiles, fillings: list[Filling]) -> list[Filling]:
    order = {name: number for number, name in enumerate(files.tensors)}
    return sorted(fillings, key=lambda filling: min(order[source.name] for source in filling.sources))


def ahead(
    jobs: Iterable[Job], start: Callable[[Job, Callable[..., Future]], Callable[[], Result]], size: Callable[[Job], int]
) -> Iterator[tuple[Job, Result]]:
    """Jobs in order, each with its result, which threads make ahead of the caller.

    Args:
        start: begins a job, whose work it gives to threads by a function such as `Executor.submit`; returns a function that
            waits for the result.
        size: bytes of a job's result. Those that are begun and not handed out have `READ_AHEAD` bytes together, or are one.
    """
    rest, waiting, held = deque(jobs), deque(), 0

    def begin() -> None:
        nonlocal held
        while rest and (not waiting or held + size(rest[0]) <= READ_AHEAD):
            job = rest.popleft()
            held += size(job)
            waiting.append((job, start(job, pool.submit)))

    with ThreadPoolExecutor(READERS, thread_name_prefix="checkpoint-reader") as pool, _one_thread_an_operation():
        try:
            begin()
            while waiting:
                job, wait = waiting.popleft()
                result = wait()
                del wait  # it holds the result
                held -= size(job)
                begin()  # the threads have work while the caller takes the result
                yield job, result
                del result  # before the next is waited for
        finally:
            pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _one_thread_an_operation() -> Iterator[None]:
    """PyTorch's operations run on the thread that calls them: the threads that it starts for each of several readers would
    wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _bytes_of(files: CheckpointFiles, filling: Filling) -> int:
    """Of a parameter, in the files."""
    names = [source.name for source in filling.sources]
    names += [scale_of(name) for name in names if scale_of(name) in files.tensors]
    return sum(files.tensors[name].bytes for name in names)


def _device_bytes(filling: Filling) -> int:
    """Of a parameter, in the form that it has on the device, without scales."""
    return sum(torch.Size(shape).numel() for shape, _ in filling.parts.values()) * filling.dtype.itemsize
