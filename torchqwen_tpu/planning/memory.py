"""Memory of one core: what lies in it, what is left, and what more would fit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from custom_ops.cost_model import Chip
from torchqwen_tpu.batch import bucket
from torchqwen_tpu.planning.arguments import STATES, Argument
from torchqwen_tpu.planning.compile import CompiledStep
from torchqwen_tpu.planning.request import PlanRequest

_PARTS = (
    ("routed experts", ".mlp.experts."),
    ("shared expert", ".shared_expert."),
    ("router", ".mlp.router."),
    ("Gated DeltaNet", ".linear_attn."),
    ("attention", ".self_attn."),
    ("dense MLP", ".mlp."),
    ("embedding", "embed_tokens"),
    ("head", "lm_head"),
    ("norms", "norm"),
)
PAGES = "KV pages"
LEAST_SLOTS = 2
"""Of a rank: caches have no fewer (see `CacheLayout.shape`)."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one core.

    Args:
        capacity: of its HBM.
        weights: by part; states: by kind, as allocated.
        padding: what tiles add to the arguments, and the metadata of a step.
        temporaries: of the step that needs most; code: of all steps' programs. Both are 0 where nothing was compiled.
        ranks: data-parallel; sequences: of each; tokens: of each sequence.
        slot: what a sequence's recurrent states and windows take; page: what `page_size` of its tokens take.
        limit: the most tokens of a sequence that the model takes.
    """

    capacity: int
    weights: dict[str, int]
    states: dict[str, int]
    padding: int
    temporaries: int
    code: int
    ranks: int
    sequences: int
    tokens: int
    slot: int
    page: int
    page_size: int
    limit: int

    @property
    def fixed(self) -> int:
        """What does not depend on the sequences; temporaries are taken as they are."""
        return sum(self.weights.values()) + self.padding + self.temporaries + self.code

    @property
    def used(self) -> int:
        return self.fixed + sum(self.states.values())

    @property
    def left(self) -> int:
        return self.capacity - self.used

    @property
    def fits(self) -> bool:
        return self.left >= 0

    @property
    def largest_concurrency(self) -> int:
        """Sequences on all devices with as many tokens as planned."""
        room, each = self.capacity - self.fixed, self._pages * self.page
        if not self.slot:
            return max(room // each, 0) * self.ranks
        best, slots = 0, LEAST_SLOTS
        while slots * self.slot + each <= room:
            best = max(best, min(slots, (room - slots * self.slot) // each if each else slots))
            slots *= 2
        return best * self.ranks

    @property
    def largest_context(self) -> int:
        """Tokens of each sequence at the planned concurrency, up to the model's limit."""
        room = self.capacity - self.fixed - slots_of(self.sequences) * self.slot
        if room < 0 or not self.page:
            return 0 if room < 0 else self.limit
        return min(room // (self.sequences * self.page) * self.page_size, self.limit)

    @property
    def _pages(self) -> int:
        """Of a sequence."""
        return -(-self.tokens // self.page_size)


def slots_of(sequences: int) -> int:
    """Sequences of a rank that its states have room for: shapes are rounded up."""
    return bucket(sequences, LEAST_SLOTS)


def memory_of(
    sizes: tuple[Sequence[Argument], Sequence[Argument]], steps: Sequence[CompiledStep], request: PlanRequest, chip: Chip,
    ranks: int, limit: int,
) -> Memory:  # fmt: skip
    """The memory that a layout's steps take together: weights and states once, the largest temporaries.

    Args:
        sizes: weights, and states of one sequence with one page (see `sizes_of`).
        steps: that were compiled; without any, what is known without compiling.
    """
    weights: dict[str, int] = defaultdict(int)
    for argument in sizes[0]:
        weights[part_of(argument.part)] += argument.bytes
    of_one = dict.fromkeys(STATES.values(), 0)
    for argument in sizes[1]:
        of_one[argument.part] += argument.bytes
    page = of_one.pop(PAGES)
    sequences = -(-request.concurrency // ranks)
    states = {kind: size * slots_of(sequences) for kind, size in of_one.items() if size}
    if page:
        states[PAGES] = page * sequences * -(-request.total_len // request.page_size)
    given = sum(weights.values()) + sum(states.values())
    return Memory(
        capacity=chip.hbm_bytes,
        weights=dict(sorted(weights.items(), key=lambda item: -item[1])),
        states=states,
        # Arguments of all steps are the same but for the metadata.
        padding=max(min((step.memory["argument"] for step in steps), default=given) - given, 0),
        temporaries=max((step.memory["temp"] + step.memory["output"] - step.memory["alias"] for step in steps), default=0),
        code=sum(step.memory["generated_code"] for step in steps),
        ranks=ranks,
        sequences=sequences,
        tokens=request.total_len,
        slot=sum(of_one.values()),
        page=page,
        page_size=request.page_size,
        limit=limit,
    )


def part_of(name: str) -> str:
    return next((part for part, mark in _PARTS if mark in name), "other")
