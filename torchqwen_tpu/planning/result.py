"""What a plan says, as data. Every time is modelled."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from torchqwen_tpu.planning.memory import Memory
from torchqwen_tpu.planning.outcome import Collective, Cost, Event
from torchqwen_tpu.planning.remedies import Remedy
from torchqwen_tpu.planning.request import PlanRequest
from torchqwen_tpu.planning.roofline import Roofline


@dataclass(frozen=True)
class Exchanged:
    """Collectives of a step: how many; bytes of their whole arrays; seconds on the links; and of those, what the core waits."""

    runs: float
    bytes: float
    seconds: float
    waiting: float


@dataclass(frozen=True)
class Step:
    """One kind of step; times in seconds, of one step.

    Args:
        kind: 'prefill', 'mixed', 'decode, start' or 'decode, end'.
        tokens: that it takes, on all devices.
        costs: by class of instruction; collectives: with `runs` in one step.
        events: a timeline of the graph, for one layer or period of layers.
        unknown_loops: operations whose loops nothing was known of; they count once.
    """

    kind: str
    seconds: float
    tokens: int
    costs: dict[str, Cost]
    collectives: tuple[Collective, ...]
    roofline: Roofline
    events: tuple[Event, ...] = field(repr=False)
    unknown_loops: tuple[str, ...] = ()

    @property
    def exchanged(self) -> Exchanged:
        """All collectives together."""
        waits = (cost.waiting for name, cost in self.costs.items() if any(entry.kind in name for entry in self.collectives))
        return Exchanged(
            sum(entry.runs for entry in self.collectives), sum(entry.runs * entry.size for entry in self.collectives),
            sum(entry.runs * entry.seconds for entry in self.collectives), sum(waits),
        )  # fmt: skip

    @property
    def binds(self) -> str:
        """What most of the time goes to."""
        sums = {
            "HBM": sum(cost.by_bytes for cost in self.costs.values()),
            "bundles": sum(cost.by_bundles for cost in self.costs.values()),
            "collectives": self.exchanged.waiting,
        }
        sums["other waits"] = sum(cost.waiting for cost in self.costs.values()) - sums["collectives"]
        return max(sums, key=sums.get)


@dataclass(frozen=True)
class LayoutPlan:
    """One layout, `name` with its sizes ('dp8'); `error` says why the model cannot be laid out so, and the rest is then empty.
    Where it does not fit, there are no steps and no times, and `remedies` are what would help.

    key_value_copies: devices that keep each key-value head. More than one is planned, but not loaded by this library: `runs`.
    time_to_first_token: of a prompt that joins others; _burst: on average where all come at once; time_per_output_token: the
        mean of the first decode step and the last. In seconds.
    tokens_per_second_chip: input and output tokens a second and chip over whole requests; `mixed` with prefill chunks that
        carry decoding sequences, `separate` with prefill first.
    notes: what differs from what the library does by default.
    compile_seconds: of all graphs; compile_memory: bytes of the largest process that compiled.
    """

    layout: str
    name: str
    ranks: int
    key_value_copies: int = 1
    memory: Memory | None = None
    steps: dict[str, Step] = field(default_factory=dict)
    time_to_first_token: float = 0.0
    time_to_first_token_burst: float = 0.0
    time_per_output_token: float = 0.0
    tokens_per_second_chip: dict[str, float] = field(default_factory=dict)
    compile_seconds: float = 0.0
    compile_memory: int = 0
    error: str | None = None
    remedies: tuple[Remedy, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return bool(self.steps) and self.memory.fits

    @property
    def runs(self) -> bool:
        return self.key_value_copies == 1


@dataclass(frozen=True)
class Plan:
    """What `torchqwen_tpu.plan` returns: `parameters` of the whole model by part, and a `LayoutPlan` for each layout."""

    request: PlanRequest
    chips: int
    cores: int
    layers: int
    parameters: dict[str, int]
    layouts: tuple[LayoutPlan, ...]

    @property
    def best(self) -> LayoutPlan:
        """The fastest layout of those that fit (and run, if any does); without one, the one that is short of least."""
        fitting = [layout for layout in self.layouts if layout.fits]
        if fitting:
            return max(fitting, key=lambda layout: (layout.runs, layout.tokens_per_second_chip["mixed"]))
        return max(self.layouts, key=lambda layout: layout.memory.left if layout.memory else float("-inf"))

    @property
    def fits(self) -> bool:
        return self.best.fits

    def to_dict(self) -> dict:
        """For JSON: everything but the timelines."""
        answer = dataclasses.asdict(self)
        for layout, entry in zip(self.layouts, answer["layouts"], strict=True):
            entry["fits"] = layout.fits
            if layout.memory:
                entry["memory"] |= {
                    "used": layout.memory.used, "left": layout.memory.left,
                    "largest_concurrency": layout.memory.largest_concurrency, "largest_context": layout.memory.largest_context,
                }  # fmt: skip
            for kind, step in layout.steps.items():
                entry["steps"][kind].pop("events")
                entry["steps"][kind] |= {"binds": step.binds, "exchanged": dataclasses.asdict(step.exchanged)}
        answer["note"] = "All times are modelled (custom_ops/cost_model.py), none is measured."
        answer["best"] = self.best.layout
        return answer
