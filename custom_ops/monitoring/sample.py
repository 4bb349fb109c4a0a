"""A few sequences of a batch, others from step to step."""

from __future__ import annotations

import jax.numpy as jnp


def sample_sequences(query_length, context_length, count: int):
    """`count` sequences among those with rows; the choice changes as they grow.

    Returns: sequence [count], how often each was chosen before [count], and how many there are to choose from. With fewer
    sequences than `count` all are chosen, and some several times.
    """
    has_rows = query_length > 0
    present = jnp.maximum(jnp.sum(has_rows, dtype=jnp.int32), 1)
    turn = jnp.cumsum(has_rows, dtype=jnp.int32)  # of each among those with rows, from one
    # Contexts grow in regular steps; a multiplicative hash (Knuth) keeps the choice from falling in step with them.
    longest = jnp.max(jnp.where(has_rows, context_length + query_length, 0)).astype(jnp.uint32)
    offset = ((longest * jnp.uint32(2654435769)) >> 16).astype(jnp.int32)
    number = jnp.arange(count)
    chosen = (offset + number) % present + 1
    return jnp.argmax(turn == chosen[:, None], axis=1).astype(jnp.int32), number // present, present
