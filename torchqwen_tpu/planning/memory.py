"""Memory of one core: what lies in it, what is left, and what more would fit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from custom_ops.cost_model import GIB, Chip
from torchqwen_tpu.planning.compile import CompiledStep

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
STATES = ("KV pages", "recurrent states", "convolution windows")


@dataclass(frozen=True)
class Memory:
    """Bytes of one core.

    Args:
        capacity: of its HBM.
        weights: by part; states: by kind, as allocated.
        padding: what tiles add to the arguments, and the metadata of a step.
        temporaries: of the step that needs most; code: of all steps' programs.
        rows: sequences of a core that the states have room for; tokens: of each.
        per_sequence: bytes that a sequence's states take; of these `per_token` grow with its tokens.
    """

    capacity: int
    weights: dict[str, int]
    states: dict[str, int]
    padding: int
    temporaries: int
    code: int
    ranks: int
    rows: int
    tokens: int
    per_sequence: int
    per_token: float

    @property
    def used(self) -> int:
        return sum(self.weights.values()) + sum(self.states.values()) + self.padding + self.temporaries + self.code

    @property
    def left(self) -> int:
        return self.capacity - self.used

    @property
    def fits(self) -> bool:
        return self.left >= 0

    @property
    def largest_concurrency(self) -> int:
        """Sequences on all devices with as many tokens as planned; temporaries taken as they are."""
        room = self.left + sum(self.states.values())
        return max(room // self.per_sequence, 0) * self.ranks

    @property
    def largest_context(self) -> int:
        """Tokens of each sequence at the planned concurrency; temporaries taken as they are."""
        if not self.per_token:
            return self.tokens
        return max(self.tokens + int(self.left / (self.rows * self.per_token)), 0)

    def advice(self, dtype: str, layouts: Sequence[str]) -> str:
        """What would make it fit, in a sentence."""
        short = -self.left
        ideas = []
        if self.temporaries > short:
            ideas.append(f"its temporaries ({_gib(self.temporaries)}; a smaller prefill chunk needs fewer)")
        if dtype == "bf16":
            ideas.append("FP8 weights (half of the weights' bytes)")
        if self.largest_concurrency >= self.ranks:
            ideas.append(f"a concurrency of {self.largest_concurrency}")
        ideas.append("more chips")
        if len(layouts) > 1:
            ideas.append("a layout that splits heads (dp_tp, tp)")
        uncounted = "" if self.temporaries else ", temporaries not counted"
        need = f"{_gib(self.used)} a core are needed{uncounted}, {_gib(short)} more than there are"
        return f"{need}; what would help: {'; '.join(ideas)}"


def memory_of(steps: Sequence[CompiledStep], chip: Chip, ranks: int, tokens: int) -> Memory:
    """The memory that a layout's steps take together: weights and states once, the largest temporaries."""
    weights: dict[str, int] = defaultdict(int)
    states: dict[str, int] = defaultdict(int)
    shapes = {}
    one = min(steps, key=lambda step: step.memory["argument"])  # their arguments are the same but for the metadata
    for argument in one.arguments:
        if argument.part in STATES:
            states[argument.part] += argument.bytes
            shapes[argument.part] = argument.shape
        elif argument.part != "header":
            weights[part_of(argument.part)] += argument.bytes
    rows = -(-one.graph.sequences // ranks)
    allocated = one.slots
    pages = states.get("KV pages", 0)
    page_tokens = tokens if not pages else shapes["KV pages"][1] // allocated * shapes["KV pages"][3]
    per_token = pages / allocated / page_tokens if pages else 0.0
    return Memory(
        capacity=chip.hbm_bytes,
        weights=dict(sorted(weights.items(), key=lambda item: -item[1])),
        states=dict(states),
        padding=one.memory["argument"] - sum(weights.values()) - sum(states.values()),
        temporaries=max(step.memory["temp"] + step.memory["output"] - step.memory["alias"] for step in steps),
        code=sum(step.memory["generated_code"] for step in steps),
        ranks=ranks,
        rows=rows,
        tokens=page_tokens,
        per_sequence=max(sum(states.values()) // allocated, 1),
        per_token=per_token,
    )


def part_of(name: str) -> str:
    return next((part for part, mark in _PARTS if mark in name), "other")


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
