"""A plan as text."""

from __future__ import annotations

from collections.abc import Iterator

from custom_ops.cost_model import GIB
from torchqwen_tpu.planning.published import comparisons
from torchqwen_tpu.planning.result import LayoutPlan, Plan, Step

LISTED = 14
"""Classes of instructions that a table lists; the others are one line."""


def format_plan(plan: Plan) -> str:
    """All layouts side by side, then the best one in detail."""
    return "\n".join([*_summary(plan), *(_layout(plan, plan.best) if plan.best.memory else []), *_comparison(plan)])


def headline(plan: Plan) -> str:
    """One sentence: whether it fits, and how fast."""
    best, request = plan.best, plan.request
    what = f"{request.concurrency} × ({request.input_len} + {request.output_len}) tokens on {request.topology}"
    if not best.fits:
        return f"{what}: does not fit. {why_not(plan, best)}"
    return (
        f"{what}: fits with layout {best.layout}, {best.memory.left / GIB:.1f} GiB a core left; modelled "
        f"{best.tokens_per_second_chip['mixed']:,.0f} tokens/s/chip, {1e3 * best.time_per_output_token:.2f} ms a decode step."
    )


def why_not(plan: Plan, layout: LayoutPlan) -> str:
    if layout.memory is None:
        return layout.error
    return layout.memory.advice(plan.request.dtype, [entry.layout for entry in plan.layouts])


def _summary(plan: Plan) -> Iterator[str]:
    yield headline(plan)
    billions = sum(plan.parameters.values()) / 1e9
    yield f"{billions:.1f} B parameters, {plan.chips} chips × {plan.cores} cores. All times are modelled."
    yield ""
    rows = [("layout", "used", "left", "largest", "prefill", "mixed", "decode", "tokens/s/chip", "first token", "compiled")]
    rows.append(("", "GiB", "GiB", "concurrency", "ms", "ms", "ms", "", "s", "s"))
    for layout in plan.layouts:
        memory, steps = layout.memory, layout.steps
        if not steps:
            used = ("–", "–") if memory is None else (f"{memory.used / GIB:.1f}", f"{memory.left / GIB:.1f}")
            rows.append((layout.layout, *used, "–", "–", "–", "–", "–", "–", "–"))
            continue
        rows.append((
            layout.layout, f"{memory.used / GIB:.1f}", f"{memory.left / GIB:.1f}", f"{memory.largest_concurrency:,}",
            f"{1e3 * steps['prefill'].seconds:.1f}", f"{1e3 * steps['mixed'].seconds:.1f}" if "mixed" in steps else "–",
            f"{1e3 * layout.time_per_output_token:.2f}", f"{layout.tokens_per_second_chip['mixed']:,.0f}",
            f"{layout.time_to_first_token:.2f}", f"{layout.compile_seconds:.0f}",
        ))  # fmt: skip
    yield from _aligned(rows)
    for layout in plan.layouts:
        if layout.error:
            yield f"{layout.layout}: {layout.error}"


def _layout(plan: Plan, layout: LayoutPlan) -> Iterator[str]:
    memory = layout.memory
    yield ""
    yield f"Memory of a core, layout {layout.layout} (GiB of {memory.capacity / GIB:.0f})"
    rows = [(f"  {part}", f"{size / GIB:.2f}") for part, size in memory.weights.items()]
    room = f"{memory.rows} × {memory.tokens:,} tokens"
    rows += [(f"  {kind}, {room}", f"{size / GIB:.2f}") for kind, size in memory.states.items()]
    rows += [
        ("  padding and metadata", f"{memory.padding / GIB:.2f}"), ("  temporaries", f"{memory.temporaries / GIB:.2f}"),
        ("  programs", f"{memory.code / GIB:.2f}"), ("  left", f"{memory.left / GIB:.2f}"),
    ]  # fmt: skip
    yield from _aligned(rows)
    if not layout.steps:
        return
    yield (
        f"  largest concurrency at this length {memory.largest_concurrency:,}, largest context at this concurrency "
        f"{memory.largest_context:,} tokens (temporaries taken as they are)"
    )
    for step in layout.steps.values():
        yield from _step(step)


def _step(step: Step) -> Iterator[str]:
    bound = step.roofline
    yield ""
    yield (
        f"{step.kind}: modelled {1e3 * step.seconds:.2f} ms for {step.tokens:,} tokens; roofline {1e3 * bound.peak:.2f} ms at "
        f"peak, {1e3 * bound.derated:.2f} ms at measured bandwidth; {step.binds} binds"
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
    yield from _aligned(rows)
    if any(cost.estimated for cost in step.costs.values()):
        yield "  * XLA's own estimate of cycles where the compiler's dump has no schedule of a program"
    if step.collectives:
        rows = [("  collective", "MB", "devices", "times", "µs each", "asynchronous")]
        for entry in sorted(step.collectives, key=lambda entry: -entry.runs * entry.seconds):
            where = "on SparseCore" if entry.sparse_core else "yes" if entry.asynchronous else "no"
            rows.append((
                f"  {entry.kind}, {entry.operation}", f"{entry.size / 1e6:,.3f}", f"{entry.devices}", f"{entry.runs:,.0f}",
                f"{1e6 * entry.seconds:.1f}", where,
            ))  # fmt: skip
        yield from _aligned(rows)
    if step.unknown_loops:
        yield f"  loops whose turns are not known count once: {', '.join(step.unknown_loops)}"


def _comparison(plan: Plan) -> Iterator[str]:
    rows = comparisons(plan)
    if rows:
        yield ""
        yield "Beside what Google published for this model and machine (FP8)"
        yield from _aligned([("  ", "published", "modelled here", "difference")] + [
            (f"  {what}", published, ours, f"{error:+.0%}") for what, published, ours, error in rows
        ])  # fmt: skip


def _aligned(rows) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for first, *rest in rows:
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        yield "  ".join([first.ljust(widths[0]), *cells]).rstrip()
