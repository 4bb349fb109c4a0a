"""Entropy of a router, the load of its experts, and the range of what goes to them."""

from __future__ import annotations

import jax.numpy as jnp

from custom_ops.monitoring.finite import BROKEN_BY_MLP
from custom_ops.ragged_moe.routing import chosen_experts

ROUTING = ("tokens", "entropy", "entropy_min", "largest_min", "largest_max", "flushed")
"""First columns: tokens, the sum of their routers' entropies and the smallest one, in nats; smallest and largest over the
tokens of a row's largest absolute value; and how many values FP8 with a scale a token would round to zero. (Such a scale is
the row's largest value over 448: nothing is clipped above, so this is what FP8 loses.) The number of tokens that went to each
expert follows, then how many of these left the experts with a value that is not finite."""
FP8_RANGE = 448 * 2.0**10
"""Largest value of float8_e4m3fn over half of its smallest: below, a value is rounded to zero."""


def routing_statistics(rows, router_logits, valid, finiteness, *, top_k: int):
    """One row: `ROUTING`, then two counts for every expert.

    Args:
        rows: [T, hidden size], what goes to the experts.
        router_logits: [T, experts]
        valid: [T] bool, which rows are tokens.
        finiteness: [T] as the function of that name gives it.
    """
    broken = valid & (finiteness == BROKEN_BY_MLP)
    chosen = chosen_experts(router_logits, valid, top_k=top_k)
    loads = [jnp.sum(kept, axis=0, dtype=jnp.float32) for kept in (chosen, chosen & broken[:, None])]
    logits = router_logits.astype(jnp.float32)
    below = logits - jnp.max(logits, axis=-1, keepdims=True)
    total = jnp.sum(jnp.exp(below), axis=-1)
    entropy = jnp.log(total) - jnp.sum(jnp.exp(below) * below, axis=-1) / total
    size = jnp.abs(rows.astype(jnp.float32))
    largest = jnp.max(size, axis=-1)
    flushed = jnp.sum((size > 0) & (size * FP8_RANGE < largest[:, None]), axis=-1, dtype=jnp.float32)
    # Two reductions to vectors: XLA for TPU gives each scalar a kernel and a trip to HBM.
    sums = jnp.sum(jnp.where(valid, jnp.stack([valid.astype(jnp.float32), entropy, flushed]), 0), axis=1)
    ends = jnp.max(jnp.where(valid, jnp.stack([-entropy, -largest, largest]), -jnp.inf), axis=1)
    columns = [sums[:2], -ends[:2], jnp.maximum(ends[2:], 0), sums[2:]]
    return jnp.concatenate([*columns, *loads])[None]
