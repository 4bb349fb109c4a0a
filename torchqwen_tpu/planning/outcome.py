"""What playing a module gives: time by class of instructions, collectives, a timeline."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field


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
    """Something on the timeline; `lane` is core, HBM or links; `path` holds the loops around it, each with its turn. Loops of
    an operation are one event."""

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
