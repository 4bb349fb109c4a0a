"""Cycles and HBM bytes of single instructions: their schedules from the compiler's dump, or XLA's estimate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from custom_ops.schedule.bundles import Loop
from torchqwen_tpu.planning.hlo import Computation, Instruction, Module
from torchqwen_tpu.planning.traffic import ProgramKeys, hbm_bytes

KernelTrips = Callable[[str, Loop], float | None]
"""Turns of a loop in a kernel whose bound is data, by the kernel's name."""
KernelBytes = Callable[[str], float | None]
"""Bytes that a kernel moves, where its operands and results do not tell."""


@dataclass(frozen=True)
class Program:
    """What an instruction takes: cycles, bytes of HBM, and whether the cycles are XLA's own estimate."""

    cycles: float
    bytes: float
    estimated: bool


class Programs:
    """The programs of a module.

    Args:
        schedules: by the name of their instruction.
    """

    def __init__(self, module: Module, schedules: dict[str, Loop], kernel_trips: KernelTrips, kernel_bytes: KernelBytes):
        self.module, self.kernel_trips, self.kernel_bytes = module, kernel_trips, kernel_bytes
        self._keys = ProgramKeys(module)
        self._schedules = self._by_key(schedules)
        self._known: dict[tuple[str, str], Program] = {}

    def of(self, computation: Computation, instruction: Instruction) -> Program:
        place = (computation.name, instruction.name)
        if place not in self._known:
            size = self.kernel_bytes(instruction.name) if instruction.opcode == "custom-call" else None
            size = hbm_bytes(self.module, computation, instruction) if size is None else size
            found = self._schedules.get(self._keys.key(computation, instruction))
            cycles = None if found is None else self._bundles(*found)
            estimated = instruction.estimated_cycles or 0
            self._known[place] = Program(estimated, size, estimated > 0) if cycles is None else Program(cycles, size, False)
        return self._known[place]

    def _by_key(self, schedules: dict[str, Loop]) -> dict[str, tuple[str, Loop]]:
        programs = {}
        for computation in self.module.computations.values():
            for instruction in computation.instructions:
                if instruction.name in schedules:
                    key = self._keys.key(computation, instruction)
                    programs[key] = (instruction.name, schedules[instruction.name])
        return programs

    def _bundles(self, name: str, program: Loop) -> float | None:
        """Of one run; None where turns are not known."""

        def entered(loop: Loop) -> float | None:
            turns = self.kernel_trips(name, loop)
            turns = loop.steps if turns is None else turns
            body = once(loop)
            if turns is None or body is None:
                return None
            skipped = loop.longest_skip[1] - loop.longest_skip[0] + 1 if loop.extra and loop.longest_skip else 0
            return turns * body + loop.extra * max(body - skipped, 0)

        def once(loop: Loop) -> float | None:
            inner = [entered(other) for other in loop.inner]
            return None if None in inner else loop.own + sum(inner)

        return once(program)
