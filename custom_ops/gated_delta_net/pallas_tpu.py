"""Gated DeltaNet on TPU: the whole operation in Pallas, one kernel for short sequences and one for long ones.

`pallas_decode` takes the sequences that have one row, or a window of rows with a checkpoint after each, token after
token and eight sequences at a time; `pallas_chunk` takes the others in chunks of 64 rows. Both compute the convolution,
SiLU, the norms, the gates and the delta rule, and read and write their sequences' states in the pools, in place.
"""

from __future__ import annotations

import jax.numpy as jnp

from custom_ops.gated_delta_net.pallas_chunk import prefill
from custom_ops.gated_delta_net.pallas_decode import TILE, decode_windows
from custom_ops.gated_delta_net.shapes import GatedDeltaNetShape
from custom_ops.gated_delta_net.tiling import CHUNK, LANES


def supports(shape: GatedDeltaNetShape) -> bool:
    """Whether the kernels take these heads: as wide as a tile's 128 lanes, an even number of them, at most 128 for values."""
    return (shape.key_dim, shape.value_dim) == (LANES, LANES) and shape.key_heads % 2 == 0 and shape.value_heads <= LANES


def gated_delta_net(
    qkv, b, a, conv_weight, A_log, dt_bias, query_start, query_length, context_length, slot,
    conv_state, recurrent_state, checkpoint_slot=None,
    *, shape: GatedDeltaNetShape, decode: bool = False, interpret: bool = False,
):
    """See `custom_ops.gated_delta_net` for arguments and results.

    interpret: run the kernels in Pallas' interpreter, on any backend and far slower.

    Raises:
        ValueError: heads that `supports` refuses.
    """
    if not supports(shape):
        raise ValueError(
            f"the Pallas kernels take an even number of key heads and at most {LANES} value heads, of {LANES} by {LANES}, "
            f"not {shape}"
        )
    weights = (conv_weight.astype(jnp.float32), A_log.astype(jnp.float32), dt_bias.astype(jnp.float32))
    tokens, sequences = qkv.shape[0], query_start.shape[0]
    static = {"shape": shape, "interpret": interpret}
    fresh = context_length == 0
    if decode:
        pad = -sequences % TILE
        rows = (_pad_rows(part, pad)[None] for part in (qkv, b, a))
        metadata = (_pad_rows(part.astype(jnp.int32), pad) for part in (query_length, fresh, slot))
        output, conv_state, recurrent_state = decode_windows(
            *rows, *weights, *metadata, None, None, conv_state, recurrent_state, **static
        )
        return output[0, :sequences], conv_state, recurrent_state

    # The decode kernel takes the first rows of a sequence, one or a window of them; where that is all of it, or where
    # there are checkpoints to keep, the sequence begins there. The chunks take what is left of it.
    window = 1 if checkpoint_slot is None else checkpoint_slot.shape[1]
    short = query_length <= window
    if checkpoint_slot is not None:
        short |= jnp.any(checkpoint_slot >= 0, axis=1)
    head = jnp.where(short, jnp.minimum(query_length, window), 0)
    order = jnp.argsort(head == 0, stable=True)  # those that take part come first, so that a few tiles hold them
    order = jnp.pad(order, (0, -sequences % TILE), constant_values=-1)
    taken = jnp.where(order < 0, 0, head[order])
    step = jnp.arange(window)[:, None]
    place = query_start[order] + step  # [window, sequences]
    row = jnp.clip(place, 0, tokens - 1)
    keep = None if checkpoint_slot is None else checkpoint_slot[order].astype(jnp.int32)
    tiles = jnp.maximum(-(-jnp.sum(head > 0) // TILE), 1)
    first, conv_state, recurrent_state = decode_windows(
        qkv[row], b[row], a[row], *weights, taken, fresh[order].astype(jnp.int32), slot[order], keep, tiles,
        conv_state, recurrent_state, **static,
    )
    pad = max(CHUNK - tokens, 0)
    output, conv_state, recurrent_state = prefill(
        *(_pad_rows(part, pad) for part in (qkv, b, a)), *weights,
        query_start + head, query_length - head, fresh & (head == 0), slot, conv_state, recurrent_state, **static,
    )
    place = jnp.where(step < taken, place, output.shape[0])
    output = output.at[place].set(first.reshape(*place.shape, -1), mode="drop")
    return output[:tokens].reshape(tokens, shape.value_heads, shape.value_dim), conv_state, recurrent_state


def _pad_rows(rows, pad: int):
    return jnp.pad(rows, ((0, pad),) + ((0, 0),) * (rows.ndim - 1)) if pad else rows
