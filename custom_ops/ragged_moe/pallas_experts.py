"""The kernel of the experts: both products of every tile of rows, with weights that stream through VMEM.

Work goes expert by expert, within an expert by tiles of rows (items). The weights of an expert come in chunks of its width:
gate and up rows and the down columns that belong to them, so that a chunk contributes a sum of its own to the result. A ring
of slots holds them; a slot is filled again as soon as its expert's last tile has used it, so that HBM is read without a pause,
each expert that has rows once, and experts without rows never. The rows of the next tile are fetched, one DMA each, while one
is multiplied, and those of results leave the same way, to where the row's other results lie.

Rows are BF16, and so is what lies between the products; FP8 weights go to the matrix unit as they are, which multiplies BF16
by FP8. Scales of output channels multiply the products in FP32; weights with a scale for each block are scaled to BF16 before.
Rows of a tile that hold no pair are computed from whatever memory holds, and never stored: rows do not meet in a product.

Schedule for tpu7x, 4,096 columns, width 1,024, FP8 with a scale for each channel: a tile of 16 rows takes about 3,200 bundles
(1.4 µs at an assumed 2.2 GHz), one of 32 rows about 4,000, while the expert's 12 MiB take 3.4 µs at 3.69 TB/s, so that bytes
bind as long as an expert has a tile or two. With a scale for each block a tile of 16 rows takes 14,000 bundles, 8,700 of
them to scale the weights, and bundles bind.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from custom_ops.ragged_moe.pallas_experts_memory import Operands, Scratch, declare
from custom_ops.ragged_moe.pallas_plan import GROUP, LANES, Plan
from custom_ops.ragged_moe.pallas_rows import column, from_words, to_words
from custom_ops.ragged_moe.pallas_work import Work
from custom_ops.ragged_moe.quantized import BLOCK

START, WAIT = "start", "wait"
DOWN_COLUMNS = 1024
"""Columns of the second product that are summed at once."""
VMEM_BYTES = 62 * 2**20
USED = ("totals", "expert", "item_expert", "item_start", "item_rows", "item_first", "item_last", "token", "place")
"""What of `Work` this kernel reads; the rest is for those before and after it."""


@dataclasses.dataclass(frozen=True)
class _Kernel:
    plan: Plan
    work: Work
    operands: Operands
    scratch: Scratch
    interpreted: bool

    def run(self) -> None:
        items, experts = self.work.totals[0], self.work.totals[1]
        chunks = experts * self.plan.chunks
        for number in range(self.plan.slots):
            pl.when(number < chunks)(functools.partial(self.load_chunk, jnp.int32(number), START))
        pl.when(items > 0)(lambda: self.load_rows(0, START))

        @pl.loop(0, items)
        def _(item):
            pl.when(item + 1 < items)(lambda: self.load_rows(item + 1, START))
            self.load_rows(item, WAIT)
            self.arrange_rows(item)
            pl.loop(0, self.plan.chunks)(lambda part: self.multiply(item, part, chunks))
            pl.when(item > 1)(lambda: self.store_rows(item - 2, WAIT))
            self.pack_results(item)
            self.store_rows(item, START)

        for back in (2, 1):
            pl.when(items >= back)(lambda back=back: self.store_rows(items - back, WAIT))

    # Rows.

    def load_rows(self, item, act: str) -> None:
        """Start fetching the rows of an item, or wait for them; eight at a time, the last of them of whatever pairs follow."""
        half, start = item & 1, self.work.item_start[item]
        buffer, semaphore = self.scratch.rows_in.at[half], self.scratch.rows_in_sem.at[half]

        def start_row(row):
            pair = start + row
            pltpu.make_async_copy(self.row(self.operands.rows, self.work.token[pair]), self.row(buffer, row), semaphore).start()

        self.each_row(item, start_row, buffer, semaphore, act)

    def store_rows(self, item, act: str) -> None:
        """Start storing the results of an item, or wait until they are; those of no pair go behind all others."""
        half, start = item & 1, self.work.item_start[item]
        buffer, semaphore = self.scratch.rows_out.at[half], self.scratch.rows_out_sem.at[half]
        count = self.work.item_rows[item]

        def start_row(row):
            place = jnp.where(row < count, self.work.place[start + row], self.plan.pairs)
            pltpu.make_async_copy(self.row(buffer, row), self.row(self.operands.results, place), semaphore).start()

        self.each_row(item, start_row, buffer, semaphore, act)

    def each_row(self, item, start_row, buffer, semaphore, act: str) -> None:
        """`start_row` for an item's rows in groups of eight, or one wait for each group."""
        groups = lax.div(self.work.item_rows[item] + (GROUP - 1), jnp.int32(GROUP))

        @pl.loop(0, groups)
        def _(group):
            if act == START:
                for row in range(GROUP):
                    start_row(group * GROUP + row)
            else:
                rows = buffer.at[pl.ds(0, GROUP * self.plan.pitch)]
                pltpu.make_async_copy(rows, rows, semaphore).wait()

    def row(self, words, index):
        pitch = self.plan.pitch
        return words.at[pl.ds(pl.multiple_of(index * pitch, pitch), pitch)]

    def arrange_rows(self, item) -> None:
        """Words of the rows to a matrix for products."""
        words = self.scratch.rows_in.at[item & 1]

        for word in range(self.plan.words):
            halves = from_words(words[column(word, self.plan.tile, self.plan.pitch), :])
            for half, values in enumerate(halves):
                columns = pl.ds((2 * word + half) * LANES, LANES)
                self.scratch.matrix[:, columns] = values.astype(jnp.bfloat16)

    def pack_results(self, item) -> None:
        """The total to words of rows."""
        target = self.scratch.rows_out.at[item & 1]
        for word in range(self.plan.words):
            halves = (self.scratch.total[:, pl.ds((2 * word + half) * LANES, LANES)] for half in range(2))
            target[column(word, self.plan.tile, self.plan.pitch), :] = to_words(*halves)

    # Weights.

    @property
    def scales(self) -> str:
        return self.plan.shape.scales

    def slot(self, number):
        return lax.rem(number, jnp.int32(self.plan.slots))

    def load_chunk(self, number, act: str) -> None:
        """Start fetching a chunk, counted over the experts that take part, or wait for it."""
        chunks, size, width = self.plan.chunks, self.plan.chunk, self.plan.shape.width
        expert, part, slot = lax.div(number, jnp.int32(chunks)), lax.rem(number, jnp.int32(chunks)), self.slot(number)
        expert, layer = (self.work.expert[expert], self.operands.layer[0]) if act == START else (0, 0)
        gate, up = (pl.ds(pl.multiple_of(half * width + part * size, size), size) for half in range(2))
        copies = (
            (self.operands.gate_up.at[layer, expert, gate], self.scratch.gate_up.at[slot, 0]),
            (self.operands.gate_up.at[layer, expert, up], self.scratch.gate_up.at[slot, 1]),
            (self.operands.down.at[layer, expert, :, gate], self.scratch.down.at[slot]),
        )
        for source, target in copies:
            getattr(pltpu.make_async_copy(source, target, self.scratch.chunk_sem.at[slot]), act)()

    def multiply(self, item, part, chunks) -> None:
        """Add what one chunk contributes to an item's total."""
        number = self.work.item_expert[item] * self.plan.chunks + part
        expert, slot = self.work.expert[self.work.item_expert[item]], self.slot(number)

        @pl.when(self.work.item_first[item] == 1)
        def _():
            self.load_chunk(number, WAIT)

        gate_up, down = self.scratch.gate_up.at[slot], self.scratch.down.at[slot]
        if self.scales == "block":
            self.scale_blocks(expert, part, slot)
            gate_up, down = self.scratch.scaled_gate_up, self.scratch.scaled_down
        self.activate(expert, part, gate_up)
        hidden, activated = self.plan.shape.hidden, self.scratch.activated[...]
        for first in range(0, hidden, DOWN_COLUMNS):
            columns = pl.ds(first, min(DOWN_COLUMNS, hidden - first))
            result = self.product(activated, down[columns, :])
            if self.scales == "channel":
                result *= self.operands.down_scale[expert, :, columns]
            if self.plan.chunks > 1:
                result += jnp.where(part > 0, self.scratch.total[:, columns], 0)
            self.scratch.total[:, columns] = result

        @pl.when((self.work.item_last[item] == 1) & (number + self.plan.slots < chunks))
        def _():
            self.load_chunk(number + self.plan.slots, START)

    def activate(self, expert, part, gate_up) -> None:
        """SiLU(gate) * up of a chunk's columns."""
        rows = self.scratch.matrix[...]
        gate, up = (self.product(rows, gate_up[half]) for half in range(2))
        for first in range(0, self.plan.chunk, LANES):
            parts = [value[:, first : first + LANES] for value in (gate, up)]
            if self.scales == "channel":
                for half in range(2):
                    parts[half] *= self.operands.gate_up_scale[expert, half, part, :, pl.ds(first, LANES)]
            activated = parts[0] / (1 + jnp.exp(-parts[0])) * parts[1]
            self.scratch.activated[:, pl.ds(first, LANES)] = activated.astype(jnp.bfloat16)

    def product(self, rows, weights):
        """[rows, inputs] x [outputs, inputs] → [rows, outputs] float32."""
        if self.interpreted:
            weights = weights.astype(rows.dtype)
        return lax.dot_general(rows, weights, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)

    def scale_blocks(self, expert, part, slot) -> None:
        """A chunk's weights times the scales of their blocks, in BF16."""
        scratch, shape, blocks = self.scratch, self.plan.shape, self.plan.chunk // BLOCK
        width, hidden = shape.width // BLOCK, shape.hidden // BLOCK

        @pl.loop(0, 2 * blocks)
        def _(block):
            half = lax.div(block, jnp.int32(blocks))
            block -= half * blocks
            first = (expert * 2 * width + half * width + part * blocks + block) * hidden
            source, target = scratch.gate_up.at[slot, half], scratch.scaled_gate_up.at[half]
            self.scale_row_of_blocks(source, target, block, self.operands.gate_up_scale, first, hidden)

        @pl.loop(0, hidden)
        def _(block):
            first = (expert * hidden + block) * width + part * blocks
            self.scale_row_of_blocks(scratch.down.at[slot], scratch.scaled_down, block, self.operands.down_scale, first, blocks)

    def scale_row_of_blocks(self, source, target, block, scales, first, count: int) -> None:
        rows = pl.ds(pl.multiple_of(block * BLOCK, BLOCK), BLOCK)
        for index in range(count):
            columns = pl.ds(index * BLOCK, BLOCK)
            target[rows, columns] = (source[rows, columns].astype(jnp.float32) * scales[first + index]).astype(jnp.bfloat16)


def results_of_pairs(
    words, work: Work, layer, gate_up, down, gate_up_scale, down_scale, plan: Plan, *, spare: int, interpret: bool
):
    """Every pair's result, at the pair's place.

    Args:
        words: the rows, by `pallas_rows.pack`.
        layer: [] int32, which layer of the stacks `gate_up` and `down`, [layers, experts, ...].
        spare: rows behind the last result that a reader may fetch without a use for them, at least one.

    Returns:
        [(pairs + spare) * pitch, 128] words; undefined where no pair's place is.
    """
    scratch = declare(plan, gate_up.dtype)
    used = [name for name, part in scratch._asdict().items() if part is not None]
    scalars = [getattr(work, name) for name in USED]
    scalars.append(jnp.reshape(layer, 1))
    arrays, in_hbm = [words, gate_up, down], pl.BlockSpec(memory_space=pl.ANY)
    specs = [in_hbm] * len(arrays)
    by_block, by_channel = plan.shape.scales == "block", plan.shape.scales == "channel"
    if by_block:
        scalars += [gate_up_scale.reshape(-1), down_scale.reshape(-1)]
    elif by_channel:
        # Only dimensions before the last two take an index that is known when the kernel runs.
        experts = plan.shape.experts
        scales = (gate_up_scale.reshape(experts, 2, plan.chunks, 1, plan.chunk), down_scale[:, None])
        arrays += scales
        specs += [pl.BlockSpec(scale.shape, lambda step, *_, rank=scale.ndim: (0,) * rank) for scale in scales]

    def kernel(*refs):
        scalar_refs, refs = refs[: len(scalars)], refs[len(scalars) :]
        array_refs, (results, *buffers) = refs[: len(arrays)], refs[len(arrays) :]
        scales = scalar_refs[-2:] if by_block else array_refs[3:] if by_channel else (None, None)
        *work_refs, layer = scalar_refs[: len(USED) + 1]
        operands = Operands(layer, *array_refs[:3], *scales, results)
        work = Work(**dict.fromkeys(Work._fields) | dict(zip(USED, work_refs, strict=True)))
        parts = dict.fromkeys(Scratch._fields) | dict(zip(used, buffers, strict=True))
        _Kernel(plan, work, operands, Scratch(**parts), interpret).run()

    return pl.pallas_call(
        kernel,
        name="ragged_moe_experts",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=specs,
            out_specs=in_hbm,
            scratch_shapes=[part for part in scratch if part is not None],
        ),
        out_shape=jax.ShapeDtypeStruct(((plan.pairs + spare) * plan.pitch, LANES), jnp.uint32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=VMEM_BYTES,
            disable_bounds_checks=True,  # all indices are computed from arrays of known length; a check costs more than a copy
        ),
        # XLA hides as much communication behind the kernel as it takes this for.
        cost_estimate=pl.CostEstimate(
            flops=round(6 * plan.shape.hidden * plan.shape.width * plan.shape.mean_pairs),
            bytes_accessed=plan.shape.experts * plan.shape.weight_bytes,
            transcendentals=round(plan.shape.width * plan.shape.mean_pairs),
        ),
        interpret=interpret,
    )(*scalars, *arrays)
