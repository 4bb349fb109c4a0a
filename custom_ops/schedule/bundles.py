"""Reads the final bundle schedule of one kernel from the TPU compiler's dump.

A bundle is what one core issues in a cycle. The dump has a line a bundle, in program order; regions of the program start
at named bundles, and a branch back to an earlier one closes a loop. Bundles in a branch's delay slots run before it
takes effect, and bundles without an instruction take their cycle like the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*:")
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
_BRANCH = re.compile(r"sbr\.rel (?:\(!?(%\w+)\) )?target = \$region(\d+)")
_EXIT = r"{predicate} = scmp\.ge\.s32\.totalorder (?:\(!?%\w+\), )?%\w+, (\d+)\b"
_STAGE = re.compile(r"iteration index, stage = (\d+)")
# Checks of bounds name the DMA that they are for ("for %1 = dma...").
_DMA = re.compile(r"(?<!for )%\w+ = dma\.(\w+) [^/]*(?:/\*\w+=\*/[^,]*, )*?/\*size_in_granules=\*/(%?\w+)")
_WINDOW = re.compile(r"\sbase_bounds: (\(.*\))\n(?:.*\n)??window_bounds: (\(.*\))")
_WORD_SPILL = re.compile(r"sst \[smem:\[#allocation\d+_spill\]\]|sld \[smem:\[#allocation\d+_spill\]\]")

DELAY_SLOTS = 6
"""Bundles after a branch that still run: as every loop of TPU7x's schedules shows, whose regions end there."""
GRANULE_BYTES = 32


class ScheduleError(ValueError):
    """A schedule that this reader does not understand, or that lacks a count it needs."""


@dataclass
class Loop:
    """A loop, or the whole program as the outermost one, which runs once.

    first, last: its bundles, inner loops' among them.
    own: bundles that are not an inner loop's.
    steps: how often its body runs each time that it is entered.
    extra: iterations beyond the steps in which the pipeline fills or drains, and most of the body is skipped.
    longest_skip: (first, last) of the longest range of bundles that one branch can skip, or None.
    vector_spills, word_spills: stores to and loads from spill slots among `own`.
    hbm_bytes: what the DMAs among `own` move in a step; None where a size is not a constant.
    hbm_bytes_once: the same of DMAs whose window is the whole array, which a pipeline fetches or stores only once.
    busiest: the unit that has most to do among `own`, and the part of the bundles that it is fully used.
    """

    first: int
    last: int
    own: int = 0
    steps: int | None = 1
    extra: int = 0
    longest_skip: tuple[int, int] | None = None
    vector_spills: int = 0
    word_spills: int = 0
    hbm_bytes: int | None = 0
    hbm_bytes_once: int = 0
    busiest: tuple[str, float] | None = None
    inner: list[Loop] = field(default_factory=list)

    def walk(self) -> Iterator[Loop]:
        """This loop and all within, in program order."""
        yield self
        for loop in self.inner:
            yield from loop.walk()

    def bundles(self) -> int:
        """Bundles issued each time that the loop is entered, with every predicated region taken."""
        body = self.own + sum(loop.bundles() for loop in self.inner)
        skipped = 0
        if self.extra and self.longest_skip:
            first, last = self.longest_skip
            skipped = last - first + 1
            for loop in self.inner:
                if first <= loop.first and loop.last <= last:
                    skipped += loop.bundles() - (loop.last - loop.first + 1)
        return self.steps * body + self.extra * (body - skipped)

    def bytes_moved(self) -> int | None:
        """Bytes between HBM and VMEM each time that the loop is entered, at most: a block that the step before had too is
        not fetched again. None where a DMA's size is not a constant."""
        parts = [self.hbm_bytes, *(loop.bytes_moved() for loop in self.inner)]
        return None if None in parts else self.hbm_bytes_once + self.steps * sum(parts)


Trips = Callable[[Loop], int | None]


def read_schedule(text: str, utilization: str = "", trips: Trips = lambda loop: None, *, counted: bool = True) -> Loop:
    """The loops of a kernel.

    Args:
        text: its `final_bundles.txt`.
        utilization: its `final_hlo-static-per-bundle-utilization.txt`, for spills and the busiest unit.
        trips: how often a loop runs each time that it is entered, 0 for one that is not entered; None leaves what the loop
            has in `steps`, the constant of its exit test (None where it is not a constant).
        counted: whether every loop must have a count; without, `steps` of the others stays None.

    Raises:
        ScheduleError: a loop without a count, or a text that is no schedule.
    """
    bundles = _bundles(text)
    program = Loop(0, len(bundles) - 1)
    regions: dict[int, int] = {}
    loops: dict[int, Loop] = {}
    forward: list[tuple[int, int]] = []
    for address, bundle in enumerate(bundles):
        regions.update((int(region), address) for region in _REGION.findall(bundle))
        for _, target in _BRANCH.findall(bundle):
            first = regions.get(int(target))
            if first is None:
                forward.append((address, int(target)))
            else:
                # Several branches back to one bundle (a `continue`) close one loop.
                loops[first] = Loop(first, min(address + DELAY_SLOTS, program.last))
    skips = [(address + DELAY_SLOTS + 1, regions[region] - 1) for address, region in forward if region in regions]
    _nest(program, sorted(loops.values(), key=lambda loop: (loop.first, -loop.last)))
    units, rows = _utilization(utilization, len(bundles))
    for loop in program.walk():
        _describe(loop, bundles, skips, units, rows)
    _count_trips(program, bundles, trips, counted)
    return program


def _bundles(text: str) -> list[str]:
    """The text of each bundle; the notes of some go over several lines."""
    bundles: list[str] = []
    for line in text.splitlines():
        if match := _BUNDLE.match(line):
            if int(match[1], 16) != len(bundles):
                raise ScheduleError(f"bundle {match[1]} follows {len(bundles)} others")
            bundles.append(line)
        elif bundles:
            bundles[-1] += "\n" + line
    if not bundles:
        raise ScheduleError("no bundles")
    return bundles


def _nest(outer: Loop, loops: list[Loop]) -> None:
    """Put `loops`, sorted by where they start and longer ones first, into each other."""
    open_loops = [outer]
    for loop in loops:
        while loop.first > open_loops[-1].last:
            open_loops.pop()
        # The last delay slots of an inner loop's branch may lie behind the outer one's end.
        loop.last = min(loop.last, open_loops[-1].last)
        open_loops[-1].inner.append(loop)
        open_loops.append(loop)


def _own(loop: Loop) -> list[int]:
    inside = {address for inner in loop.inner for address in range(inner.first, inner.last + 1)}
    return [address for address in range(loop.first, loop.last + 1) if address not in inside]


def _describe(loop: Loop, bundles: list[str], skips: list[tuple[int, int]], units: dict[str, int], rows: list[list[int]]):
    own = _own(loop)
    loop.own = len(own)
    text = "\n".join(bundles[address] for address in own)
    loop.extra = max(map(int, _STAGE.findall(text)), default=0)
    loop.word_spills = len(_WORD_SPILL.findall(text))
    _describe_dmas(loop, text)
    within = [(first, last) for first, last in skips if loop.first < first <= last <= loop.last]
    loop.longest_skip = max(within, key=lambda skip: skip[1] - skip[0], default=None)
    if not rows:
        return
    totals = {unit: sum(rows[address][column] for address in own) for column, unit in enumerate(units)}
    loop.vector_spills = sum(count for unit, count in totals.items() if unit in ("VLOAD:FILL", "VSTORE:SPILL"))
    used = {unit: totals[unit] / (capacity * len(own)) for unit, capacity in units.items() if ":" not in unit}
    loop.busiest = max(used.items(), key=lambda item: item[1])


def _describe_dmas(loop: Loop, text: str) -> None:
    for match in _DMA.finditer(text):
        kind, size = match.groups()
        if "hbm" not in kind:
            continue
        if not size.isdigit():
            loop.hbm_bytes = None
            return
        moved = int(size) * GRANULE_BYTES * kind.count("hbm")  # from HBM to HBM: read and written
        following = text.find(" = dma.", match.end())
        window = _WINDOW.search(text, match.end(), following if following >= 0 else len(text))
        if window and window[1] == window[2]:
            loop.hbm_bytes_once += moved
        else:
            loop.hbm_bytes += moved


def _utilization(text: str, count: int) -> tuple[dict[str, int], list[list[int]]]:
    """Slots a bundle has of each unit, and those that each bundle uses."""
    if not text:
        return {}, []
    _, names, capacities, _, *rows = text.splitlines()
    if len(rows) != count:
        raise ScheduleError(f"{count} bundles, but {len(rows)} lines of utilization")
    units = dict(zip(names.replace(" ", "").split(","), map(int, capacities.split()), strict=True))
    return units, [list(map(int, row.split())) for row in rows]


def _count_trips(program: Loop, bundles: list[str], trips: Trips, counted: bool) -> None:
    loops = list(program.walk())[1:]
    for loop in loops:
        loop.steps = _constant_bound(loop, bundles)
        if (declared := trips(loop)) is not None:
            loop.steps = declared
    if counted and any(loop.steps is None for loop in loops):
        listed = ", ".join(f"{loop.own} bundles at {loop.first:#x} ({_times(loop)})" for loop in loops)
        raise ScheduleError(f"loops whose bound is no constant need a trip count: {listed}")


def _constant_bound(loop: Loop, bundles: list[str]) -> int | None:
    """Steps of a loop by the constant that its exit test compares with, as if it counted from zero; the extra iterations
    of its pipeline are left out."""
    own = "\n".join(bundles[loop.first : loop.last + 1])
    for predicate, _ in reversed(_BRANCH.findall("\n".join(bundles[address] for address in _own(loop)))):
        if predicate and (found := re.findall(_EXIT.format(predicate=re.escape(predicate)), own)):
            return max(int(found[-1]) - loop.extra, 0)
    return None


def _times(loop: Loop) -> str:
    return f"{'?' if loop.steps is None else loop.steps} times"
