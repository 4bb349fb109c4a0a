"""Entropy of a router, the load of its experts, and the range of what goes to them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from custom_ops.monitoring.finite import BROKEN_BY_MLP
from custom_ops.ragged_moe.routing import route

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
    logits = router_logits.astype(jnp.float32)
    log = jax.nn.log_softmax(logits, axis=-1)
    entropy = -jnp.sum(jnp.exp(log) * log, axis=-1)
    expert, _ = route(router_logits, valid, top_k=top_k)  # the very call of `ragged_moe`: XLA computes it once
    chosen = expert.reshape(-1, 1) == jnp.arange(logits.shape[-1])

    def of_broken():
        return jnp.sum(chosen & jnp.repeat(broken, top_k)[:, None], axis=0, dtype=jnp.float32)

    spoilt = lax.cond(jnp.any(broken), of_broken, lambda: jnp.zeros(logits.shape[-1]))
    loads = [jnp.sum(chosen, axis=0, dtype=jnp.float32), spoilt]
    size = jnp.abs(rows.astype(jnp.float32))
    largest = jnp.max(size, axis=-1)
    flushed = jnp.sum((size > 0) & (size * FP8_RANGE < largest[:, None]), axis=-1)
    columns = [
        jnp.sum(valid), jnp.sum(jnp.where(valid, entropy, 0)), jnp.min(jnp.where(valid, entropy, jnp.inf)),
        jnp.min(jnp.where(valid, largest, jnp.inf)), jnp.max(jnp.where(valid, largest, 0)),
        jnp.sum(jnp.where(valid, flushed, 0)),
    ]  # fmt: skip
    return jnp.concatenate([jnp.stack([column.astype(jnp.float32) for column in columns]), *loads])[None]
