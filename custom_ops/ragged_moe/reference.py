"""Local experts as they are defined: every expert on every token, weighted by the router, in FP32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from custom_ops.ragged_moe.quantized import check_scales, of_elements


def experts(
    rows, expert, weight, gate_up, down, gate_up_scale=None, down_scale=None, *, num_experts, row_scale=None, layer=None
):
    """See `custom_ops.ragged_moe` for arguments and results."""
    if layer is not None:
        gate_up, down, gate_up_scale, down_scale = (
            None if stack is None else stack[layer] for stack in (gate_up, down, gate_up_scale, down_scale)
        )
    check_scales(rows, gate_up, down, gate_up_scale, down_scale, row_scale)
    rows = rows.astype(jnp.float32)
    if row_scale is not None:
        rows = rows * row_scale[:, None]

    def one_expert(total, local):
        number, gate_up, down, gate_up_scale, down_scale = local
        gate, up = jnp.split(rows @ _dequantized(gate_up, gate_up_scale).T, 2, axis=-1)
        result = (jax.nn.silu(gate) * up) @ _dequantized(down, down_scale).T
        share = jnp.sum(jnp.where(expert == number, weight, 0), axis=-1)
        return total + share[:, None] * result, None

    numbers = jnp.arange(gate_up.shape[0])
    local = (numbers, gate_up, down, gate_up_scale, down_scale)
    total, _ = jax.lax.scan(one_expert, jnp.zeros(rows.shape, jnp.float32), local)
    return total


def _dequantized(weight, scale):
    weight = weight.astype(jnp.float32)
    return weight if scale is None else weight * of_elements(scale, weight.shape)
