"""Plays a scheduled HLO module on one core in the cost model of `custom_ops.cost_model`.

The core runs instructions in the order of the schedule. HBM, the links and SparseCore's copies are queues of their own; what a
schedule starts runs beside the core until the schedule waits for it. A loop's body is played twice: the first turn, and
one that stands for all the others.
"""

from __future__ import annotations

from collections.abc import Callable

from custom_ops.cost_model import HBM_LATENCY, Chip, collective_time
from torchqwen_tpu.planning.groups import Places, links_of
from torchqwen_tpu.planning.hlo import Array, Computation, Instruction, Module, trip_count
from torchqwen_tpu.planning.outcome import Collective, Cost, Event, Result
from torchqwen_tpu.planning.programs import Programs
from torchqwen_tpu.planning.traffic import FREE, hbm_bytes

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")

Trips = Callable[[Instruction, tuple[str, ...]], float | None]
"""Turns of a while loop whose bound is data, by the loop and the operations of the loops around it."""
KernelSeconds = Callable[[str, Array], float | None]
"""Seconds of a kernel that communicates, by its name and the largest of its operands and results; None for other kernels."""


class Player:
    """Plays one module.

    Args:
        programs: what single instructions take.
        places: of the chips on the torus.
        classify: the class that an instruction is counted under.
    """

    def __init__(
        self,
        module: Module,
        programs: Programs,
        chip: Chip,
        places: Places,
        classify: Callable[[Module, Computation, Instruction], str],
        trips: Trips,
        kernel_seconds: KernelSeconds,
    ):
        self.module, self.programs, self.chip, self.places = module, programs, chip, places
        self.classify, self.trips, self.kernel_seconds = classify, trips, kernel_seconds

    def play(self) -> Result:
        self.result = Result()
        self.core, self._inside_operation = 0.0, 0
        self.free = {"HBM": 0.0, "links": 0.0}
        self._run(self.module.entry, 1.0, ())
        self.result.seconds = self.core
        return self.result

    def _run(self, computation: Computation, weight: float, path: tuple[tuple[str, int], ...]) -> None:
        finished: dict[str, tuple[float, str]] = {}
        for instruction in computation.instructions:
            opcode = instruction.opcode
            if opcode in FREE or instruction.target in ("PrepareAsyncCallStart", "PrepareAsyncCallDone", "ConcatBitcast"):
                continue
            if opcode == "while":
                self._loop(computation, instruction, weight, path)
            elif opcode == "conditional":
                self._branch(instruction, weight, path)
            elif opcode == "call":
                self._run(self.module.computations[instruction.callee("to_apply")], weight, path)
            elif opcode.endswith("-start"):
                finished[instruction.name] = self._start(computation, instruction, weight, path)
            elif opcode.endswith("-done"):
                self._wait(instruction, finished, weight)
            elif opcode in COLLECTIVES:
                start = self.core
                end, label = self._collective(computation, instruction, False, False, weight, path)
                self.core = max(self.core, end)
                self._count(label, weight, self.core - start, waiting=self.core - start)
            else:
                self._execute(computation, instruction, weight, path)

    def _execute(self, computation: Computation, instruction: Instruction, weight: float, path) -> None:
        if instruction.target == "tpu_custom_call" and self._communicates(computation, instruction, weight, path):
            return
        program = self.programs.of(computation, instruction)
        label = self.classify(self.module, computation, instruction)
        start, size, by_bundles = self.core, program.bytes, program.cycles / self.chip.clock
        end = start + by_bundles
        decided = {"by_bundles": by_bundles}
        if size:
            arrived = max(self.free["HBM"], start) + size / self.chip.hbm_bandwidth
            self.free["HBM"] = arrived
            if arrived + HBM_LATENCY > end:
                end = arrived + HBM_LATENCY
                decided = {"by_bytes": end - start}
        self.core = end
        cost = self._count(label, weight, end - start, cycles=program.cycles, bytes=size, **decided)
        cost.estimated |= program.estimated
        self._record("core", label, start, end, path)

    def _communicates(self, computation: Computation, instruction: Instruction, weight: float, path) -> bool:
        """Counts a kernel that is a collective, which the core waits for."""
        operands = [computation.by_name[name] for name in instruction.operands if name in computation.by_name]
        arrays = [array for each in (*operands, instruction) for array in each.arrays]
        largest = max(arrays, key=lambda array: array.bytes)
        kind = instruction.name.rpartition(".")[0] or instruction.name
        seconds = self.kernel_seconds(kind, largest)
        if seconds is None:
            return False
        start, label = self.core, f"kernel {kind}"
        self.core += seconds
        operation, devices = instruction.operation or "model", len(self.places) * self.chip.cores
        entry = self.result.collectives.setdefault(
            (kind, largest.bytes, devices, operation, False),
            Collective(label, largest.bytes, devices, False, False, seconds, operation),
        )
        entry.runs += weight
        self._count(label, weight, seconds, waiting=seconds)
        self._record("core", label, start, self.core, path)
        self._record("links", label, start, self.core, path)
        return True

    def _count(self, label: str, weight: float, seconds: float, **parts: float) -> Cost:
        cost = self.result.costs[label]
        cost.runs += weight
        cost.seconds += weight * seconds
        for name, value in parts.items():
            setattr(cost, name, getattr(cost, name) + weight * value)
        return cost

    def _record(self, lane: str, name: str, start: float, end: float, path) -> None:
        if not self._inside_operation and end > start:
            self.result.events.append(Event(lane, name, start, end, path))

    def _loop(self, computation: Computation, loop: Instruction, weight: float, path) -> None:
        turns = trip_count(self.module, computation, loop)
        if turns is None:
            turns = self.trips(loop, tuple(name for name, _ in path))
        if turns is None:
            self.result.unknown_loops.add(loop.operation or loop.name)
            turns = 1
        if turns <= 0:
            return
        body = self.module.computations[loop.callee("body")]
        first, start = min(turns, 1.0), self.core
        operation = loop.operation
        self._inside_operation += operation is not None
        self._run(body, weight * first, (*path, (loop.name, 0)))
        if turns > 1:
            before = self.core
            self._run(body, weight * (turns - 1), (*path, (loop.name, 1)))
            more = (turns - 2) * (self.core - before)
            self.core += more
            self.free = {name: time + more for name, time in self.free.items()}
        self._inside_operation -= operation is not None
        if operation is not None:
            self._record("core", f"{operation}: loop", start, self.core, path)

    def _branch(self, instruction: Instruction, weight: float, path) -> None:
        """The branch that takes longest."""
        names = [name for _, name in instruction.called]
        before, kept, times = (self.core, dict(self.free)), self.result, {}
        for name in names:
            self.result = Result()
            self._run(self.module.computations[name], weight, path)
            times[name] = self.core
            self.core, self.free = before[0], dict(before[1])
        self.result = kept
        self._run(self.module.computations[max(names, key=times.get)], weight, path)

    def _start(self, computation: Computation, instruction: Instruction, weight: float, path) -> tuple[float, str]:
        """When something that runs beside the core has ended, and its class."""
        kind = instruction.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            return self._collective(computation, instruction, True, False, weight, path)
        if inner := instruction.callee("to_apply") or instruction.callee("calls"):
            return self._beside(self.module.computations[inner], "sparsecore" in instruction.attributes, weight, path)
        arrays = [array for array in instruction.arrays if array.dims]
        size = 0
        if arrays:
            moved = arrays[0].bytes if kind != "slice" else min(array.bytes for array in arrays)
            size = moved * max(sum(array.in_hbm for array in arrays[:2]), 1)
        return self._queue("HBM", size / self.chip.hbm_bandwidth, "prefetch", weight, path, size)

    def _queue(self, lane: str, seconds: float, label: str, weight: float, path, size: int = 0) -> tuple[float, str]:
        start = max(self.free[lane], self.core)
        self.free[lane] = start + seconds
        self._record(lane, label, start, start + seconds, path)
        if size:
            self.result.costs[label].bytes += weight * size
        return start + seconds + (HBM_LATENCY if lane == "HBM" and seconds else 0.0), label

    def _beside(self, computation: Computation, sparse_core: bool, weight: float, path) -> tuple[float, str]:
        """A computation that runs beside the core, on SparseCore or as an asynchronous collective."""
        end, label = self.core, "asynchronous call"
        for instruction in computation.instructions:
            kind = instruction.opcode.removesuffix("-start")
            if kind in COLLECTIVES:
                end, label = self._collective(computation, instruction, True, sparse_core, weight, path)
            elif inner := instruction.callee("to_apply") or instruction.callee("calls") if kind in ("call", "async") else None:
                end, label = self._beside(self.module.computations[inner], sparse_core, weight, path)
            elif instruction.opcode not in FREE and not instruction.opcode.endswith(("-done", "-start")):
                size = hbm_bytes(self.module, computation, instruction)
                label = f"{instruction.opcode} on SparseCore" if sparse_core else instruction.opcode
                end, label = self._queue("HBM", size / self.chip.hbm_bandwidth, label, weight, path, size)
        return end, label

    def _collective(self, computation, instruction, asynchronous: bool, sparse_core: bool, weight: float, path):
        kind = instruction.opcode.removesuffix("-start")
        links = links_of(instruction, self.chip, self.places)
        results = sum(array.bytes for array in instruction.arrays if array.dims)
        operands = [computation.by_name[name] for name in instruction.operands if name in computation.by_name]
        given = sum(array.bytes for operand in operands for array in operand.arrays)
        if instruction.opcode.endswith("-start"):
            results -= given  # a -start gives its operands back beside its results
        size = results if kind == "all-gather" else given
        seconds = collective_time(kind, size, links, self.chip)
        operation = instruction.operation or "model"
        key = (kind, size, links.devices, operation, asynchronous)
        entry = self.result.collectives.setdefault(
            key, Collective(kind, size, links.devices, asynchronous, sparse_core, seconds, operation)
        )
        entry.runs += weight
        end, _ = self._queue("links", seconds, f"{kind}, {operation}", weight, path)
        return end, f"wait for {kind}, {operation}"

    def _wait(self, instruction: Instruction, finished: dict[str, tuple[float, str]], weight: float) -> None:
        for name in instruction.operands:
            if name in finished and finished[name][0] > self.core:
                end, label = finished[name]
                label = label if label.startswith("wait") else f"wait for {label}"
                self._count(label, weight, end - self.core, waiting=end - self.core)
                self.core = end


