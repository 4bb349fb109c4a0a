"""Gated DeltaNet as it is defined: one token after the other, in FP32.

The rule and its names follow "Gated Delta Networks: Improving Mamba2 with Delta Rule" (arXiv:2412.06464); the
convolution, the normalisation and the gates follow Qwen 3.5. Slow and plain on purpose: this file decides what is right.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from custom_ops.gated_delta_net.shapes import GatedDeltaNetShape


def gated_delta_net(
    qkv, b, a, conv_weight, A_log, dt_bias, query_start, query_length, context_length, slot, conv_state, recurrent_state,
    checkpoint_slot=None, *, shape: GatedDeltaNetShape, decode: bool = False,
):
    """See `custom_ops.gated_delta_net` for arguments and results. `decode` is a promise that changes nothing here."""
    del decode
    beta, g = gates(b, a, A_log, dt_bias)
    if checkpoint_slot is None:
        checkpoint_slot = jnp.full((query_start.shape[0], 1), -1)
    history = conv_weight.shape[0] - 1
    output = jnp.zeros((qkv.shape[0], shape.value_heads, shape.value_dim), jnp.float32)

    def sequence(index, carry):
        output, conv_state, recurrent_state = carry
        fresh = context_length[index] == 0
        window = jnp.where(fresh, 0, conv_state[slot[index], :history].astype(jnp.float32))
        state = jnp.where(fresh, 0, recurrent_state[slot[index]].astype(jnp.float32))

        def token(position, carry):
            output, window, state, conv_state, recurrent_state = carry
            row = query_start[index] + position
            inputs = jnp.concatenate([window, qkv[row].astype(jnp.float32)[None]])  # [width, channels]
            mixed = jax.nn.silu(jnp.sum(inputs * conv_weight.astype(jnp.float32), axis=0))
            query, key, value = shape.split(mixed)
            query, key = normalize(query) * shape.key_dim**-0.5, normalize(key)
            query, key = (jnp.repeat(part, shape.value_heads // shape.key_heads, axis=0) for part in (query, key))
            state = state * jnp.exp(g[row])[:, None, None]
            delta = beta[row][:, None] * (value - jnp.einsum("hkv,hk->hv", state, key))
            state = state + key[:, :, None] * delta[:, None, :]
            output = output.at[row].set(jnp.einsum("hkv,hk->hv", state, query))
            window = inputs[1:]
            checkpoint = checkpoint_slot.at[index, position].get(mode="fill", fill_value=-1)
            checkpoint = jnp.where(checkpoint < 0, conv_state.shape[0], checkpoint)  # past the end: not stored
            conv_state = conv_state.at[checkpoint, :history].set(window.astype(conv_state.dtype), mode="drop")
            recurrent_state = recurrent_state.at[checkpoint].set(state.astype(recurrent_state.dtype), mode="drop")
            return output, window, state, conv_state, recurrent_state

        output, window, state, conv_state, recurrent_state = lax.fori_loop(
            0, query_length[index], token, (output, window, state, conv_state, recurrent_state)
        )
        keep = query_length[index] == 0
        window = jnp.where(keep, conv_state[slot[index], :history], window.astype(conv_state.dtype))
        state = jnp.where(keep, recurrent_state[slot[index]], state.astype(recurrent_state.dtype))
        return output, conv_state.at[slot[index], :history].set(window), recurrent_state.at[slot[index]].set(state)

    output, conv_state, recurrent_state = lax.fori_loop(
        0, query_start.shape[0], sequence, (output, conv_state, recurrent_state)
    )
    return output.astype(qkv.dtype), conv_state, recurrent_state


def gates(b, a, A_log, dt_bias):
    """beta (0 to 1) and g (at most 0), the log of the decay, both FP32 [..., value heads]."""
    b, a, A_log, dt_bias = (part.astype(jnp.float32) for part in (b, a, A_log, dt_bias))
    return jax.nn.sigmoid(b), -jnp.exp(A_log) * jax.nn.softplus(a + dt_bias)


def normalize(x):
    """x / sqrt(sum of squares + 1e-6): a zero vector stays zero."""
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
