"""Entropy of a router, and the load of its experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from custom_ops.monitoring.finite import BROKEN_BY_MLP
from custom_ops.monitoring.sample import when

ROUTING = ("tokens", "entropy", "entropy_min")
"""First columns: tokens, the sum of their routers' entropies and the smallest one, in nats. The number of tokens that went to
each expert follows, then how many of these left the experts with a value that is not finite."""


def routing_statistics(router_logits, valid, finiteness, look=None, *, top_k: int):
    """One row: `ROUTING`, then two counts for every expert.

    Args:
        router_logits: [T, experts]
        valid: [T] bool, which rows are tokens.
        finiteness: [T] as the function of that name gives it; where the experts' values are not finite it is looked at
            in any case.
    """
    broken = valid & (finiteness == BROKEN_BY_MLP)
    if look is not None:
        look = look | jnp.any(broken)

    def compute():
        logits = router_logits.astype(jnp.float32)
        log = jax.nn.log_softmax(logits, axis=-1)
        entropy = -jnp.sum(jnp.exp(log) * log, axis=-1)
        _, expert = lax.top_k(logits, top_k)
        chosen = expert.reshape(-1, 1) == jnp.arange(logits.shape[-1])
        loads = [jnp.sum(chosen & jnp.repeat(rows, top_k)[:, None], axis=0, dtype=jnp.float32) for rows in (valid, broken)]
        totals = [jnp.sum(valid), jnp.sum(jnp.where(valid, entropy, 0)), jnp.min(jnp.where(valid, entropy, jnp.inf))]
        return jnp.concatenate([jnp.stack([total.astype(jnp.float32) for total in totals]), *loads])

    return when(look, compute)[None]
