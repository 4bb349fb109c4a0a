"""Mixture of experts for any backend: tokens sorted by expert, one tile of rows after the other.

The loop runs over the tiles that hold tokens, so an expert without tokens is never read, and one expert may take them all.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from custom_ops.ragged import tile_sequences
from custom_ops.ragged_moe.exchange import combine, dispatch, first_local_expert
from custom_ops.ragged_moe.routing import route


def ragged_moe(
    hidden, router_logits, valid, gate_up, down, *, top_k, token_axes=(), expert_axes=(), round_weights=False
):
    """See `custom_ops.ragged_moe` for arguments and results."""
    expert, weight = route(router_logits, valid, top_k=top_k)
    if round_weights:
        weight = weight.astype(hidden.dtype).astype(jnp.float32)
    rows, expert, weight = dispatch((hidden, expert, weight), token_axes)
    local = expert - first_local_expert(gate_up.shape[0], expert_axes)
    local = jnp.where((local >= 0) & (local < gate_up.shape[0]), local, gate_up.shape[0])
    tile = tile_rows(expert.size, router_logits.shape[-1])
    return combine(_local_experts(rows, local, weight, gate_up, down, tile), token_axes, expert_axes).astype(hidden.dtype)


def tile_rows(pairs: int, experts: int) -> int:
    """Rows a tile for `pairs` (token, expert) pairs over `experts` experts.

    One row (a matrix-vector product) while an expert sees few tokens; above, about twice the mean load, so that most
    experts are one tile, within 16 and 128 rows.
    """
    mean = pairs / experts
    return 1 if mean <= 4 else min(max(1 << round(2 * mean).bit_length() - 1, 16), 128)


def _local_experts(rows, expert, weight, gate_up, down, tile):
    """Weighted sum over each row's local experts; `expert` is out of range for experts of other devices: [rows, hidden]."""
    experts, top_k, width = gate_up.shape[0], expert.shape[1], down.shape[2]
    flat = expert.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    counts = jnp.sum(flat[None, :] == jnp.arange(experts)[:, None], axis=1, dtype=jnp.int32)
    tiles = tile_sequences(jnp.cumsum(counts) - counts, counts, tokens=flat.size, tile=tile)
    token = (order // top_k)[tiles.row]

    def one_tile(index, results):
        gate, up = jnp.split(_linear(rows[token[index]], gate_up[tiles.sequence[index]]), (width,), axis=-1)
        activated = (jax.nn.silu(gate) * up).astype(rows.dtype)
        return results.at[index].set(_linear(activated, down[tiles.sequence[index]]))

    results = jnp.zeros((token.shape[0], tile, rows.shape[1]), jnp.float32)
    results = lax.fori_loop(0, tiles.count, one_tile, results).reshape(-1, rows.shape[1])
    rank = jnp.zeros(flat.size, jnp.int32).at[order].set(jnp.arange(flat.size, dtype=jnp.int32))
    own = jnp.take(results, tiles.place[rank], axis=0, mode="fill", fill_value=0)
    return jnp.sum(own.reshape(*expert.shape, -1) * weight[..., None], axis=1)


def _linear(rows, weight):
    return jnp.einsum("ri,oi->ro", rows, weight, preferred_element_type=jnp.float32)
