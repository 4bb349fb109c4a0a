"""A core's place in the hypercube and whom it writes to, inside a kernel."""

from __future__ import annotations

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


class Partners:
    """Of this core, as device ids for remote copies and signals.

    Args:
        axes: mesh axes of the chips and of the cores of a chip.
        dimensions: of the hypercube of chips.
    """

    def __init__(self, axes: tuple[str, str], dimensions: int):
        self._chip_axis, self._core_axis = axes
        self.chip, self.core = lax.axis_index(self._chip_axis), lax.axis_index(self._core_axis)
        self.dimensions = dimensions

    def other_core(self):
        return {self._chip_axis: self.chip, self._core_axis: 1 - self.core}

    def neighbour(self, dimension: int):
        return {self._chip_axis: self.chip ^ (1 << dimension), self._core_axis: self.core}

    def meet(self) -> None:
        """Returns once all partners are in the kernel: until then nothing may be written into them."""
        barrier = pltpu.get_barrier_semaphore()
        partners = [self.other_core(), *(self.neighbour(dimension) for dimension in range(self.dimensions))]
        for partner in partners:
            pl.semaphore_signal(barrier, device_id=partner)
        pl.semaphore_wait(barrier, len(partners))
