"""The least that a step takes: bytes that it must read and operations that it must do, at the chip's rates."""

from __future__ import annotations

from dataclasses import dataclass

from custom_ops.cost_model import Chip
from torchqwen_tpu.planning.load import Expectations
from torchqwen_tpu.planning.memory import Memory


@dataclass(frozen=True)
class Roofline:
    """Of one step on one core.

    bytes: weights of the experts that are hit, all other weights but the embedding once, states read and written, KV read.
    flops: two for each weight and token, attention and the delta rule; by device.
    peak, derated: seconds at peak rates, and at the bandwidth that was measured.
    """

    bytes: dict[str, float]
    flops: float
    peak: float
    derated: float


def roofline(
    expected: Expectations, memory: Memory, parameters: dict[str, int], chip: Chip, dtype: str, devices: int
) -> Roofline:
    """The bounds of a step.

    Args:
        parameters: of the whole model by part (see `count_parameters`).
    """
    config, load = expected.config, expected.load
    sparse = hasattr(config, "num_experts")
    experts = memory.weights.get("routed experts", 0)
    others = sum(memory.weights.values()) - experts - memory.weights.get("embedding", 0)
    if "head" not in memory.weights:  # tied: the embedding is read as the head
        others += memory.weights.get("embedding", 0)
    active = load.decoding + (load.sequences if load.prefill else 0)
    prefilled = load.sequences * load.prefill_context + load.prefill if load.prefill else 0
    pages = memory.page / memory.page_size * (load.decoding * load.context + prefilled)
    moved = {
        "experts": experts * (expected.experts_hit() if sparse else 1),
        "other weights": float(others),
        "states": 2.0 * active * memory.slot,
        "KV": float(pages),
    }
    flops = _flops(config, load, parameters) / devices
    by_flops = flops / chip.matrix_rate(dtype)
    total = sum(moved.values())
    return Roofline(moved, flops, max(total / chip.hbm_bandwidth, by_flops), max(total / chip.measured_bandwidth, by_flops))


def _flops(config, load, parameters: dict[str, int]) -> float:
    """Of all devices."""
    used = sum(count for part, count in parameters.items() if part not in ("routed experts", "embedding", "head"))
    if hasattr(config, "num_experts"):
        used += parameters["routed experts"] * config.num_experts_per_tok / config.num_experts
    linear = config.layer_types.count("linear_attention")
    full = len(config.layer_types) - linear
    rule = linear * config.linear_num_value_heads * 3 * 2 * config.linear_key_head_dim * config.linear_value_head_dim
    head = 2 * config.vocab_size * config.hidden_size
    mean = load.prefill_context + load.prefill / load.sequences / 2
    positions = load.ranks * (load.decoding * load.context + load.prefill * mean)
    attention = full * 4 * config.num_attention_heads * config.head_dim * positions
    selected = load.ranks * (load.decoding + (load.sequences if load.prefill else 0))
    return load.tokens * (2 * used + rule) + attention + selected * head
