"""The mixture of experts around its experts: routing, dispatch and combine are the same for every implementation."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax.numpy as jnp

from custom_ops.ragged_moe.exchange import combine, dispatch, first_local_expert
from custom_ops.ragged_moe.routing import route


def with_experts(experts: Callable) -> Callable:
    """The operation `ragged_moe` (see `custom_ops.ragged_moe`) whose local experts are computed by `experts`."""
    return functools.partial(_ragged_moe, experts)


def _ragged_moe(
    experts, hidden, router_logits, valid, gate_up, down, gate_up_scale=None, down_scale=None, *,
    top_k, token_axes=(), expert_axes=(), round_weights=False, **options,
):  # fmt: skip
    if gate_up_scale is not None:
        options |= {"gate_up_scale": gate_up_scale, "down_scale": down_scale}
    expert, weight = route(router_logits, valid, top_k=top_k)
    if round_weights:
        weight = weight.astype(hidden.dtype).astype(jnp.float32)
    rows, expert, weight = dispatch((hidden, expert, weight), token_axes)
    local = expert - first_local_expert(gate_up.shape[0], expert_axes)
    local = jnp.where((local >= 0) & (local < gate_up.shape[0]), local, gate_up.shape[0])
    partial = experts(rows, local, weight, gate_up, down, num_experts=router_logits.shape[-1], **options)
    return combine(partial, token_axes, expert_axes).astype(hidden.dtype)
