"""From checkpoint files to parameters on the devices, a parameter at a time, everything checked before the first is read.

Files are mapped and read once, in the order in which tensors lie in them. Threads put parameters together on the host, a
bounded number of bytes ahead of the one that places them on the devices; what was read is given back at once. So the host
holds the parameter that is being placed and what was read ahead, however large the model is.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

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

READ_AHEAD = 512 << 20
"""Bytes of parameters that may wait on the host to be placed."""
READERS = min(8, os.cpu_count() or 1)


class Place(Protocol):
    """Puts a tensor of the host on the devices as the parameter `name`, or as one of a stack of parameters."""

    def __call__(self, name: str, tensor: torch.Tensor, index: int | None = None) -> None: ...


def load_parameters(files: CheckpointFiles, layout: WeightLayout, fillings: list[Filling], place: Place) -> dict[str, float]:
    """Read every parameter and place it, with its scales if it is FP8.

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
        for filling, (value, scale) in _ahead(_in_file_order(files, fillings), assembler.assemble, _device_bytes):
            place(filling.holder, value, filling.index)
            if scale is not None:
                place(scale_parameter(filling.holder), scale, filling.index)
            del value, scale  # before the next is waited for
            for source in filling.sources:
                files.release(source.name)
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
    if embedding is None or torch.equal(files.read(HEAD), files.read(embedding)):
        return True
    logger.warning(
        f"config.json of {files.folder} says tie_word_embeddings, and the files hold an {HEAD} that differs from the "
        "embedding: it is used; set tie_word_embeddings to false to silence this"
    )
    return False


def _in_file_order(files: CheckpointFiles, fillings: list[Filling]) -> list[Filling]:
    order = {name: number for number, name in enumerate(files.tensors)}
    return sorted(fillings, key=lambda filling: min(order[source.name] for source in filling.sources))


def _ahead(jobs: list[Filling], run: Callable, size: Callable[[Filling], int]) -> Iterator[tuple[Filling, tuple]]:
    """Jobs in order with what `run` makes of each, in threads, `READ_AHEAD` bytes of results (or one result) ahead."""
    waiting: deque[tuple[Filling, Future]] = deque()
    held = 0
    with ThreadPoolExecutor(READERS, thread_name_prefix="checkpoint-reader") as pool:
        try:
            for job in jobs:
                while waiting and held + size(job) > READ_AHEAD:
                    first, result = waiting.popleft()
                    held -= size(first)
                    yield first, result.result()
                    del result  # the future holds what was just placed
                waiting.append((job, pool.submit(run, job)))
                held += size(job)
            while waiting:
                first, result = waiting.popleft()
                yield first, result.result()
                del result
        finally:
            pool.shutdown(cancel_futures=True)


def _bytes_of(files: CheckpointFiles, filling: Filling) -> int:
    """Of a parameter, in the files."""
    names = [source.name for source in filling.sources]
    names += [scale_of(name) for name in names if scale_of(name) in files.tensors]
    return sum(files.tensors[name].bytes for name in names)


def _device_bytes(filling: Filling) -> int:
    """Of a parameter, in the form that it has on the device, without scales."""
    return sum(torch.Size(shape).numel() for shape, _ in filling.parts.values()) * filling.dtype.itemsize
