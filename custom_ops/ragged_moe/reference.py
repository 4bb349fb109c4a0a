"""Local experts as they are defined: every expert on every token, weighted by the router, in FP32."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def experts(rows, expert, weight, gate_up, down, *, num_experts, layer=None):
    """See `custom_ops.ragged_moe` for arguments and results."""
    if layer is not None:
        gate_up, down = gate_up[layer], down[layer]
    rows = rows.astype(jnp.float32)

    def one_expert(total, local):
        number, gate_up, down = local
        gate, up = jnp.split(rows @ gate_up.astype(jnp.float32).T, 2, axis=-1)
        result = (jax.nn.silu(gate) * up) @ down.astype(jnp.float32).T
        share = jnp.sum(jnp.where(expert == number, weight, 0), axis=-1)
        return total + share[:, None] * result, None

    numbers = jnp.arange(gate_up.shape[0])
    total, _ = jax.lax.scan(one_expert, jnp.zeros(rows.shape, jnp.float32), (numbers, gate_up, down))
    return total
