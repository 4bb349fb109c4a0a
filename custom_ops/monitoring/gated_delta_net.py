"""Ranges of the gates of Gated DeltaNet, and norms of its states."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from custom_ops.gated_delta_net.reference import gates
from custom_ops.monitoring.sample import sample_sequences

GATES = ("beta_min", "beta_max", "decay_min", "decay_max")
"""First columns: ranges of beta and of the factor on the state before a token, over all tokens and heads of the step."""
STATES = ("sequence", "position", "norm")
"""Columns that follow, for each of `SAMPLES` states: the sequence within its rank, how many tokens its state holds (0 for no
sample), and the largest Frobenius norm of a head's state."""
SAMPLES = 4


def gated_delta_net_statistics(
    b, a, A_log, dt_bias, state, valid, query_length, context_length, slot, layer, *, head_axes=()
):
    """One row: `GATES`, then `STATES` of up to `SAMPLES` sequences, others from step to step.

    Args:
        b, a, A_log, dt_bias, slot: as `custom_ops.gated_delta_net` has them.
        state: [layers, N, value heads, key dim, value dim] of all layers, after the step.
        layer: [] int32, which of them.
        valid: [T] bool, which rows are tokens.
        head_axes: mesh axes that split the heads.
    """
    # Both gates are monotonic: their ranges follow from those of b and a, head by head.
    ends = [
        end(jnp.where(valid[:, None], part.astype(jnp.float32), fill), axis=0)
        for end, fill in ((jnp.min, jnp.inf), (jnp.max, -jnp.inf))
        for part in (b, a)
    ]
    beta_min, decay_max = gates(ends[0], ends[1], A_log, dt_bias)
    beta_max, decay_min = gates(ends[2], ends[3], A_log, dt_bias)
    # One reduction to a vector: XLA for TPU gives each scalar a kernel and a trip to HBM.
    signs = jnp.array([-1.0, 1, -1, 1])
    ranges = signs * jnp.max(jnp.stack([-beta_min, beta_max, -jnp.exp(decay_min), jnp.exp(decay_max)]), axis=1)
    count = min(SAMPLES, len(slot))
    sequence, turn, _ = sample_sequences(query_length, context_length, count)
    states = state.reshape(-1, *state.shape[2:])[layer * state.shape[1] + slot[sequence]]
    norm = jnp.sqrt(jnp.max(jnp.sum(jnp.square(states.astype(jnp.float32)), axis=(-2, -1)), axis=-1))
    position = jnp.where((turn == 0) & (query_length[sequence] > 0), (context_length + query_length)[sequence], 0)
    samples = jnp.stack([sequence.astype(jnp.float32), position.astype(jnp.float32), norm], axis=1)
    samples = jnp.pad(samples, ((0, SAMPLES - count), (0, 0)))
    row = jnp.concatenate([ranges, samples.reshape(-1)])
    if head_axes:  # sequences and positions are the same everywhere
        smallest, largest = lax.pmin(row, head_axes), lax.pmax(row, head_axes)
        row = jnp.where(jnp.isin(jnp.arange(len(row)), jnp.array([0, 2])), smallest, largest)
    return row[None]
