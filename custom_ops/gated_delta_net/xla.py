"""Gated DeltaNet for any backend: chunks of tokens as matrix products, decode as one batched update.

The chunked form is that of "Parallelizing Linear Transformers with the Delta Rule over Sequence Length"
(arXiv:2406.06484) with the decay of arXiv:2412.06464. Everything that does not depend on the state is computed for all
chunks of all sequences at once; only a short loop over the chunks carries the state.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from custom_ops.gated_delta_net.reference import normalize
from custom_ops.gated_delta_net.shapes import GatedDeltaNetShape
from custom_ops.ragged import Tiles, tile_sequences

CHUNK = 64


def gated_delta_net(
    qkv, beta, decay, conv_weight, query_start, query_length, context_length, slot, conv_state, recurrent_state,
    *, shape: GatedDeltaNetShape, decode: bool = False,
):
    """See `custom_ops.gated_delta_net` for arguments and results."""
    conv_weight = conv_weight.astype(jnp.float32)
    if decode:
        return _decode(qkv, beta, decay, conv_weight, query_length, context_length, conv_state, recurrent_state, shape)
    tiles = tile_sequences(query_start, query_length, tokens=qkv.shape[0], tile=CHUNK)
    fresh = context_length == 0
    window = jnp.where(fresh[:, None, None], 0, conv_state[slot]).astype(jnp.float32)
    mixed = _convolve(tiles, qkv, window, conv_weight)
    conv_state = _store(conv_state, slot, query_length, _last_inputs(qkv, window, query_start, query_length))
    query, key, value = shape.split(mixed)
    output, recurrent_state = _chunked_rule(
        tiles, query, key, value, tiles.gather(beta, 0.0), tiles.gather(decay, 0.0), slot, fresh, recurrent_state, shape
    )
    return tiles.scatter(output).astype(qkv.dtype), conv_state, recurrent_state


def _decode(qkv, beta, decay, conv_weight, query_length, context_length, conv_state, recurrent_state, shape):
    """One token a sequence, token i and slot i belonging to sequence i."""
    active = (query_length > 0)[:, None, None]
    fresh = (context_length == 0)[:, None, None]
    window = jnp.where(fresh, 0, conv_state).astype(jnp.float32)
    inputs = jnp.concatenate([window, qkv.astype(jnp.float32)[:, None]], axis=1)  # [sequences, width, channels]
    query, key, value = shape.split(jax.nn.silu(jnp.sum(inputs * conv_weight, axis=1)))
    query, key = normalize(query) * shape.key_dim**-0.5, normalize(key)
    query, key = (jnp.repeat(part, shape.group, axis=1) for part in (query, key))

    # Both products read the state before the update: Sᵀq after it is Sᵀq before it plus (k·q) times the delta. Written
    # as sums, not as dots, so that each fuses into one pass over the states.
    state = jnp.where(fresh[..., None], 0, recurrent_state).astype(jnp.float32) * jnp.exp(decay)[..., None, None]
    delta = beta[..., None] * (value - jnp.sum(state * key[..., None], axis=2))
    output = jnp.sum(state * query[..., None], axis=2) + jnp.sum(query * key, -1, keepdims=True) * delta
    state = state + key[..., None] * delta[:, :, None, :]
    return (
        jnp.where(active, output, 0).astype(qkv.dtype),
        jnp.where(active, inputs[:, 1:].astype(conv_state.dtype), conv_state),
        jnp.where(active[..., None], state.astype(recurrent_state.dtype), recurrent_state),
    )


def _store(pool, slot, query_length, states):
    """Write the states of sequences that have tokens to their slots; the others' index is out of range and dropped."""
    return pool.at[jnp.where(query_length > 0, slot, pool.shape[0])].set(states.astype(pool.dtype), mode="drop")


def _convolve(tiles: Tiles, qkv, window, conv_weight):
    """Causal convolution and SiLU, tile by tile: [tiles, CHUNK, channels]. Rows before a sequence come from its window."""
    history = conv_weight.shape[0] - 1
    offset = tiles.offset[:, None] + jnp.arange(-history, CHUNK)  # position in the sequence, negative before it
    rows = qkv[jnp.clip(tiles.start[:, None] + offset, 0, qkv.shape[0] - 1)].astype(jnp.float32)
    before = window[tiles.sequence[:, None], jnp.clip(offset[:, :history] + history, 0, history - 1)]
    rows = rows.at[:, :history].set(jnp.where(offset[:, :history, None] < 0, before, rows[:, :history]))
    mixed = sum(rows[:, shift : shift + CHUNK] * conv_weight[shift] for shift in range(history + 1))
    return jax.nn.silu(mixed)


def _last_inputs(qkv, window, query_start, query_length):
    """The last width - 1 inputs of each sequence, its old window included: [sequences, width - 1, channels]."""
    history = window.shape[1]
    position = query_length[:, None] + jnp.arange(-history, 0)
    rows = qkv[jnp.clip(query_start[:, None] + position, 0, qkv.shape[0] - 1)].astype(window.dtype)
    before = jnp.take_along_axis(window, jnp.clip(position + history, 0, history - 1)[:, :, None], axis=1)
    return jnp.where((position < 0)[:, :, None], before, rows)


def _chunked_rule(tiles: Tiles, query, key, value, beta, decay, slot, fresh, recurrent_state, shape):
    """The delta rule over chunks. query, key: [tiles, CHUNK, key heads, key dim]; beta, decay: [tiles, CHUNK, value heads].

    Rows beyond a tile's tokens have beta 0 and decay 0: they neither change the state nor let it decay.
    """
    valid = tiles.valid[:, :, None, None]
    query = jnp.where(valid, normalize(query) * shape.key_dim**-0.5, 0)
    key = jnp.where(valid, normalize(key), 0)
    value = jnp.where(valid, value, 0)
    # [tiles, heads, rows, dim] from here on; key heads are repeated only where the value heads differ.
    query, key, value = (jnp.moveaxis(part, 2, 1) for part in (query, key, value))
    beta, decay = (jnp.moveaxis(part, 2, 1) for part in (beta, decay))
    total = jnp.cumsum(decay, axis=-1)
    lower = jnp.tril(jnp.ones((CHUNK, CHUNK), bool))
    damping = jnp.exp(jnp.where(lower, total[..., :, None] - total[..., None, :], -jnp.inf))

    key_key = jnp.repeat(_inner(key, key), shape.group, axis=1)
    query_key = jnp.repeat(_inner(query, key), shape.group, axis=1) * damping
    key, query = (jnp.repeat(part, shape.group, axis=1) for part in (key, query))
    inverse = unit_lower_inverse(jnp.tril(beta[..., None] * key_key * damping, -1))
    grown = jnp.exp(total)[..., None]
    solved = inverse @ (beta[..., None] * jnp.concatenate([value, key * grown], axis=-1))
    values, keys = jnp.split(solved, (shape.value_dim,), axis=-1)
    remaining = jnp.exp(total[..., -1:] - total)[..., None] * key
    queries, last = query * grown, jnp.exp(total[..., -1])

    def chunk(index, carry):
        output, pool = carry
        home = slot[tiles.sequence[index]]
        state = pool[home].astype(jnp.float32)
        state = jnp.where((tiles.offset[index] == 0) & fresh[tiles.sequence[index]], 0, state)
        read = jnp.concatenate([queries[index], keys[index]], axis=1) @ state
        new = values[index] - read[:, CHUNK:]
        output = output.at[index].set(read[:, :CHUNK] + query_key[index] @ new)
        state = state * last[index][:, None, None] + jnp.swapaxes(remaining[index], -1, -2) @ new
        return output, pool.at[home].set(state.astype(pool.dtype))

    output = jnp.zeros(values.shape, jnp.float32)
    output, recurrent_state = lax.fori_loop(0, tiles.count, chunk, (output, recurrent_state))
    return jnp.moveaxis(output, 1, 2), recurrent_state


def _inner(left, right):
    return jnp.einsum("nhik,nhjk->nhij", left, right, preferred_element_type=jnp.float32)


def unit_lower_inverse(strict_lower):
    """(I + L)⁻¹ for strictly lower triangular L [..., size, size], size a power of two and at least 16.

    By blocks: the inverse of [[A, 0], [B, D]] is [[A⁻¹, 0], [-D⁻¹ B A⁻¹, D⁻¹]]. Blocks of one row are their own inverse,
    and every round doubles the blocks. It never forms powers of L, whose entries may grow far beyond the inverse's,
    and needs no triangular solve, which XLA hands to the host on some backends.
    """
    size = strict_lower.shape[-1]
    inner = _diagonal_blocks(strict_lower, 16)  # rounds within small blocks are masked products
    row, column = jnp.arange(16)[:, None], jnp.arange(16)[None, :]
    inverse = jnp.broadcast_to(jnp.eye(16, dtype=strict_lower.dtype), inner.shape)
    for block in (1, 2, 4, 8):
        joins = (row // (2 * block) == column // (2 * block)) & (row // block != column // block)
        inverse = inverse - inverse @ jnp.where(joins, inner, 0) @ inverse
    block = 16
    while block < size:
        upper, lower = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        below = _diagonal_blocks(strict_lower, 2 * block)[..., block:, :block]
        corner = -(lower @ below @ upper)
        inverse = jnp.concatenate(
            [jnp.concatenate([upper, jnp.zeros_like(upper)], -1), jnp.concatenate([corner, lower], -1)], -2
        )
        block *= 2
    return inverse[..., 0, :, :]


def _diagonal_blocks(matrix, block):
    """[..., size, size] → [..., size / block, block, block]"""
    count = matrix.shape[-1] // block
    return jnp.stack([matrix[..., i * block : (i + 1) * block, i * block : (i + 1) * block] for i in range(count)], -3)
