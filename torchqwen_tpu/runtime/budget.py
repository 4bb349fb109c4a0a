"""How many slots and pages an engine has: from a memory budget."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch_xla
import torch_xla.core.xla_model as xm

from torchqwen_tpu.batch import bucket
from torchqwen_tpu.cache import CacheLayout, CacheShape
from torchqwen_tpu.config import EngineConfig
from torchqwen_tpu.ops import PAGED

_CPU_MEMORY = 2**30
_TPU_SHARE = 0.9


@dataclass(frozen=True)
class Budget:
    """Sizes of an engine's pools, and the longest request they allow."""

    shape: CacheShape
    checkpoints: int
    max_length: int


def plan_budget(layout: CacheLayout, config: EngineConfig, limit: int) -> Budget:
    """Sizes for `config` on the devices of `layout`; `limit` is the model's longest sequence.

    Raises:
        ValueError: no page fits the memory, or the free memory is unknown; it says what would help.
    """
    # At least two rows: XLA:CPU computes products with a single row element by element.
    rows = bucket(-(-config.max_sequences // layout.mesh.ranks), 2)
    checkpoints = rows if config.checkpoints is None else config.checkpoints
    longest = min(limit, config.max_length or limit)
    most = rows * -(-longest // layout.page_size)
    pages = config.pages or min(most, _affordable_pages(layout, config.cache_memory, rows, checkpoints))
    longest = min(longest, pages * layout.page_size)
    width = bucket(-(-longest // layout.page_size))
    return Budget(CacheShape(rows, width, layout.page_size, pool=pages), checkpoints, longest)


def _affordable_pages(layout: CacheLayout, memory: int | float | None, rows: int, checkpoints: int) -> int:
    """Pages a rank that fit beside the states of `rows` slots and `checkpoints` prefixes."""
    if memory is None:
        memory = _TPU_SHARE if torch_xla.runtime.device_type() == "TPU" else _CPU_MEMORY
    if memory <= 1:
        memory = int(memory * _free_memory())
    page, state = _sizes(layout)
    states = (rows + checkpoints) * state
    pages = int(memory - states) // page
    if pages < 1:
        raise ValueError(
            f"cache_memory of {memory:,} bytes a device has no room for a page of {page:,} bytes beside the states of {rows} "
            f"sequences and {checkpoints} checkpoints ({states:,} bytes); raise it, or lower max_sequences or checkpoints"
        )
    return pages


def _sizes(layout: CacheLayout) -> tuple[int, int]:
    """Bytes a device of a page and of a slot, over all layers."""
    page = state = 0
    for size, dtype, axes in layout.arrays(CacheShape(1, 1, layout.page_size)):
        shards = math.prod(layout.mesh.shards(axis) for axis in axes if axis)
        size = math.prod(size) * dtype.itemsize // shards
        page, state = (page + size, state) if axes in PAGED else (page, state + size)
    return page, state


def _free_memory() -> int:
    """Bytes that are free on a device."""
    try:
        memory = xm.get_memory_info(torch_xla.device())
        return memory["bytes_limit"] - memory["bytes_used"]
    except (RuntimeError, KeyError) as error:
        raise ValueError("the device does not tell how much memory is free; pass cache_memory in bytes") from error
