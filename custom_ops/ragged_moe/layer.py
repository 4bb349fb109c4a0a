"""The mixture of experts around its experts: routing, dispatch and combine are the same for every implementation."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from custom_ops.all_gather import xla as all_gather_xla
from custom_ops.ragged_moe import cost
from custom_ops.ragged_moe.exchange import arrived, combine, dispatch, first_local_expert
from custom_ops.ragged_moe.routing import route
from custom_ops.ragged_moe.wire import Tokens, check_experts, from_wire, to_wire
from custom_ops.reduce_scatter import xla as reduce_scatter_xla


def with_experts(experts: Callable) -> Callable:
    """The operation `ragged_moe` (see `custom_ops.ragged_moe`) whose local experts are computed by `experts`."""
    return functools.partial(_ragged_moe, _send, functools.partial(_local_experts, experts))


def with_packed_experts(send: Callable, experts: Callable) -> Callable:
    """The same of functions that handle tokens in the form in which they travel, `pallas_send.send` and
    `pallas_tpu.experts_of_packed`: no pass over all rows packs or opens them."""
    return functools.partial(_ragged_moe, send, experts)


def _ragged_moe(
    send, experts, hidden, router_logits, valid, gate_up, down, gate_up_scale=None, down_scale=None, *,
    top_k, token_axes=(), expert_axes=(), round_weights=False, wire=None, sum_dtype="float32", micro_batches=1,
    all_gather=all_gather_xla.all_gather, reduce_scatter=reduce_scatter_xla.reduce_scatter, layer=None, interpret=None,
):  # fmt: skip
    wire = jnp.dtype(wire or hidden.dtype)
    if micro_batches is None:
        micro_batches = _micro_batches(hidden, router_logits, gate_up, top_k, token_axes, expert_axes, wire)
    _check(hidden, router_logits, gate_up, top_k, expert_axes, micro_batches)
    options = {} if interpret is None else {"interpret": interpret}
    tokens = send(hidden, router_logits, valid, top_k=top_k, round_weights=round_weights, wire=wire, **options)
    if gate_up_scale is not None:
        options |= {"gate_up_scale": gate_up_scale, "down_scale": down_scale}
    if layer is not None:
        options["layer"] = layer
    local_experts = functools.partial(
        experts, first_expert=first_local_expert(gate_up.shape[-3], expert_axes), top_k=top_k,
        num_experts=router_logits.shape[-1], dtype=hidden.dtype, **options,
    )  # fmt: skip

    parts = [_part(tokens, number, micro_batches) for number in range(micro_batches)]
    batches, results = [dispatch(parts[0], token_axes, expert_axes, all_gather)], []
    for part in parts[1:]:
        # The first one has the links to itself; the others are XLA's, which run beside the experts.
        part, batches[0] = lax.optimization_barrier((part, batches[0]))
        batches.append(dispatch(part, token_axes, expert_axes, all_gather_xla.all_gather))
    for number in range(micro_batches):
        partial = local_experts(batches[number], gate_up, down)
        if number + 1 < micro_batches:
            # The next batch is opened only after these experts, or XLA waits for it before them.
            partial, batches[number + 1] = lax.optimization_barrier((partial, batches[number + 1]))
        results.append(combine(partial.astype(sum_dtype), token_axes, expert_axes, reduce_scatter))
    return (results[0] if micro_batches == 1 else jnp.concatenate(results)).astype(hidden.dtype)


def _send(hidden, router_logits, valid, *, top_k: int, round_weights: bool, wire):
    expert, weight = route(router_logits, valid, top_k=top_k)
    if round_weights:
        weight = weight.astype(hidden.dtype).astype(jnp.float32)
    return Tokens(*to_wire(hidden, wire), expert, weight)


def _local_experts(experts, dispatched, gate_up, down, *, first_expert, top_k: int, dtype, **options):
    own, hidden = gate_up.shape[-3], down.shape[-2]
    rows, row_scale, expert, weight = arrived(dispatched, hidden=hidden, top_k=top_k)
    local = expert - first_expert
    local = jnp.where((local >= 0) & (local < own), local, own)
    rows, row_scale = from_wire(rows[:, :hidden], row_scale, dtype)
    if row_scale is not None:
        options["row_scale"] = row_scale
    return experts(rows, local, weight, gate_up, down, **options)


def _part(tokens, number: int, parts: int):
    """One of `parts` runs of equally many rows."""

    def of_array(array):
        size = len(array) // parts
        return array[number * size : (number + 1) * size]

    return jax.tree.map(of_array, tokens)


def _micro_batches(hidden, router_logits, gate_up, top_k: int, token_axes, expert_axes, wire) -> int:
    if not token_axes or len(expert_axes) != 2:
        return 1
    chips, cores = (lax.axis_size(axis) for axis in expert_axes)
    tokens, width = hidden.shape[0] * lax.axis_size(token_axes), gate_up.shape[-2] // 2
    if tokens % (chips * cores):
        return 1
    return cost.micro_batches(
        cost.MoeShape(
            chips, cores, tokens, hidden.shape[1], router_logits.shape[1], top_k, width, wire.name, gate_up.dtype.name
        )
    )


def _check(hidden, router_logits, gate_up, top_k: int, expert_axes: tuple[str, ...], micro_batches: int) -> None:
    num_experts, devices = router_logits.shape[-1], lax.axis_size(expert_axes) if expert_axes else 1
    check_experts(num_experts)
    if gate_up.shape[-3] * devices != num_experts:
        raise ValueError(
            f"the router chooses among {num_experts} experts, but there are {gate_up.shape[-3]} on each of {devices} devices"
        )
    if not 0 < top_k <= num_experts:
        raise ValueError(f"top_k is {top_k}; it has to lie between 1 and the number of experts, {num_experts}")
    if micro_batches < 1 or hidden.shape[0] % micro_batches:
        raise ValueError(f"{hidden.shape[0]} tokens a device do not divide into {micro_batches} micro-batches")
