"""The kernel of the hierarchical all-gather: what one core sends on, and when.

A core gets over ICI only what the cores of its own number have on the other chips, and all the rest from the other core of its
chip, over the die-to-die link: what a chip gathers reaches it over ICI once, one half for each core. It is the hierarchical
reduce-scatter backwards. Columns are split into as many streams as the hypercube of chips has dimensions; in each step a
stream crosses another one of them, and takes along what its earlier steps have brought. See `custom_ops.hypercube.layout`
for the places.

A device's own rows need nothing and are sent over all links at once; what arrives in a step is sent over the links of the
later steps, and over the die-to-die link, while the wires still carry what was queued before. Rows are cut into pieces,
so that of the last step only the last piece's way between the cores is not hidden behind ICI.

There are no buffers: everything is copied from its place in the result of one device to the same place in the result of the
next. What makes that free of races:
- Nothing is written into a device before that device is in the kernel: all partners meet at the barrier semaphore.
- Every place is written once: the device's own by itself, those of its core number by ICI, the others by the other core.
- It is read after waiting for its arrival. The steps of each stream and piece have their own semaphores; those of a
  step's places share one, of which all are waited for before any of them is read.
- Every DMA is waited for before the kernel ends, on both sides, so none is under way when it does.
"""

from __future__ import annotations

from collections.abc import Callable

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from custom_ops.all_gather.plan import Plan
from custom_ops.all_gather.shapes import AllGatherShape
from custom_ops.hypercube import layout
from custom_ops.hypercube.partners import Partners

UNROLLED = 2
"""Places of a step up to which the program is written out, without a loop."""


def scratch_shapes(shape: AllGatherShape, cut: Plan) -> dict:
    """Semaphores, by name."""
    pieces, streams, steps = len(cut.pieces), len(cut.streams), shape.dimensions
    scratch = {
        "kept": pltpu.SemaphoreType.DMA(()),  # the device's own rows are in its result
        "swap_left": pltpu.SemaphoreType.DMA((pieces, streams)),  # places have left for the other core
        "swap_arrived": pltpu.SemaphoreType.DMA((pieces, streams)),  # the other core's have come
    }
    if not steps:
        return scratch
    return scratch | {
        "step_left": pltpu.SemaphoreType.DMA((pieces, streams, steps)),  # places have left for a neighbour
        "step_arrived": pltpu.SemaphoreType.DMA((pieces, streams, steps)),  # a neighbour's have come
    }


def kernel(rows, gathered, *, shape: AllGatherShape, cut: Plan, axes, **scratch) -> None:
    """rows [rows, columns] and gathered [chips, cores, rows, columns] in HBM."""
    core = _Core(rows, gathered, shape, cut, axes, scratch)
    parts = [(piece, stream) for piece in range(len(cut.pieces)) for stream in range(len(cut.streams))]
    core.keep().start()
    core.partners.meet()
    for step in range(shape.dimensions):
        for part in parts:
            core.crossing(part, step, 0).start()
    for part in parts:
        core.swap(part, 0).start()
    for step in range(shape.dimensions):
        for part in parts:
            core.finish_step(part, step)
    for part in parts:
        core.finish(part)
    core.keep().wait()


class _Core:
    """One core in a call of the kernel. A part is (piece, stream); slabs are numbered as in `layout`, 0 is the device's own."""

    def __init__(self, rows, gathered, shape, cut, axes, scratch):
        self.rows, self.gathered, self.cut, self.scratch = rows, gathered, cut, scratch
        self.steps = shape.dimensions
        self.partners = Partners(axes, self.steps)

    def finish_step(self, part, step: int) -> None:
        """Sends on what a step brings."""
        self.wait_for_step(part, step)

        def pass_on(slab):
            for later in range(step + 1, self.steps):
                self.crossing(part, later, slab).start()
            self.swap(part, slab).start()

        each(1 << step, 1 << step, pass_on)

    def wait_for_step(self, part, step: int) -> None:
        each(1 << step, 1 << step, lambda slab: self.crossing(part, step, slab).wait_recv())

    def finish(self, part) -> None:
        """Waits for what is still under way, either way."""
        for step in range(self.steps):
            each(0, 1 << step, lambda slab, step=step: self.crossing(part, step, slab).wait_send())
        each(0, 1 << self.steps, lambda slab: self.swap(part, slab).wait_send())
        each(0, 1 << self.steps, lambda slab: self.swap(part, slab).wait_recv())

    def keep(self):
        place = self.gathered.at[self.partners.chip, self.partners.core]
        return pltpu.make_async_copy(self.rows, place, self.scratch["kept"])

    def crossing(self, part, step: int, slab):
        """The copy of a slab to the neighbour of a step, or, to wait for, of one from there."""
        neighbour = self.partners.neighbour(layout.crossed_dimension(part[1], self.steps - 1 - step, self.steps))
        return self._copy(part, slab, neighbour, "step", (*part, step))

    def swap(self, part, slab):
        return self._copy(part, slab, self.partners.other_core(), "swap", part)

    def _copy(self, part, slab, device, kind: str, number: tuple[int, ...]):
        """Of a place to the same place on another device."""
        piece, stream = part
        (first_row, last_row), (first, last) = self.cut.pieces[piece], self.cut.streams[stream]
        region = (pl.ds(first_row, last_row - first_row), pl.ds(first, last - first))
        chip = self.partners.chip ^ layout.relative_chip(slab, stream, self.steps)
        place = self.gathered.at[(chip, self.partners.core, *region)]
        return pltpu.make_async_remote_copy(
            self.rows.at[region] if isinstance(slab, int) and slab == 0 else place,
            place,
            self.scratch[f"{kind}_left"].at[number],
            self.scratch[f"{kind}_arrived"].at[number],
            device_id=device,
        )


def each(first: int, count: int, body: Callable) -> None:
    """`body` for the numbers from `first`, as a loop where they are many."""
    if count <= UNROLLED:
        for number in range(first, first + count):
            body(number)
    else:
        pl.loop(first, first + count)(body)
