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
    experts, hidden, router_logits, valid, gate_up, down, *, top_k, token_axes=(), expert_axes=(), round_weights=False,
    layer=None,
):
    stacked = {} if layer is None else {"layer": layer}
    expert, weight = route(router_logits, valid, top_k=top_k)
    if round_weights:
        weight = weight.astype(hidden.dtype).astype(jnp.float32)
    rows, expert, weight = dispatch((hidden, expert, weight), token_axes)
    local_experts = gate_up.shape[-3]
    local = expert - first_local_expert(local_experts, expert_axes)
    local = jnp.where((local >= 0) & (local < local_experts), local, local_experts)
    partial = experts(rows, local, weight, gate_up, down, num_experts=router_logits.shape[-1], **stacked)
    return combine(partial, token_axes, expert_axes).astype(hidden.dtype)
