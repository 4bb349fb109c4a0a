"""Which rows meet which expert, and where their results lie: the kernel that groups a step's pairs by expert.

Tokens lie along the lanes, 128 a block. A first walk over the blocks counts every local expert's pairs; from the counts a
scalar loop makes the list of items. A second walk numbers the pairs of a block by expert (a product with a triangle of ones
counts those before it, exactly in FP32), and brings them together in the order of their rows: a product with a matrix of zeros
and ones moves each pair's number, row and weight, in digits of eight bits, to its place. What is left to the scalar core is to
write row and place of each local pair where its expert's pairs lie; it does so while the next block's list is on its way.

Nothing here depends on how many pairs are other devices', and nothing is sorted.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from custom_ops.ragged_moe.pallas_plan import GROUP, LANES, SUBLANES, Plan
from custom_ops.ragged_moe.wire import ID_BITS

BLOCK_ROWS = LANES
"""Rows whose pairs are listed together."""
DIGIT = 8
"""Bits that BF16 holds exactly."""
ROW_BITS = LANES.bit_length() - 1
UNUSED = -1
"""Row of a place that holds no pair."""


class Work(NamedTuple):
    """What one pass of the kernels does.

    An item is a tile of rows of one expert, the items of an expert follow one another; experts that have any are counted.

    Attributes:
        pairs: [1] local pairs of all passes.
        totals: [2] items, experts.
        expert: [experts] the number of each expert that takes part.
        item_expert: [items] which of those an item belongs to.
        item_start, item_rows: [items] its first pair, and how many.
        item_first, item_last: [items] whether it is its expert's first, last.
        token: [pairs + GROUP] row of each pair, by expert.
        place: [pairs + GROUP] where its result goes: results lie by row.
        block_start: [blocks + 1] place of the first result of each block of `BLOCK_ROWS` rows.
        places: [blocks, 8, places] int32, of each result of a block its row within the block (or `UNUSED`) and the bits of its
            float32 weight, in the first two of eight lines.
    """

    pairs: Any
    totals: Any
    expert: Any
    item_expert: Any
    item_start: Any
    item_rows: Any
    item_first: Any
    item_last: Any
    token: Any
    place: Any
    block_start: Any
    places: Any


class _Scratch(NamedTuple):
    count: Any  # [experts, 128] float32, pairs by expert, and by lane in the first walk; then over all lanes, those gone by
    begin: Any  # [experts, 128] float32, number of each expert's first pair, over all lanes
    counted: Any  # [experts, 128] int32, pairs by expert, over all lanes
    codes: Any  # [2, tiles of places, 128] int32, number and row of a block's pairs
    scalar_counted: Any  # the same two in SMEM
    scalar_codes: Any
    counted_sem: Any
    codes_sem: Any  # [2]


def blocks_of(plan: Plan) -> int:
    return -(-plan.shape.rows // BLOCK_ROWS)


def places_of(plan: Plan) -> int:
    """Places that a block's pairs may take, in whole tiles."""
    return min(plan.shape.top_k, plan.shape.experts) * BLOCK_ROWS


def work_of_pass(routing, first_expert, number, plan: Plan, *, interpret: bool) -> Work:
    """The work of pass `number`, an int or a traced number.

    Args:
        routing: what travelled with the tokens, by `pallas_rows.receive`.
        first_expert: number of this device's first expert.
    """
    blocks, experts = blocks_of(plan), -(-plan.shape.experts // SUBLANES) * SUBLANES
    tiles = -(-places_of(plan) // LANES // SUBLANES) * SUBLANES
    scratch = _Scratch(
        count=pltpu.VMEM((experts, LANES), jnp.float32),
        begin=pltpu.VMEM((experts, LANES), jnp.float32),
        counted=pltpu.VMEM((experts, LANES), jnp.int32),
        codes=pltpu.VMEM((2, tiles, LANES), jnp.int32),
        scalar_counted=pltpu.SMEM((experts, LANES), jnp.int32),
        scalar_codes=pltpu.SMEM((2, tiles, LANES), jnp.int32),
        counted_sem=pltpu.SemaphoreType.DMA,
        codes_sem=pltpu.SemaphoreType.DMA((2,)),
    )
    lists = [1, 2, plan.shape.experts, *[plan.items] * 5, *[plan.pairs + GROUP] * 2, blocks + 1]
    places = (blocks, SUBLANES, places_of(plan))

    def kernel(where, routing, *refs):
        _Kernel(plan, where, routing, Work(*refs[: len(Work._fields)]), _Scratch(*refs[len(Work._fields) :])).run()

    parts = pl.pallas_call(
        kernel,
        name="ragged_moe_group",
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pltpu.VMEM)],
        out_specs=[
            *[pl.BlockSpec(memory_space=pltpu.SMEM)] * len(lists),
            pl.BlockSpec(memory_space=pltpu.VMEM),
        ],
        scratch_shapes=list(scratch),
        out_shape=[
            *(jax.ShapeDtypeStruct((length,), jnp.int32) for length in lists),
            jax.ShapeDtypeStruct(places, jnp.int32),
        ],
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True),
        interpret=interpret,
    )(jnp.stack([jnp.int32(first_expert), jnp.int32(number) * plan.pairs]), routing)
    return Work(*parts)


class _Kernel(NamedTuple):
    plan: Plan
    where: Any
    routing: Any
    work: Work
    scratch: _Scratch

    def run(self) -> None:
        blocks = blocks_of(self.plan)
        self.clear()

        @pl.loop(0, blocks)
        def _(block):
            self.scratch.count[...] += self.by_expert(self.local_experts(block))

        self.list_items()

        @pl.loop(0, blocks)
        def _(block):
            self.list_places(block)
            self.copy_codes(block).start()
            pl.when(block > 0)(lambda: self.write_pairs(block - 1))

        self.write_pairs(blocks - 1)

    @property
    def first(self):
        """Number of the pass's first pair."""
        return self.where[1]

    def clear(self) -> None:
        self.scratch.count[...] = jnp.zeros_like(self.scratch.count)

    # Vectors: tokens of a block along the lanes.

    def lanes(self, block):
        return pl.ds(pl.multiple_of(block * LANES, LANES), LANES)

    def local_experts(self, block) -> list:
        """[1, 128] of each choice: number of the local expert, or that of none."""
        top_k, experts = self.plan.shape.top_k, self.plan.shape.experts
        half = (top_k + 1) // 2
        pairs = self.routing[:, self.lanes(block)][top_k : top_k + half]
        row = block * BLOCK_ROWS + lax.broadcasted_iota(jnp.int32, pairs.shape, 1)
        local = []
        for number in (pairs & ((1 << ID_BITS) - 1), lax.shift_right_logical(pairs, ID_BITS)):
            number -= self.where[0]
            number = jnp.where((number >= 0) & (number < experts) & (row < self.plan.shape.rows), number, self.none)
            local += [number[choice : choice + 1] for choice in range(half)]
        return local[:top_k]

    @property
    def none(self) -> int:
        """A number beyond all lines for experts."""
        return self.scratch.count.shape[0]

    @property
    def line(self):
        return lax.broadcasted_iota(jnp.int32, self.scratch.count.shape, 0)

    def chosen(self, local):
        """[experts, 128] float32, 1 where the expert is that of this choice."""
        return jnp.where(self.line == local, 1.0, 0.0)

    def by_expert(self, local: list):
        return sum(map(self.chosen, local))

    def list_places(self, block) -> None:
        """Number, row and weight of the block's pairs, in the order of their rows."""
        local, size = self.local_experts(block), self.plan.pairs
        counts = _sums_before(self.by_expert(local))
        before = self.scratch.begin[...] + self.scratch.count[...] + counts.before
        self.scratch.count[...] += counts.all
        number = [jnp.sum(jnp.where(self.line == part, before, 0), axis=0, keepdims=True) for part in local]
        number = [part.astype(jnp.int32) - self.first for part in number]
        here = [(part < self.none) & (place >= 0) & (place < size) for part, place in zip(local, number, strict=True)]
        of_row = sum(jnp.where(part, 1.0, 0.0) for part in here)
        place, places = _sums_before(jnp.broadcast_to(of_row, (SUBLANES, LANES))).before[:1].astype(jnp.int32), []
        for part in here:
            places.append(jnp.where(part, place, UNUSED))
            place += jnp.where(part, 1, 0)
        total = jnp.sum(of_row).astype(jnp.int32)
        self.work.block_start[block + 1] = self.work.block_start[block] + total
        row = lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
        routing = self.routing[:, self.lanes(block)]
        weight = [routing[choice : choice + 1] for choice in range(len(local))]
        moved = [_stacked([*_digits(part, 3), row, *_digits(bits, 4)]) for part, bits in zip(number, weight, strict=True)]
        moved = jnp.concatenate(moved, axis=1).astype(jnp.float32).astype(jnp.bfloat16)

        @pl.loop(0, jnp.maximum(lax.div(total + LANES - 1, jnp.int32(LANES)), 1))
        def _(tile):
            line = tile * LANES + lax.broadcasted_iota(jnp.int32, (LANES, LANES), 0)
            target = jnp.concatenate([jnp.where(place == line, 1.0, 0.0).astype(jnp.bfloat16) for place in places], axis=1)
            parts = lax.dot_general(moved, target, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
            parts = parts.astype(jnp.int32)
            number, row, bits = _from_digits(parts[:3]), parts[3:4], _from_digits(parts[4:8])
            used = tile * LANES + lax.broadcasted_iota(jnp.int32, (1, LANES), 1) < total
            self.work.places[block, :, self.lanes(tile)] = _stacked([jnp.where(used, row, UNUSED), bits])
            # What is no pair is written behind the last.
            self.scratch.codes[block & 1, pl.ds(tile, 1), :] = jnp.where(used, number, size) << ROW_BITS | row

    # Scalars.

    def list_items(self) -> None:
        """After all pairs are counted: where each expert's begin, and the items of the pass."""
        scratch, work, tile, size = self.scratch, self.work, self.plan.tile, self.plan.pairs
        counts = jnp.sum(scratch.count[...], axis=1, keepdims=True)
        scratch.counted[...] = jnp.broadcast_to(counts, scratch.count.shape).astype(jnp.int32)
        copy = pltpu.make_async_copy(scratch.counted, scratch.scalar_counted, scratch.counted_sem)
        copy.start()
        self.clear()
        copy.wait()

        def of_expert(expert, carry):
            begin, item, ordinal = carry
            end = begin + scratch.scalar_counted[expert, 0]
            scratch.begin[pl.ds(expert, 1), :] = jnp.full((1, LANES), begin, jnp.int32).astype(jnp.float32)
            low, high = (jnp.clip(edge - self.first, 0, size) for edge in (begin, end))
            tiles = lax.div(high - low + tile - 1, jnp.int32(tile))

            @pl.when(tiles > 0)
            def _():
                work.expert[ordinal] = expert

            @pl.loop(0, tiles)
            def _(part):
                work.item_expert[item + part] = ordinal
                work.item_start[item + part] = low + part * tile
                work.item_rows[item + part] = jnp.minimum(high - low - part * tile, tile)
                work.item_first[item + part] = (part == 0).astype(jnp.int32)
                work.item_last[item + part] = (part == tiles - 1).astype(jnp.int32)

            return end, item + tiles, ordinal + (tiles > 0).astype(jnp.int32)

        zero = jnp.int32(0)
        work.pairs[0], work.totals[0], work.totals[1] = lax.fori_loop(0, self.plan.shape.experts, of_expert, (zero, zero, zero))
        work.block_start[0] = 0
        last = jnp.clip(work.pairs[0] - self.first, 0, size)
        for after in range(GROUP):  # rows are fetched in groups, the last one's with whatever follows the last pair
            work.token[last + after] = 0

    def copy_codes(self, block):
        half = block & 1
        return pltpu.make_async_copy(
            self.scratch.codes.at[half], self.scratch.scalar_codes.at[half], self.scratch.codes_sem.at[half]
        )

    def write_pairs(self, block) -> None:
        """Row and place of a block's pairs, to where their experts' pairs lie."""
        self.copy_codes(block).wait()
        codes, work = self.scratch.scalar_codes.at[block & 1], self.work
        first, row = work.block_start[block], block * BLOCK_ROWS
        groups = LANES // GROUP

        @pl.loop(0, lax.div(work.block_start[block + 1] - first + GROUP - 1, jnp.int32(GROUP)))
        def _(group):
            line, lane = lax.div(group, jnp.int32(groups)), (group & (groups - 1)) * GROUP
            for part in range(GROUP):
                code = codes[line, lane + part]
                number = lax.shift_right_logical(code, ROW_BITS)
                work.token[number] = row + (code & (BLOCK_ROWS - 1))
                work.place[number] = first + group * GROUP + part


class _Sums(NamedTuple):
    before: Any
    all: Any


def _sums_before(values) -> _Sums:
    """[lines, 128] float32 integers up to 256 → along each line, the sum of what is before a lane, and that of all."""
    row, lane = (lax.broadcasted_iota(jnp.int32, (LANES, 2 * LANES), axis) for axis in range(2))
    matrix = jnp.where((row < lane) | (lane >= LANES), 1.0, 0.0).astype(jnp.bfloat16)
    sums = jnp.dot(values.astype(jnp.bfloat16), matrix, preferred_element_type=jnp.float32)
    return _Sums(sums[:, :LANES], sums[:, LANES:])


def _stacked(lines: list):
    """[1, 128] each → [8, 128]; the last stands for those that are left."""
    line, result = lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 0), lines[-1]
    for number, part in enumerate(lines[:-1]):
        result = jnp.where(line == number, part, result)
    return result


def _digits(value, count: int) -> list:
    return [lax.shift_right_logical(value, DIGIT * number) & ((1 << DIGIT) - 1) for number in range(count)]


def _from_digits(digits):
    return functools.reduce(jnp.bitwise_or, [digits[number : number + 1] << DIGIT * number for number in range(len(digits))])
