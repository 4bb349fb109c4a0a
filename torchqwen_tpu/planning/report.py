"""A plan as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from custom_ops.cost_model import GIB
from torchqwen_tpu.planning.memory import PAGES
from torchqwen_tpu.planning.published import LEFT_OUT, comparisons
from torchqwen_tpu.planning.result import LayoutPlan, Plan, Step
from torchqwen_tpu.planning.table import aligned

LISTED = 14
"""Classes of instructions that a table lists; the others are one line."""


def format_plan(plan: Plan) -> str:
    """All layouts side by side, then the best one in detail."""
    best = plan.best
    details = _layout(best, plan.layers) if best.memory else ()
    return "\n".join([*_summary(plan), *_remedies(best), *details, *_published(plan)])


def headline(plan: Plan) -> str:
    """One sentence: whether it fits, and how fast."""
    best, request = plan.best, plan.request
    what = f"{request.concurrency} × ({request.input_len} + {request.output_len}) tokens on {request.topology}"
    if not best.fits:
        return f"{what}: does not fit. {why_not(best)}"
    return (
        f"{what}: fits with layout {best.name}, {best.memory.left / GIB:.1f} GiB a core left; modelled "
        f"{best.tokens_per_second_chip['mixed']:,.0f} tokens/s/chip, {1e3 * best.time_per_output_token:.2f} ms a decode step."
    )


def machine(plan: Plan) -> str:
    """Its chips and their cores."""
    return f"{_many(plan.chips, 'chip')} × {_many(plan.cores, 'core')}"


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count > 1 else ''}"


def why_not(layout: LayoutPlan) -> str:
    """By how much a layout does not fit."""
    if layout.memory is None:
        return layout.error
    memory = layout.memory
    uncounted = "" if memory.temporaries else " (temporaries not counted)"
    return (
        f"Layout {layout.name} needs {memory.used / GIB:.1f} GiB a core{uncounted}, {-memory.left / GIB:.1f} GiB more than the "
        f"{memory.capacity / GIB:.1f} GiB there are."
    )


def _summary(plan: Plan) -> Iterator[str]:
    yield headline(plan)
    billions = sum(plan.parameters.values()) / 1e9
    yield f"{billions:.1f} B parameters, {machine(plan)}. All times are modelled."
    yield ""
    yield from aligned(beside_each_other(plan))
    for layout in plan.layouts:
        yield from notes(layout)


def beside_each_other(plan: Plan) -> list[tuple[str, ...]]:
    """The layouts as columns of a table: memory, times, and what each exchanges and keeps more than once."""
    layouts = [layout for layout in plan.layouts if layout.memory]
    memories = [layout.memory for layout in layouts]
    timed = [layout if layout.steps else None for layout in layouts]
    best = " (best)" if len(layouts) > 1 else ""
    rows = [
        _row("layout", layouts, lambda layout: layout.name + (best if layout is plan.best else "")),
        _row("used, GiB a core", memories, lambda memory: f"{memory.used / GIB:.1f}"),
        _row("  weights", memories, lambda memory: f"{sum(memory.weights.values()) / GIB:.1f}"),
        _row("  KV pages", memories, lambda memory: f"{memory.states.get(PAGES, 0) / GIB:.2f}"),
        _row("  times that a key-value head is kept", layouts, lambda layout: f"{layout.key_value_copies}"),
        _row("left, GiB a core", memories, lambda memory: f"{memory.left / GIB:.1f}"),
        _row("largest concurrency", memories, lambda memory: f"{memory.largest_concurrency:,}"),
        _row("largest context", memories, lambda memory: f"{memory.largest_context:,}"),
    ]
    for kind, name in (("prefill", "prefill step"), ("mixed", "mixed step"), ("decode, start", "first decode step")):
        steps = [layout.steps.get(kind) for layout in layouts]
        if any(steps):
            rows += [
                _row(f"{name}, ms", steps, lambda step: f"{1e3 * step.seconds:.2f}"),
                _row("  tokens", steps, lambda step: f"{step.tokens:,}"),
                _row("  collectives", steps, lambda step: f"{step.exchanged.runs:,.0f}"),
                _row("  their arrays, MB", steps, lambda step: f"{step.exchanged.bytes / 1e6:,.1f}"),
                _row("  waited for them, ms", steps, lambda step: f"{1e3 * step.exchanged.waiting:.2f}"),
            ]
    return rows + [
        _row("mean decode step, ms", timed, lambda layout: f"{1e3 * layout.time_per_output_token:.2f}"),
        _row("first token of a prompt that joins, s", timed, lambda layout: f"{layout.time_to_first_token:.2f}"),
        _row("  on average if all come at once, s", timed, lambda layout: f"{layout.time_to_first_token_burst:.2f}"),
        _row("tokens/s/chip", timed, lambda layout: f"{layout.tokens_per_second_chip['mixed']:,.0f}"),
        _row("compiled in, s", timed, lambda layout: f"{layout.compile_seconds:.0f}"),
    ]


def notes(layout: LayoutPlan) -> list[str]:
    """What is to be known of a layout besides its figures."""
    return [f"{layout.name}: {note}" for note in (layout.error, *layout.notes) if note]


def _row(name: str, columns: Sequence, text: Callable[..., str]) -> tuple[str, ...]:
    return (name, *("–" if column is None else text(column) for column in columns))


def collectives(step: Step, layers: int) -> list[tuple[str, ...]]:
    """A table of what a step exchanges, what takes longest first."""
    rows = [("collective", "MB", "devices", "a layer", "in all", "MB in all", "µs each", "asynchronous")]
    for entry in sorted(step.collectives, key=lambda entry: -entry.runs * entry.seconds):
        where = "on SparseCore" if entry.sparse_core else "yes" if entry.asynchronous else "no"
        rows.append((
            f"{entry.kind}, {entry.operation}", f"{entry.size / 1e6:,.3f}", f"{entry.devices}", f"{entry.runs / layers:.2f}",
            f"{entry.runs:,.0f}", f"{entry.runs * entry.size / 1e6:,.1f}", f"{1e6 * entry.seconds:.1f}", where,
        ))  # fmt: skip
    return rows


def _remedies(layout: LayoutPlan) -> Iterator[str]:
    if layout.remedies:
        yield ""
        yield "What would help (temporaries taken as they are)"
        yield from (f"  {remedy}" for remedy in layout.remedies)


def _layout(layout: LayoutPlan, layers: int) -> Iterator[str]:
    memory = layout.memory
    yield ""
    yield f"Memory of a core, layout {layout.name} (GiB of {memory.capacity / GIB:.0f})"
    room = f"{memory.sequences} × {memory.tokens:,} tokens"
    parts = memory.weights | {f"{kind}, {room}": size for kind, size in memory.states.items()}
    parts |= {"padding and metadata": memory.padding, "temporaries": memory.temporaries, "programs": memory.code}
    listed = {part: size for part, size in parts.items() if size >= 0.005 * GIB} | {"left": memory.left}
    yield from aligned([(f"  {part}", f"{size / GIB:.2f}") for part, size in listed.items()])
    if not layout.steps:
        return
    yield (
        f"  largest concurrency at this length {memory.largest_concurrency:,}, largest context at this concurrency "
        f"{memory.largest_context:,} tokens (temporaries taken as they are)"
    )
    for step in layout.steps.values():
        yield from _step(step, layers)


def _step(step: Step, layers: int) -> Iterator[str]:
    bound = step.roofline
    yield ""
    yield (
        f"{step.kind}: modelled {1e3 * step.seconds:.2f} ms for {step.tokens:,} tokens; roofline {1e3 * bound.peak:.2f} ms at "
        f"peak, {1e3 * bound.derated:.2f} ms at measured bandwidth; bound by {step.binds}"
    )
    rows = [("  class", "runs", "ms", "share", "bundles", "HBM MB", "bound")]
    listed = list(step.costs.items())
    for name, cost in listed[:LISTED]:
        rows.append((
            f"  {name}{' *' if cost.estimated else ''}", f"{cost.runs:,.0f}", f"{1e3 * cost.seconds:.3f}",
            f"{cost.seconds / step.seconds:.1%}", f"{cost.cycles:,.0f}", f"{cost.bytes / 1e6:,.1f}", cost.bound,
        ))  # fmt: skip
    if rest := listed[LISTED:]:
        seconds = sum(cost.seconds for _, cost in rest)
        rows.append((f"  {len(rest)} more", "", f"{1e3 * seconds:.3f}", f"{seconds / step.seconds:.1%}", "", "", ""))
    yield from aligned(rows)
    if any(cost.estimated for cost in step.costs.values()):
        yield "  * XLA's own estimate of cycles where the compiler's dump has no schedule of a program"
    if step.collectives:
        rows = [(f"  {first}", *others) for first, *others in collectives(step, layers)]
        yield from aligned(rows)
    if step.unknown_loops:
        yield f"  loops whose turns are not known count once: {', '.join(step.unknown_loops)}"


def _published(plan: Plan) -> Iterator[str]:
    rows = comparisons(plan)
    if rows:
        yield ""
        yield "Beside what Google published for this model and machine (FP8)"
        yield from aligned([("  ", "published", f"modelled, {plan.best.name}", "difference")] + [
            (f"  {what}", published, ours, f"{error:+.0%}") for what, published, ours, error in rows
        ])  # fmt: skip
        yield f"  {LEFT_OUT}"
