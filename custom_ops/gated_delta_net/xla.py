"""Gated DeltaNet for any backend: chunks of tokens as matrix products, decode as one batched update.

The chunked form is that of "Parallelizing Linear Transformers with the Delta Rule over Sequence Length"
(arXiv:2406.06484) with the decay of arXiv:2412.06464. A loop runs over the chunks that hold tokens, sequence after
sequence, so that its arrays stay in the cache and empty places of a bucket cost nothing.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from custom_ops.gated_delta_net.reference import gates, normalize
from custom_ops.gated_delta_net.shapes import GatedDeltaNetShape
from custom_ops.ragged import take_at, tile_sequences, token_sequence

CHUNK = 32
DECODE_BYTES = 1 << 17  # of FP32 states that a step of decode's loop takes: they fit a core's L2


def gated_delta_net(
    qkv, b, a, conv_weight, A_log, dt_bias, query_start, query_length, context_length, slot, conv_state, recurrent_state,
    checkpoint_slot=None, *, shape: GatedDeltaNetShape, decode: bool = False,
):
    """See `custom_ops.gated_delta_net` for arguments and results."""
    conv_weight = conv_weight.astype(jnp.float32)
    beta, g = gates(b, a, A_log, dt_bias)
    if decode:
        return _decode(
            qkv, beta, g, conv_weight, slot[0].astype(jnp.uint32), query_length, context_length, conv_state, recurrent_state,
            shape,
        )
    fresh = context_length == 0
    window = jnp.where(fresh[:, None, None], 0, conv_state[slot, : len(conv_weight) - 1]).astype(jnp.float32)
    mixed = _convolve(qkv.astype(jnp.float32), conv_weight, window, query_start, query_length)
    conv_state = _store_windows(conv_state, slot, query_length > 0, _last_inputs(qkv, window, query_start, query_length))
    if checkpoint_slot is not None:
        taken = jnp.arange(1, checkpoint_slot.shape[1] + 1)
        rows = jnp.broadcast_to(taken[:, None], (len(taken), len(slot)))
        windows = jax.vmap(_last_inputs, in_axes=(None, None, None, 0), out_axes=1)(qkv, window, query_start, rows)
        kept = (checkpoint_slot >= 0) & (taken <= query_length[:, None])
        conv_state = _store_windows(conv_state, checkpoint_slot, kept, windows)
    query, key, value = shape.split(mixed)
    query, key = normalize(query) * shape.key_dim**-0.5, normalize(key)
    # Heads first, and room after the last token, so that every chunk is a slice.
    query, key, value, beta, g = (
        jnp.pad(jnp.moveaxis(part, 1, 0), ((0, 0), (0, CHUNK)) + ((0, 0),) * (part.ndim - 2))
        for part in (query, key, value, beta, g)
    )
    tiles = tile_sequences(query_start, query_length, tokens=qkv.shape[0], tile=CHUNK)
    # Indices are unsigned and known to be in range: XLA need not wrap or check them in every iteration.
    sequences, homes = tiles.sequence.astype(jnp.uint32), slot[tiles.sequence].astype(jnp.uint32)
    starts = (tiles.start + tiles.offset).astype(jnp.uint32)

    def chunk(index, carry):
        output, pool, state = carry
        sequence, offset, first, home = (take_at(part, index) for part in (sequences, tiles.offset, starts, homes))
        valid = take_at(tiles.valid, index)
        # Rows beyond the sequence are zero in everything: they neither change the state nor let it decay.
        parts = [
            jnp.where(valid.reshape((1, CHUNK) + (1,) * (part.ndim - 2)), lax.dynamic_slice_in_dim(part, first, CHUNK, 1), 0)
            for part in (query, key, value, beta, g)
        ]
        first_state = jnp.where(take_at(fresh, sequence), 0, take_at(pool, home)).astype(jnp.float32)
        state = jnp.where(offset == 0, first_state, state)
        rows, written, end_state = _chunk_rule(*parts, state, shape.group)
        if checkpoint_slot is not None:
            slots = checkpoint_slot.at[sequence, offset + jnp.arange(CHUNK)].get(mode="fill", fill_value=-1)
            pool = _store_checkpoints(pool, jnp.where(valid, slots, -1), parts, written, state, shape.group)
        before = lax.dynamic_slice_in_dim(output, first, CHUNK, 1)
        output = lax.dynamic_update_slice_in_dim(output, jnp.where(valid[:, None], rows, before), first, 1)
        return output, lax.dynamic_update_index_in_dim(pool, end_state.astype(pool.dtype), home, 0), end_state

    # The running state stays FP32 from chunk to chunk, whatever the pool's dtype.
    carry = (jnp.zeros_like(value), recurrent_state, jnp.zeros(recurrent_state.shape[1:], jnp.float32))
    output, recurrent_state, _ = lax.fori_loop(jnp.uint32(0), tiles.count.astype(jnp.uint32), chunk, carry)
    return jnp.moveaxis(output[:, : qkv.shape[0]], 0, 1).astype(qkv.dtype), conv_state, recurrent_state


def _convolve(inputs, conv_weight, window, query_start, query_length):
    """Causal convolution and SiLU of a flat batch: [tokens, channels]. What lies before a sequence comes from its window."""
    tokens, history = inputs.shape[0], window.shape[1]
    _, position, _ = token_sequence(query_start, query_length, tokens)
    padded = jnp.pad(inputs, ((history, 0), (0, 0)))
    mixed = inputs * conv_weight[history]
    for back in range(1, history + 1):
        earlier = jnp.where((position >= back)[:, None], padded[history - back : history - back + tokens], 0)
        mixed = mixed + earlier * conv_weight[history - back]
    # The first rows of a sequence also see its window: row p meets window entry e under weight e - p.
    entry, row = jnp.arange(history)[None, :], jnp.arange(history)[:, None]
    weights = jnp.where((entry >= row)[..., None], conv_weight[jnp.clip(entry - row, 0)], 0)
    first = jnp.einsum("pec,sec->spc", weights, window)
    place = jnp.where(row.T < query_length[:, None], query_start[:, None] + row.T, tokens)
    return jax.nn.silu(mixed.at[place].add(first, mode="drop"))


def _chunk_rule(query, key, value, beta, g, state, group: int):
    """The delta rule over one chunk, heads first.

    query, key: [key heads, rows, key dim]; value: [value heads, rows, value dim]; beta, g: [value heads, rows];
    state: [value heads, key dim, value dim]. Returns the rows' outputs, as value; what each row writes under its key, as
    value; and the state after them.
    """
    rows = key.shape[1]
    products = jnp.concatenate([key, query], axis=1) @ jnp.swapaxes(key, 1, 2)  # of key heads: k kᵀ over q kᵀ
    products, key, query = (jnp.repeat(part, group, axis=0) for part in (products, key, query))
    lower = jnp.tril(jnp.ones((rows, rows), bool))
    # A product with ones rather than cumsum, which XLA:CPU computes again for every element that reads it.
    total = g @ lower.T.astype(g.dtype)
    damping = jnp.exp(jnp.where(lower, total[:, :, None] - total[:, None, :], -jnp.inf))
    beta, total = beta[..., None], total[..., None]
    inverse = unit_lower_inverse(jnp.where(lower & ~jnp.eye(rows, dtype=bool), beta * products[:, :rows] * damping, 0))
    grown = jnp.exp(total)
    read = jnp.concatenate([key * grown, query * grown], axis=1) @ state
    new = inverse @ (beta * (value - read[:, :rows]))
    output = read[:, rows:] + (products[:, rows:] * damping) @ new
    remaining = key * jnp.exp(total[:, -1:] - total)
    return output, new, state * grown[:, -1:] + jnp.swapaxes(remaining, 1, 2) @ new


def _store_checkpoints(pool, slots, parts, written, state, group: int):
    """Write the state after each row of a chunk to that row's slot, for slots [rows] that are not -1.

    parts: as `_chunk_rule` takes them; written: as it returns them; state: before the chunk.
    """
    _, key, _, _, g = parts

    def row(index, carry):
        pool, state = carry
        row_key = jnp.repeat(key[:, index], group, axis=0)
        state = state * jnp.exp(g[:, index])[:, None, None] + row_key[:, :, None] * written[:, index][:, None, :]
        return _store(pool, slots[index], slots[index] >= 0, state), state

    last = jnp.max(jnp.where(slots >= 0, jnp.arange(1, slots.shape[0] + 1), 0))
    return lax.fori_loop(0, last, row, (pool, state))[0]


def _decode(qkv, beta, g, conv_weight, first, query_length, context_length, conv_state, recurrent_state, shape):
    """One token a sequence; token i belongs to sequence i and to entry `first` + i of both states.

    The states are read, updated and put back a few sequences at a time, so that between these they lie in the CPU's cache.
    """
    sequences, history = len(query_length), len(conv_weight) - 1
    active, fresh = query_length > 0, context_length == 0
    stored = lax.dynamic_slice_in_dim(conv_state, first, sequences)[:, :history]
    window = jnp.where(fresh[:, None, None], 0, stored).astype(jnp.float32)
    inputs = jnp.concatenate([window, qkv.astype(jnp.float32)[:, None]], axis=1)  # [sequences, width, channels]
    kept = jnp.where(active[:, None, None], inputs[:, 1:].astype(conv_state.dtype), stored)
    conv_state = lax.dynamic_update_slice_in_dim(conv_state, kept, first, 0)
    query, key, value = shape.split(jax.nn.silu(jnp.sum(inputs * conv_weight, axis=1)))
    query, key = normalize(query) * shape.key_dim**-0.5, normalize(key)
    query, key = (jnp.repeat(part, shape.group, axis=1) for part in (query, key))
    rows = (jnp.stack([key, query], axis=2), value, beta[..., None], jnp.exp(g)[..., None], active, fresh)
    size = math.gcd(sequences, max(DECODE_BYTES // (4 * math.prod(recurrent_state.shape[1:])), 1))

    def some(index, carry):
        output, pool = carry
        at = index * jnp.uint32(size)
        state = lax.dynamic_slice_in_dim(pool, first + at, size)
        *parts, active, fresh = (lax.dynamic_slice_in_dim(part, at, size) for part in rows)
        result, updated = _decode_rule(*parts, fresh[:, None, None], state.astype(jnp.float32))
        updated = jnp.where(active[:, None, None, None], updated.astype(pool.dtype), state)
        output = lax.dynamic_update_slice_in_dim(output, jnp.where(active[:, None, None], result, 0), at, 0)
        return output, lax.dynamic_update_slice_in_dim(pool, updated, first + at, 0)

    carry = (jnp.zeros_like(value), recurrent_state)
    output, recurrent_state = lax.fori_loop(jnp.uint32(0), jnp.uint32(sequences // size), some, carry)
    return output.astype(qkv.dtype), conv_state, recurrent_state


def _decode_rule(key_query, value, beta, growth, fresh, state):
    """key_query: [sequences, heads, 2, key dim]; value: [sequences, heads, value dim]; beta, growth: [sequences, heads, 1];
    fresh: [sequences, 1, 1]; state: [sequences, heads, key dim, value dim]. Returns output, as value, and the new state."""
    # Both products read the state before decay and update: Sᵀq after them is the decayed Sᵀq plus (k·q) times the delta.
    read = jnp.einsum("shrk,shkv->shrv", key_query, state)
    read_key, read_query = (jnp.where(fresh, 0, read[:, :, row] * growth) for row in range(2))
    key, query = key_query[:, :, 0], key_query[:, :, 1]
    delta = beta * (value - read_key)
    output = read_query + jnp.sum(query * key, -1, keepdims=True) * delta
    return output, jnp.where(fresh[..., None], 0, state) * growth[..., None] + key[..., None] * delta[:, :, None, :]


def _store(pool, slot, kept, states):
    """Write the states that are to be kept to their slots; the others' index is out of range and dropped."""
    return pool.at[jnp.where(kept, slot, pool.shape[0])].set(states.astype(pool.dtype), mode="drop")


def _store_windows(pool, slot, kept, windows):
    """As `_store`, into the first rows of the slots."""
    home = jnp.where(kept, slot, pool.shape[0])
    return pool.at[home, : windows.shape[-2]].set(windows.astype(pool.dtype), mode="drop")


def _last_inputs(qkv, window, query_start, query_length):
    """The last width - 1 inputs of each sequence, its old window included: [sequences, width - 1, channels]."""
    history = window.shape[1]
    position = query_length[:, None] + jnp.arange(-history, 0)
    rows = qkv[jnp.clip(query_start[:, None] + position, 0, qkv.shape[0] - 1)].astype(window.dtype)
    before = jnp.take_along_axis(window, jnp.clip(position + history, 0, history - 1)[:, :, None], axis=1)
    return jnp.where((position < 0)[:, :, None], before, rows)


def unit_lower_inverse(strict_lower):
    """(I + L)⁻¹ for strictly lower triangular L [..., size, size], size a power of two and at least 16.

    Blocks of 16 rows by forward substitution, then by blocks: the inverse of [[A, 0], [B, D]] is
    [[A⁻¹, 0], [-D⁻¹ B A⁻¹, D⁻¹]]. It never forms powers of L, whose entries may grow far beyond the inverse's, and needs
    no triangular solve, which XLA hands to the host on some backends.
    """
    block = 16
    inner = _diagonal_blocks(strict_lower, block)

    def substitute(row, inverse):
        weights = lax.dynamic_index_in_dim(inner, row, inner.ndim - 2, keepdims=False)
        value = (jnp.arange(block, dtype=row.dtype) == row) - jnp.einsum("...j,...jk->...k", weights, inverse)
        return lax.dynamic_update_index_in_dim(inverse, value, row, inner.ndim - 2)

    identity = jnp.broadcast_to(jnp.eye(block, dtype=inner.dtype), inner.shape)
    inverse = lax.fori_loop(jnp.uint32(1), jnp.uint32(block), substitute, identity)
    while block < strict_lower.shape[-1]:
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
