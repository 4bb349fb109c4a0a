"""What the experts' kernel works on and keeps in memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from custom_ops.ragged_moe.pallas_plan import LANES, Plan


class Operands(NamedTuple):
    """Rows and results are words (see `pallas_rows`); all but the layer and the scales is in HBM."""

    layer: Any  # [1] in SMEM, of the stacks of weights
    rows: Any
    gate_up: Any
    down: Any
    gate_up_scale: Any  # by channel: [experts, 2, chunks, 1, chunk] in VMEM; by block: flat in SMEM; or None
    down_scale: Any  # by channel: [experts, 1, hidden] in VMEM; by block: flat in SMEM; or None
    results: Any


class Scratch(NamedTuple):
    """References to what the kernel keeps; `declare` makes room for it."""

    rows_in: Any  # [2, tile * pitch, 128] words, of this item and the next
    matrix: Any  # [tile, hidden] BF16
    gate_up: Any  # [slots, 2, chunk, hidden]
    down: Any  # [slots, hidden, chunk]
    scaled_gate_up: Any  # [2, chunk, hidden] BF16, for weights with a scale for each block
    scaled_down: Any  # [hidden, chunk]
    activated: Any  # [tile, chunk] BF16
    total: Any  # [tile, hidden] float32
    rows_out: Any  # [2, tile * pitch, 128] words, of this item and the one before
    rows_in_sem: Any
    chunk_sem: Any
    rows_out_sem: Any


def declare(plan: Plan, weight_dtype) -> Scratch:
    """Memory for `Scratch`; None for what these weights do not need."""
    shape, size, slots, tile = plan.shape, plan.chunk, plan.slots, plan.tile
    words = pltpu.VMEM((2, tile * plan.pitch, LANES), jnp.uint32)
    by_block = shape.scales == "block"
    return Scratch(
        rows_in=words,
        matrix=pltpu.VMEM((tile, shape.hidden), jnp.bfloat16),
        gate_up=pltpu.VMEM((slots, 2, size, shape.hidden), weight_dtype),
        down=pltpu.VMEM((slots, shape.hidden, size), weight_dtype),
        scaled_gate_up=pltpu.VMEM((2, size, shape.hidden), jnp.bfloat16) if by_block else None,
        scaled_down=pltpu.VMEM((shape.hidden, size), jnp.bfloat16) if by_block else None,
        activated=pltpu.VMEM((tile, size), jnp.bfloat16),
        total=pltpu.VMEM((tile, shape.hidden), jnp.float32),
        rows_out=words,
        rows_in_sem=pltpu.SemaphoreType.DMA((2,)),
        chunk_sem=pltpu.SemaphoreType.DMA((slots,)),
        rows_out_sem=pltpu.SemaphoreType.DMA((2,)),
    )
