"""Where NaN and infinity first appear: layer, half of the layer, and token."""

from __future__ import annotations

import jax.numpy as jnp

BROKEN_BY_MIXER, BROKEN_BY_MLP, FINE = 0, 1, 2
"""What a layer leaves of a row: a value that is not finite after attention or Gated DeltaNet; one after the experts or the MLP
only; none."""
FINITE = ("mixer_rows", "mixer_first", "mlp_rows", "mlp_first")
"""Columns of each layer: rows whose first such value appears in either half of it, and the first of them (within its rank)."""


def finiteness(mixed, output):
    """[T] int8 of `BROKEN_BY_MIXER`, `BROKEN_BY_MLP` or `FINE`, from a layer's hidden states [T, hidden size] halfway and at
    its end: one pass over both."""
    code = jnp.where(jnp.isfinite(mixed), jnp.where(jnp.isfinite(output), FINE, BROKEN_BY_MLP), BROKEN_BY_MIXER)
    return jnp.min(code.astype(jnp.int8), axis=-1)


def first_not_finite(codes, valid):
    """One row: `FINITE` of every layer, layer after layer.

    Args:
        codes: [layers, T] of `finiteness`.
        valid: [T] bool, which rows are tokens.
    """
    before = jnp.concatenate([jnp.full_like(codes[:1], FINE), codes[:-1]])
    fresh = valid & (before == FINE)
    columns = []
    for half in (BROKEN_BY_MIXER, BROKEN_BY_MLP):
        broken = fresh & (codes == half)
        columns += [jnp.sum(broken, axis=1), jnp.argmax(broken, axis=1)]
    return jnp.stack(columns, axis=1).astype(jnp.float32).reshape(1, -1)
