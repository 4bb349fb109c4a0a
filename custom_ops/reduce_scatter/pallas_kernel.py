"""The kernel of the hierarchical reduce-scatter: what one core sends, waits for and adds.

For each micro-batch of rows: the cores of a chip send each other the rows that the other one keeps (phase 1, over the
die-to-die link) and add; then the chips halve what is left once for each dimension of their hypercube (phase 2, over ICI),
the columns split into as many streams, each on another link. See `custom_ops.hypercube.layout` for the places.

It is a pipeline with a stage for phase 1 and one for each step of phase 2. In round i micro-batch i leaves phase 1 and
enters the first step, then micro-batch i - 1 - s leaves step s, for each s; phase 1 is started two micro-batches ahead. So
whatever a round waits for was started in the round before, all phases and steps are on the wires at once, each with another
micro-batch, and behind what is waited for something else is always queued, so that no wire is idle while the vector unit
adds.

What makes it free of races:
- Nothing is written into a device before that device is in the kernel: all partners meet at the barrier semaphore.
- Phase 1 and each step of each stream have their own regions and their own semaphores, two of each in turn (slots). A remote
  write can therefore only meet the one of two micro-batches before, from the same device.
- That device waits for a credit first: who has read a region tells the one who writes there. The last two micro-batches
  give none, so all semaphores end at zero.
- A region is read after waiting for its arrival and overwritten locally after waiting for its departure. Every DMA is waited
  for before the kernel ends, on both sides, so none is under way when it does.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from custom_ops.hypercube import layout
from custom_ops.hypercube.partners import Partners
from custom_ops.reduce_scatter.plan import ROW_TILE, Plan
from custom_ops.reduce_scatter.shapes import ReduceScatterShape

BLOCK_COLUMNS = 1024
"""Columns that are added at once."""


def scratch_shapes(shape: ReduceScatterShape, cut: Plan, columns: int, dtype) -> dict:
    """Buffers and semaphores, by name; first dimensions of those of phase 2 are stream and step."""
    chips, steps, slots = shape.chips, shape.dimensions, cut.slots
    slab = (cut.rows, columns)
    scratch = {
        "own": pltpu.VMEM((slots, chips, *slab), dtype),  # this core's terms
        "swapped": pltpu.VMEM((slots, chips, *slab), dtype),  # the other core's
        "result": pltpu.VMEM((slots, *slab), dtype),
        "loaded": pltpu.SemaphoreType.DMA((slots,)),  # `own` has come from HBM
        "swap_left": pltpu.SemaphoreType.DMA((slots,)),  # this core's terms have left for the other one
        "swap_arrived": pltpu.SemaphoreType.DMA((slots,)),  # `swapped` has come
        "swap_credit": pltpu.SemaphoreType.REGULAR((slots,)),  # the other core has read its `swapped`
        "stored": pltpu.SemaphoreType.DMA((slots,)),  # `result` is in HBM
    }
    if not steps:
        return scratch
    return scratch | {
        "kept": pltpu.VMEM((slots, chips - 1, *slab), jnp.float32),  # sums that wait for a step
        "sent": pltpu.VMEM((slots, chips - 1, *slab), dtype),
        "received": pltpu.VMEM((slots, chips - 1, *slab), dtype),
        "step_left": pltpu.SemaphoreType.DMA((steps, steps, slots)),  # `sent` has left
        "step_arrived": pltpu.SemaphoreType.DMA((steps, steps, slots)),  # `received` has come
        "step_credit": pltpu.SemaphoreType.REGULAR((steps, steps, slots)),  # the neighbour has read its `received`
    }


def kernel(partial, output, *, shape: ReduceScatterShape, cut: Plan, block: tuple[int, int], axes, **scratch) -> None:
    """partial [chips, cores, rows a device, hidden] and output [rows a device, columns of the block] in HBM."""
    core = _Core(partial, output, shape, cut, block, axes, scratch)
    core.partners.meet()
    last = cut.micro_batches
    for index in range(min(last, 2)):
        core.start_phase_1(index)

    def one_round(number):
        pl.when(number < last)(lambda: core.finish_phase_1(number))
        pl.when(number + 2 < last)(lambda: core.start_phase_1(number + 2))
        for step in range(shape.dimensions):
            index = number - 1 - step
            pl.when((index >= 0) & (index < last))(lambda index=index, step=step: core.finish_step(index, step))

    rounds = last + shape.dimensions
    if last == 1:
        for number in range(rounds):
            one_round(number)
    else:
        pl.loop(0, rounds)(one_round)
    for index in range(max(last - 2, 0), last):
        core.store(index).wait()


class _Core:
    """One core in one call of the kernel. An index of a micro-batch is an int or an int32 scalar."""

    def __init__(self, partial, output, shape, cut, block, axes, scratch):
        self.partial, self.output, self.cut, self.block = partial, output, cut, block
        self.chips, self.steps = shape.chips, shape.dimensions
        self.partners, self.scratch = Partners(axes, self.steps), scratch
        edges = layout.streams(*block, self.steps)
        self.streams = {
            stream: (first - block[0], last - first) for stream, (first, last) in enumerate(edges) if last > first
        }

    # Phase 1: the cores of a chip.

    def start_phase_1(self, index) -> None:
        take_credit(self.scratch["swap_credit"].at[self.slot(index)], index)
        self.load(index).start()
        self.swap(index).start()

    def finish_phase_1(self, index) -> None:
        """Adds what the cores swapped and starts the first step."""
        slot = self.slot(index)
        self.load(index).wait()
        self.swap(index).wait()
        own, swapped = self.scratch["own"], self.scratch["swapped"]
        for stream in self.streams:

            def terms(slab, rows, columns, stream=stream):
                chip = self.partners.chip ^ layout.relative_chip(slab, stream, self.steps)
                return (part[slot, chip, rows, columns].astype(jnp.float32) for part in (own, swapped))

            self.add(index, stream, 0, terms)
        give_credit(self.scratch["swap_credit"].at[slot], self.partners.other_core(), index, self.cut)
        self.pass_on(index, 0)

    def load(self, index):
        slot = self.slot(index)
        source = self.partial.at[:, self.partners.core, self.rows(index), self.columns()]
        return pltpu.make_async_copy(source, self.scratch["own"].at[slot], self.scratch["loaded"].at[slot])

    def swap(self, index):
        slot = self.slot(index)
        return pltpu.make_async_remote_copy(
            self.partial.at[:, 1 - self.partners.core, self.rows(index), self.columns()],
            self.scratch["swapped"].at[slot],
            self.scratch["swap_left"].at[slot],
            self.scratch["swap_arrived"].at[slot],
            device_id=self.partners.other_core(),
        )

    # Phase 2: the chips.

    def finish_step(self, index, step: int) -> None:
        """Adds what the neighbours sent and starts the next step."""
        slot, (first, _) = self.slot(index), layout.step_slabs(step, self.chips)
        kept, received = self.scratch["kept"], self.scratch["received"]

        def terms(slab, rows, columns):
            return kept[slot, first + slab, rows, columns], received[slot, first + slab, rows, columns].astype(jnp.float32)

        for stream in self.streams:
            self.exchange(index, stream, step).wait()
            self.add(index, stream, step + 1, terms)
            dimension = layout.crossed_dimension(stream, step, self.steps)
            give_credit(self.scratch["step_credit"].at[stream, step, slot], self.partners.neighbour(dimension), index, self.cut)
        self.pass_on(index, step + 1)

    def pass_on(self, index, step: int) -> None:
        """Starts a step, or after the last one stores the result."""
        if step == self.steps:
            self.store(index).start()
            return
        for stream in self.streams:
            take_credit(self.scratch["step_credit"].at[stream, step, self.slot(index)], index)
            self.exchange(index, stream, step).start()

    def exchange(self, index, stream: int, step: int):
        slot, (first, count) = self.slot(index), layout.step_slabs(step, self.chips)
        region = (slot, pl.ds(first, count), slice(None), pl.ds(*self.streams[stream]))
        return pltpu.make_async_remote_copy(
            self.scratch["sent"].at[region],
            self.scratch["received"].at[region],
            self.scratch["step_left"].at[stream, step, slot],
            self.scratch["step_arrived"].at[stream, step, slot],
            device_id=self.partners.neighbour(layout.crossed_dimension(stream, step, self.steps)),
        )

    def store(self, index):
        slot = self.slot(index)
        target = self.output.at[self.rows(index)]
        return pltpu.make_async_copy(self.scratch["result"].at[slot], target, self.scratch["stored"].at[slot])

    # Sums.

    def add(self, index, stream: int, step: int, terms) -> None:
        """Adds `terms` of a stream's slabs before a step: the upper half to what the step sends, the lower half to what
        it keeps; what is left after the last step to the result."""
        slot = self.slot(index)
        if step == self.steps:
            result = self.scratch["result"]
            if stream == 0:
                pl.when(index >= 2)(lambda: self.store(index - 2).wait())

            def put(total, slab, rows, columns):
                result[slot, rows, columns] = total.astype(result.dtype)

            self.each_block(stream, 0, 1, terms, put)
            return
        first, half = layout.step_slabs(step, self.chips)
        sent, kept = self.scratch["sent"], self.scratch["kept"]

        def send(total, slab, rows, columns):
            sent[slot, first + slab - half, rows, columns] = total.astype(sent.dtype)

        def keep(total, slab, rows, columns):
            kept[slot, first + slab, rows, columns] = total

        self.each_block(stream, half, half, terms, send)
        self.each_block(stream, 0, half, terms, keep)

    def each_block(self, stream: int, first: int, count: int, terms, put) -> None:
        """`put` the sum of `terms` for all rows and columns of the stream's slabs first..first + count."""
        size = min(self.cut.rows, ROW_TILE)
        pieces = self.cut.rows // size
        start, columns = self.streams[stream]

        # lax.div: JAX's floor division is lowered by the kind of the default device, which is no TPU under the bridge.
        @pl.loop(0, count * pieces)
        def _(number):
            slab = lax.div(number, jnp.int32(pieces))
            rows = pl.ds((number - slab * pieces) * size, size)
            slab = first + slab
            for column in range(start, start + columns, BLOCK_COLUMNS):
                part = pl.ds(column, min(BLOCK_COLUMNS, start + columns - column))
                one, other = terms(slab, rows, part)
                put(one + other, slab, rows, part)

    # Places.

    def slot(self, index):
        return index & (self.cut.slots - 1)

    def rows(self, index):
        return pl.ds(index * self.cut.rows, self.cut.rows)

    def columns(self):
        return pl.ds(self.block[0], self.block[1] - self.block[0])


def take_credit(credit, index) -> None:
    """Before a remote write: the region must have been read since the write of two micro-batches before."""
    pl.when(index >= 2)(lambda: pl.semaphore_wait(credit))


def give_credit(credit, writer, index, cut: Plan) -> None:
    """After reading a region: `writer` may write it again, if it has a micro-batch left for it."""
    pl.when(index + 2 < cut.micro_batches)(lambda: pl.semaphore_signal(credit, device_id=writer))
