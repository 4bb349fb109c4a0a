"""Which experts a token goes to, and with what weight."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax


def route(router_logits, valid, *, top_k: int):
    """Softmax over all experts, the `top_k` largest, divided by their sum.

    Returns: experts [T, top_k] int32 (the number of experts where a row is not valid) and weights [T, top_k] float32.
    """
    share = jax.nn.softmax(router_logits.astype(jnp.float32), axis=-1)
    probability, expert = lax.platform_dependent(
        share, tpu=functools.partial(_largest, count=top_k), default=lambda share: tuple(lax.top_k(share, top_k))
    )
    weight = probability / jnp.sum(probability, axis=-1, keepdims=True)
    return jnp.where(valid[:, None], expert, router_logits.shape[-1]), weight


def _largest(share, *, count: int):
    """`lax.top_k` of what is not negative, by striking out the largest `count` times. XLA for TPU sorts whole rows instead,
    which compiles for a minute where there are thousands."""
    number, chosen = lax.broadcasted_iota(jnp.int32, share.shape, 1), []
    for _ in range(count):
        first = jnp.argmax(share, axis=1).astype(jnp.int32)[:, None]
        chosen.append((jnp.max(share, axis=1, keepdims=True), first))
        share = jnp.where(number == first, -1.0, share)
    probability, expert = (jnp.concatenate(parts, axis=1) for parts in zip(*chosen, strict=True))
    return probability, expert
