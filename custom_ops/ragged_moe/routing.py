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


def chosen_experts(router_logits, valid, *, top_k: int):
    """[T, experts] bool: which experts `route` sends each token to."""
    share = jax.nn.softmax(router_logits.astype(jnp.float32), axis=-1)  # as in `route`: XLA computes both once
    chosen = lax.platform_dependent(
        share, tpu=functools.partial(_is_among_largest, count=top_k), default=functools.partial(_is_among_top, count=top_k)
    )
    return chosen & valid[:, None]


def _is_among_top(share, *, count: int):
    _, expert = lax.top_k(share, count)
    return jnp.any(expert[:, :, None] == jnp.arange(share.shape[1]), axis=1)


def _is_among_largest(share, *, count: int):
    """The same without indices, of which each largest one would be a slow reduction for XLA for TPU: the value at which a row
    is cut, from as many sweeps that only read, then of the values that are equal to it the first ones."""
    number = lax.broadcasted_iota(jnp.int32, share.shape, 1)
    value = jnp.full_like(share[:, :1], jnp.inf)
    cut = jnp.full_like(value, -1)
    for _ in range(count):
        value = jnp.max(jnp.where(share < value, share, -1), axis=1, keepdims=True)
        enough = jnp.sum(share >= value, axis=1, keepdims=True) >= count
        cut = jnp.where(enough & (cut < 0), value, cut)
    equal = share == cut

    def following(last):
        return jnp.min(jnp.where(equal & (number > last), number, share.shape[1]), axis=1, keepdims=True)

    def take(state):
        last, left = state
        return jnp.where(left > 0, following(last), last), left - 1

    left = count - jnp.sum(share > cut, axis=1, keepdims=True, dtype=jnp.int32)
    # Turns only where several values that are equal to the cut are among the largest.
    last, _ = lax.while_loop(lambda state: jnp.any(state[1] > 0), take, (following(jnp.full_like(left, -1)), left - 1))
    return (share > cut) | (equal & (number <= last))


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
