"""Arguments of the local experts for tests: weights in every format, and rows spread over the experts in every way."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from custom_ops.ragged_moe.quantized import BLOCK, FP8, FP8_LARGEST

FORMATS = ("bfloat16", "fp8 by channel", "fp8 by block")


class Weights(NamedTuple):
    gate_up: np.ndarray
    down: np.ndarray
    gate_up_scale: np.ndarray | None = None
    down_scale: np.ndarray | None = None


def quantized(weight: np.ndarray, by_block: bool) -> tuple:
    """[experts, outputs, inputs] → FP8 and scales, by output channel or by block, ragged at the edges."""
    experts, outputs, inputs = weight.shape
    if not by_block:
        scale = np.abs(weight).max(-1) / FP8_LARGEST
        return jnp.asarray(weight / scale[..., None], FP8), scale.astype(np.float32)
    padded = np.pad(weight, [(0, 0), (0, -outputs % BLOCK), (0, -inputs % BLOCK)])
    blocks = padded.reshape(experts, -(-outputs // BLOCK), BLOCK, -(-inputs // BLOCK), BLOCK)
    scale = np.abs(blocks).max((2, 4)) / FP8_LARGEST
    values = (blocks / scale[:, :, None, :, None]).reshape(padded.shape)[:, :outputs, :inputs]
    return jnp.asarray(values, FP8), scale.astype(np.float32)


def weights(experts: int, hidden: int, width: int, form: str, seed: int = 0) -> Weights:
    """Random weights that keep the size of what goes through them; scales differ between channels and blocks."""
    rng = np.random.default_rng(seed)

    def normal(outputs, inputs):
        spread = np.exp(rng.uniform(-1, 1, (experts, outputs, 1))) * np.exp(rng.uniform(-1, 1, (experts, 1, inputs)))
        return (rng.standard_normal((experts, outputs, inputs)) * spread / inputs**0.5).astype(np.float32)

    gate_up, down = normal(2 * width, hidden), normal(hidden, width)
    if not form.startswith("fp8"):
        return Weights(jnp.asarray(gate_up, form), jnp.asarray(down, form))
    by_block = form == "fp8 by block"
    (gate_up, gate_up_scale), (down, down_scale) = quantized(gate_up, by_block), quantized(down, by_block)
    return Weights(gate_up, down, gate_up_scale, down_scale)


def routing(load: str, rows: int, top_k: int, experts: int, local: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Local expert numbers [rows, top_k] (`local` where the expert is elsewhere) and weights [rows, top_k] float32."""
    rng = np.random.default_rng(seed)
    score = rng.standard_normal((rows, experts))
    if load == "skewed":
        score += np.linspace(4, 0, experts)
    elif load == "one expert":
        score[:, 1] = 50
    elif load == "every other expert":
        score[:, 1::2] = -50
    elif load == "no local expert":
        score[:, :local] = -50
    expert = np.argsort(-score, axis=1)[:, :top_k].astype(np.int32)
    expert = np.where(expert < local, expert, local)
    if load == "invalid rows":
        expert[rng.uniform(size=rows) < 0.5] = local
    weight = rng.uniform(0.05, 0.3, (rows, top_k)).astype(np.float32)
    return expert, weight


def rows_of(rows: int, hidden: int, dtype: str, seed: int = 0) -> tuple:
    """Rows of this type, and the scale of each for FP8 (None for other types); rows differ in size."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, hidden)) * np.exp(rng.uniform(-2, 2, (rows, 1)))
    if dtype != "float8_e4m3fn":
        return jnp.asarray(values, dtype), None
    scale = np.abs(values).max(-1) / FP8_LARGEST
    return jnp.asarray(values / scale[:, None], FP8), scale.astype(np.float32)
