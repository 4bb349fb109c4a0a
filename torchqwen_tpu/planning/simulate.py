"""Plays a scheduled HLO module on one core in the cost model of `custom_ops.cost_model`.

The core runs instructions in the order of the schedule. HBM, the links and SparseCore's copies are queues of their own; what a
schedule starts runs beside the core until the schedule waits for it. A loop's body is played twice: the first turn, and
one that stands for all the others.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from custom_ops.cost_model import HBM_LATENCY, Chip, Links, collective_time
from custom_ops.schedule.bundles import Loop
from torchqwen_tpu.planning.hlo import Array, Computation, Instruction, Module, trip_count
from torchqwen_tpu.planning.traffic import FREE, ProgramKeys, hbm_bytes

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
_OPERATION = re.compile(r"jit\((\w+)\)")
_GROUPS = re.compile(r"replica_groups=(\{\{[\d,{} ]*\}\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)")
_PAIRS = re.compile(r"source_target_pairs=\{([\d,{} ]*)\}")

Trips = Callable[[Instruction, tuple[str, ...]], float | None]
"""Turns of a while loop whose bound is data, by the loop and the operations of the loops around it."""
KernelTrips = Callable[[str, Loop], int | None]
"""Turns of a loop in a kernel whose bound is data, by the kernel's name."""
KernelBytes = Callable[[str], int | None]
"""Bytes that a kernel moves, where its operands and results do not tell."""
KernelSeconds = Callable[[str, Array], float | None]
"""Seconds of a kernel that communicates, by its name and its largest operand; None for other kernels."""


@dataclass
class Cost:
    """What a class of instructions comes to in one run of the graph.

    runs: how often; seconds: of the core's time; cycles: bundles; by_bundles, by_bytes, waiting: seconds in which bundles, HBM,
    or something that runs beside the core decided.
    estimated: whether XLA's own estimate stands for a schedule that is missing.
    """

    runs: float = 0.0
    seconds: float = 0.0
    cycles: float = 0.0
    bytes: float = 0.0
    by_bundles: float = 0.0
    by_bytes: float = 0.0
    waiting: float = 0.0
    estimated: bool = False

    @property
    def bound(self) -> str:
        parts = {"bundles": self.by_bundles, "HBM": self.by_bytes, "waiting": self.waiting}
        return max(parts, key=parts.get)


@dataclass
class Collective:
    """A collective of the graph: `size` bytes of the whole array over `devices`, `runs` times in a run of the graph."""

    kind: str
    size: int
    devices: int
    asynchronous: bool
    sparse_core: bool
    seconds: float
    operation: str
    runs: float = 0.0


@dataclass
class Event:
    """Something on the timeline; `lane` is core, HBM, links or SparseCore; `depth` counts the loops around it."""

    lane: str
    name: str
    start: float
    end: float
    path: tuple[tuple[str, int], ...]


@dataclass
class Result:
    """seconds: of one run of the graph."""

    seconds: float = 0.0
    costs: dict[str, Cost] = field(default_factory=lambda: defaultdict(Cost))
    collectives: dict[tuple, Collective] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    unknown_loops: set[str] = field(default_factory=set)


class Player:
    """Plays one module.

    Args:
        schedules: programs by the name of their instruction.
        classify: the class that an instruction is counted under.
    """

    def __init__(
        self,
        module: Module,
        schedules: dict[str, Loop],
        chip: Chip,
        torus: tuple[int, ...],
        classify: Callable[[Module, Computation, Instruction], str],
        trips: Trips,
        kernel_trips: KernelTrips,
        kernel_bytes: KernelBytes,
        kernel_seconds: KernelSeconds,
        bandwidth: float | None = None,
    ):
        self.module, self.chip, self.torus = module, chip, torus
        self.classify, self.trips, self.kernel_trips, self.kernel_bytes = classify, trips, kernel_trips, kernel_bytes
        self.bandwidth = bandwidth or chip.hbm_bandwidth
        self.kernel_seconds = kernel_seconds
        self._keys = ProgramKeys(module)
        self._programs = self._by_key(schedules)
        self._known: dict[tuple[str, str], tuple] = {}

    def play(self) -> Result:
        self.result = Result()
        self.core = 0.0
        self.free = {"HBM": 0.0, "links": 0.0}
        self._run(self.module.entry, 1.0, ())
        self.result.seconds = self.core
        return self.result

    def _by_key(self, schedules: dict[str, Loop]) -> dict[str, tuple[str, Loop]]:
        programs = {}
        for computation in self.module.computations.values():
            for instruction in computation.instructions:
                if instruction.name in schedules:
                    key = self._keys.key(computation, instruction)
                    programs[key] = (instruction.name, schedules[instruction.name])
        return programs

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
        label, cycles, size, estimated = self._program(computation, instruction)
        start, by_bundles = self.core, cycles / self.chip.clock
        end = start + by_bundles
        decided = {"by_bundles": by_bundles}
        if size:
            arrived = max(self.free["HBM"], start) + size / self.bandwidth
            self.free["HBM"] = arrived
            if arrived + HBM_LATENCY > end:
                end = arrived + HBM_LATENCY
                decided = {"by_bytes": end - start}
        self.core = end
        cost = self._count(label, weight, end - start, cycles=cycles, bytes=size, **decided)
        cost.estimated |= estimated
        self._record("core", instruction.name if instruction.opcode == "custom-call" else label, start, end, path)

    def _communicates(self, computation: Computation, instruction: Instruction, weight: float, path) -> bool:
        """Counts a kernel that is a collective, which the core waits for."""
        operands = [computation.by_name[name] for name in instruction.operands if name in computation.by_name]
        largest = max((array for operand in operands for array in operand.arrays), key=lambda array: array.bytes, default=None)
        kind = instruction.name.rpartition(".")[0] or instruction.name
        seconds = None if largest is None else self.kernel_seconds(kind, largest)
        if seconds is None:
            return False
        start, label = self.core, f"kernel {kind}"
        self.core += seconds
        operation, devices = operation_of(instruction) or "model", int(np.prod(self.torus)) * self.chip.cores
        entry = self.result.collectives.setdefault(
            (kind, largest.bytes, devices, operation, False),
            Collective(label, largest.bytes, devices, False, False, seconds, operation),
        )
        entry.runs += weight
        self._count(label, weight, seconds, waiting=seconds)
        self._record("core", label, start, self.core, path)
        self._record("links", label, start, self.core, path)
        return True

    def _program(self, computation: Computation, instruction: Instruction) -> tuple[str, float, int, bool]:
        """Class, cycles, bytes of HBM, and whether the cycles are XLA's estimate."""
        place = (computation.name, instruction.name)
        if place not in self._known:
            size = self.kernel_bytes(instruction.name) if instruction.opcode == "custom-call" else None
            size = hbm_bytes(self.module, computation, instruction) if size is None else size
            found = self._programs.get(self._keys.key(computation, instruction))
            cycles = None if found is None else self._bundles(*found)
            estimated = cycles is None
            if estimated:
                cycles = instruction.estimated_cycles or 0
            self._known[place] = (self.classify(self.module, computation, instruction), cycles, size, estimated and cycles > 0)
        return self._known[place]

    def _bundles(self, name: str, program: Loop) -> float | None:
        def entered(loop: Loop) -> float | None:
            turns = self.kernel_trips(name, loop)
            turns = loop.steps if turns is None else turns
            inner = [entered(other) for other in loop.inner]
            if turns is None or None in inner:
                return None
            body = loop.own + sum(inner)
            skipped = loop.longest_skip[1] - loop.longest_skip[0] + 1 if loop.extra and loop.longest_skip else 0
            return turns * body + loop.extra * max(body - skipped, 0)

        return entered(program)

    def _count(self, label: str, weight: float, seconds: float, **parts: float) -> Cost:
        cost = self.result.costs[label]
        cost.runs += weight
        cost.seconds += weight * seconds
        for name, value in parts.items():
            setattr(cost, name, getattr(cost, name) + weight * value)
        return cost

    def _record(self, lane: str, name: str, start: float, end: float, path) -> None:
        if len(path) <= 2 and end > start:
            self.result.events.append(Event(lane, name, start, end, path))

    def _loop(self, computation: Computation, loop: Instruction, weight: float, path) -> None:
        turns = trip_count(self.module, computation, loop)
        if turns is None:
            turns = self.trips(loop, tuple(name for name, _ in path))
        if turns is None:
            self.result.unknown_loops.add(operation_of(loop) or loop.name)
            turns = 1
        if turns <= 0:
            return
        body = self.module.computations[loop.callee("body")]
        first = min(turns, 1.0)
        start = self.core
        self._run(body, weight * first, (*path, (loop.name, 0)))
        if turns > 1:
            before = self.core
            self._run(body, weight * (turns - 1), (*path, (loop.name, 1)))
            more = (turns - 2) * (self.core - before)
            self.core += more
            self.free = {name: time + more for name, time in self.free.items()}
        if len(path) == 2:
            self._record("core", operation_of(loop) or loop.name, start, self.core, path)

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
        return self._queue("HBM", size / self.bandwidth, "prefetch", weight, path, size)

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
                end, label = self._queue("HBM", size / self.bandwidth, label, weight, path, size)
        return end, label

    def _collective(self, computation, instruction, asynchronous: bool, sparse_core: bool, weight: float, path):
        kind = instruction.opcode.removesuffix("-start")
        links = links_of(instruction, self.chip, self.torus)
        results = sum(array.bytes for array in instruction.arrays if array.dims)
        operands = [computation.by_name[name] for name in instruction.operands if name in computation.by_name]
        given = sum(array.bytes for operand in operands for array in operand.arrays)
        if instruction.opcode.endswith("-start"):
            results -= given  # a -start gives its operands back beside its results
        size = results if kind == "all-gather" else given
        seconds = collective_time(kind, size, links, self.chip)
        operation = operation_of(instruction) or "model"
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


def operation_of(instruction: Instruction) -> str | None:
    """The operation of ours that an instruction belongs to, by the outermost function of JAX in its name."""
    match = _OPERATION.search(instruction.op_name)
    return match[1] if match else None


def links_of(instruction: Instruction, chip: Chip, torus: tuple[int, ...]) -> Links:
    """How the devices of a collective's first group are connected; device = core + cores * chip, chips in row-major order."""
    group = _first_group(instruction.attributes)
    chips = sorted({device // chip.cores for device in group})
    sizes = np.array(torus)
    coordinates = np.stack(np.unravel_index(chips, torus)) if chips else np.zeros((len(sizes), 1))
    extent = [len(set(axis)) for axis in coordinates]
    return Links(len(group), max(len(chips), 1), tuple(size for size in extent if size > 1))


def _first_group(attributes: str) -> list[int]:
    if match := _PAIRS.search(attributes):
        pairs = [list(map(int, pair.split(","))) for pair in re.findall(r"\{(\d+,\d+)\}", "{" + match[1] + "}")]
        return next((pair for pair in pairs if pair[0] != pair[1]), [0])
    match = _GROUPS.search(attributes)
    if not match:
        return [0]
    text = match[1]
    if text.startswith("{"):
        return [int(number) for number in text[2:].split("}")[0].split(",") if number.strip()]
    shape, _, rest = text.partition("<=")
    sizes, order = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", rest).groups()
    devices = np.arange(np.prod(list(map(int, sizes.split(","))))).reshape(list(map(int, sizes.split(","))))
    if order:
        devices = devices.transpose(list(map(int, order.split(","))))
    return devices.reshape(list(map(int, shape.strip("[]").split(","))))[0].tolist()
