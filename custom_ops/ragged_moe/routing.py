"""Which experts a token goes to, and with what weight."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def route(router_logits, valid, *, top_k: int):
    """Softmax over all experts, the `top_k` largest, divided by their sum.

    Returns: experts [T, top_k] int32 (the number of experts where a row is not valid) and weights [T, top_k] float32.
    """
    probability, expert = lax.top_k(jax.nn.softmax(router_logits.astype(jnp.float32), axis=-1), top_k)
    weight = probability / jnp.sum(probability, axis=-1, keepdims=True)
    return jnp.where(valid[:, None], expert, router_logits.shape[-1]), weight
