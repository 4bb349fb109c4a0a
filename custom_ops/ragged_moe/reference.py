"""Mixture of experts as it is defined: every local expert on every token, weighted by the router, in FP32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from custom_ops.ragged_moe.exchange import combine, dispatch, first_local_expert
from custom_ops.ragged_moe.routing import route


def ragged_moe(
    hidden, router_logits, valid, gate_up, down, *, top_k, token_axes=(), expert_axes=(), round_weights=False
):
    """See `custom_ops.ragged_moe` for arguments and results."""
    expert, weight = route(router_logits, valid, top_k=top_k)
    if round_weights:
        weight = weight.astype(hidden.dtype).astype(jnp.float32)
    rows, expert, weight = dispatch((hidden, expert, weight), token_axes)
    rows = rows.astype(jnp.float32)

    def one_expert(total, local):
        number, gate_up, down = local
        gate, up = jnp.split(rows @ gate_up.astype(jnp.float32).T, 2, axis=-1)
        result = (jax.nn.silu(gate) * up) @ down.astype(jnp.float32).T
        share = jnp.sum(jnp.where(expert == number, weight, 0), axis=-1)
        return total + share[:, None] * result, None

    numbers = first_local_expert(gate_up.shape[0], expert_axes) + jnp.arange(gate_up.shape[0])
    total, _ = jax.lax.scan(one_expert, jnp.zeros(rows.shape, jnp.float32), (numbers, gate_up, down))
    return combine(total, token_axes, expert_axes).astype(hidden.dtype)
