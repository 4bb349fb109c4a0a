"""Which rows meet which expert, and where their results lie: the index algebra of a step, as XLA computes it."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from custom_ops.ragged_moe.pallas_plan import GROUP, Plan


class Pairs(NamedTuple):
    """(Row, expert) pairs of a step.

    Attributes:
        key: [rows * top_k] expert and position of each pair, in one uint32.
        sorted_key: the same in order: by expert, then by row, pairs of other devices last.
        weight: [rows * top_k] float32, in that order.
        counts: [experts] pairs of each local expert.
    """

    key: jax.Array
    sorted_key: jax.Array
    weight: jax.Array
    counts: jax.Array


class Work(NamedTuple):
    """What one pass of the kernels does.

    An item is a tile of rows of one expert, the items of an expert follow one another; experts that have any are counted.

    Attributes:
        totals: [2] items, experts.
        expert: [experts] the number of each expert that takes part.
        item_expert: [items] which of those an item belongs to.
        item_start, item_rows: [items] its first pair, and how many.
        item_first, item_last: [items] whether it is its expert's first, last.
        token: [pairs + GROUP] row of each pair, by expert.
        place: [pairs + GROUP] where its result goes: results lie by row.
        weight: [pairs + GROUP] float32.
        row_start: [rows + 1] place of each row's first result.
    """

    totals: jax.Array
    expert: jax.Array
    item_expert: jax.Array
    item_start: jax.Array
    item_rows: jax.Array
    item_first: jax.Array
    item_last: jax.Array
    token: jax.Array
    place: jax.Array
    weight: jax.Array
    row_start: jax.Array


def sort_pairs(expert, weight, plan: Plan) -> Pairs:
    """expert, weight: [rows, top_k], as in `custom_ops.ragged_moe`.

    Raises:
        ValueError: more pairs than a sort key has room for.
    """
    local, flat = plan.shape.experts, jnp.minimum(expert.reshape(-1), plan.shape.experts)
    bits = _position_bits(flat.size)
    if (local + 1) << bits > 1 << 32:
        raise ValueError(f"{flat.size} pairs over {local} experts are too many for one step; take fewer tokens a step")
    key = flat.astype(jnp.uint32) << bits | jnp.arange(flat.size, dtype=jnp.uint32)
    sorted_key, weight = lax.sort((key, weight.reshape(-1)), num_keys=1, is_stable=False)
    counts = jnp.sum(flat[None, :] == jnp.arange(local)[:, None], axis=1, dtype=jnp.int32)
    # The last pass may reach beyond the last pair, and a group of rows beyond the last of an item.
    pad = plan.passes * plan.pairs + GROUP - flat.size
    if pad > 0:
        last = jnp.uint32(0xFFFFFFFF)
        sorted_key, weight = (jnp.pad(part, (0, pad), constant_values=fill) for part, fill in ((sorted_key, last), (weight, 0)))
    return Pairs(key, sorted_key, weight, counts)


def work_of_pass(pairs: Pairs, number, plan: Plan) -> Work:
    """The work of pass `number`, an int or a traced number."""
    experts, tile, size = plan.shape.experts, plan.tile, plan.pairs
    first = number * size
    ends = jnp.cumsum(pairs.counts)
    start, end = (jnp.clip(edge - first, 0, size) for edge in (ends - pairs.counts, ends))

    tiles = -(-(end - start) // tile)
    tile_ends = jnp.cumsum(tiles)
    index = jnp.arange(plan.items)
    owner = jnp.minimum(_first_above(tile_ends, index), experts - 1)
    offset = (index - (tile_ends - tiles)[owner]) * tile
    taking_part = jnp.cumsum(tiles > 0)

    bits = _position_bits(pairs.key.size)
    keys, weight = (lax.dynamic_slice_in_dim(part, first, size + GROUP) for part in (pairs.sorted_key, pairs.weight))
    pair = jnp.minimum(keys & ((1 << bits) - 1), pairs.key.size - 1).astype(jnp.int32)
    # A pair's result lies behind those of all pairs before it, by row, that take part in this pass.
    here = (pairs.key >= keys[0]) & (pairs.key <= keys[size - 1]) & (pairs.key < jnp.uint32(experts) << bits)
    before = jnp.cumsum(here.astype(jnp.int32))
    place = (before - here)[pair]
    row_start = jnp.concatenate([jnp.zeros(1, jnp.int32), before[plan.shape.top_k - 1 :: plan.shape.top_k]])
    return Work(
        totals=jnp.stack([tile_ends[-1], taking_part[-1]]),
        expert=jnp.minimum(_first_above(taking_part, jnp.arange(experts)), experts - 1),
        item_expert=(taking_part - 1)[owner],
        item_start=start[owner] + offset,
        item_rows=jnp.clip((end - start)[owner] - offset, 0, tile),
        item_first=(offset == 0).astype(jnp.int32),
        item_last=(index == tile_ends[owner] - 1).astype(jnp.int32),
        token=lax.div(pair, plan.shape.top_k),
        place=place,
        weight=weight,
        row_start=row_start,
    )


def _position_bits(pairs: int) -> int:
    return max(pairs - 1, 1).bit_length()


def _first_above(ascending, values):
    """For each value the first position in `ascending` that holds more."""
    return jnp.searchsorted(ascending, values, side="right", method="compare_all").astype(jnp.int32)
