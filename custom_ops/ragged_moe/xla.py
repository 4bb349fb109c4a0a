"""Local experts for any backend: tokens sorted by expert, one tile of rows after the other.

The loop runs over the tiles that hold tokens, so an expert without tokens is never read, and one expert may take them all.

Products take the rows in their own type and FP8 rows as BF16, which holds them exactly; so are FP8 weights with a scale for
each output channel, which multiplies the FP32 products. Weights with a scale for each block are scaled before, and rounded
to the rows' type. What lies between the two products is rounded to it too: nothing is rounded to FP8 here.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from custom_ops.ragged import take_at, tile_sequences
from custom_ops.ragged_moe.quantized import check_scales, is_fp8, of_elements


def experts(
    rows, expert, weight, gate_up, down, gate_up_scale=None, down_scale=None, *, num_experts, row_scale=None, layer=None
):
    """See `custom_ops.ragged_moe` for arguments and results."""
    local_experts, top_k, width = gate_up.shape[-3], expert.shape[1], down.shape[-1]
    first = jnp.uint32(0)
    if layer is not None:
        first = (layer * local_experts).astype(jnp.uint32)
        stacks = (gate_up, down, gate_up_scale, down_scale)
        gate_up, down, gate_up_scale, down_scale = (
            None if stack is None else stack.reshape(-1, *stack.shape[2:]) for stack in stacks
        )
    check_scales(rows, gate_up, down, gate_up_scale, down_scale, row_scale)
    dtype = jnp.bfloat16 if is_fp8(rows) else rows.dtype
    tile = tile_rows(expert.size, num_experts)
    flat = expert.reshape(-1)
    order = _by_expert(flat, local_experts)
    counts = jnp.sum(flat[None, :] == jnp.arange(local_experts)[:, None], axis=1, dtype=jnp.int32)
    tiles = tile_sequences(jnp.cumsum(counts) - counts, counts, tokens=flat.size, tile=tile)
    # Indices are unsigned and known to be in range: XLA need not wrap or check them in every iteration.
    token = (order // top_k).astype(jnp.uint32)[tiles.row]
    number_of_tile = first + tiles.sequence.astype(jnp.uint32)

    def one_tile(index, results):
        number, members = take_at(number_of_tile, index), take_at(token, index)
        if tile == 1:
            inputs = lax.dynamic_slice_in_dim(rows, members[0], 1)
        else:
            inputs = rows.at[members].get(mode="promise_in_bounds")
        projected = _linear(inputs.astype(dtype), gate_up, gate_up_scale, number)
        if row_scale is not None:
            projected *= row_scale[members][:, None]
        gate, up = jnp.split(projected, (width,), axis=-1)
        activated = (jax.nn.silu(gate) * up).astype(dtype)
        return lax.dynamic_update_index_in_dim(results, _linear(activated, down, down_scale, number), index, 0)

    results = jnp.zeros((token.shape[0], tile, rows.shape[1]), jnp.float32)
    results = lax.fori_loop(jnp.uint32(0), tiles.count.astype(jnp.uint32), one_tile, results).reshape(-1, rows.shape[1])
    rank = jnp.zeros(flat.size, jnp.int32).at[order].set(jnp.arange(flat.size, dtype=jnp.int32))
    place = tiles.place[rank].reshape(expert.shape)
    weight = jnp.where(place < len(results), weight, 0)
    place = jnp.minimum(place, len(results) - 1).astype(jnp.uint32)
    # One pass for all top_k: a sum over an axis would first write the gathered rows out.
    return sum(
        weight[:, choice, None] * results.at[place[:, choice]].get(mode="promise_in_bounds") for choice in range(top_k)
    )


def tile_rows(pairs: int, experts: int) -> int:
    """Rows a tile for `pairs` (token, expert) pairs over `experts` experts.

    One row (a matrix-vector product) while an expert sees few tokens; above, about twice the mean load, so that most
    experts are one tile, within 16 and 128 rows.
    """
    mean = pairs / experts
    return 1 if mean <= 12 else min(1 << round(2 * mean).bit_length() - 1, 128)


def _by_expert(expert, experts: int):
    """Stable order of pairs by expert [pairs], the pairs of other devices (number `experts`) last.

    Expert and position are one sort key: XLA sorts one array much faster than two.
    """
    bits = max(expert.size - 1, 1).bit_length()
    if (experts + 1) << bits > 1 << 32:
        raise ValueError(f"{expert.size} pairs over {experts} experts are too many for one step; take fewer tokens a step")
    key = expert.astype(jnp.uint32) << bits | jnp.arange(expert.size, dtype=jnp.uint32)
    return (lax.sort(key, is_stable=False) & ((1 << bits) - 1)).astype(jnp.int32)


def _linear(rows, weights, scales, number):
    """Rows times the weight of expert `number`, in FP32."""
    weight = take_at(weights, number)
    scale = None if scales is None else take_at(scales, number)
    if scale is not None and scale.ndim == 2:
        weight = (weight.astype(jnp.float32) * of_elements(scale, weight.shape)).astype(rows.dtype)
    elif scale is not None:
        weight = weight.astype(rows.dtype)
    product = jnp.einsum("ri,oi->ro", rows, weight, preferred_element_type=jnp.float32)
    return product * scale if scale is not None and scale.ndim == 1 else product
