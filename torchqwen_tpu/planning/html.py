"""A plan as one HTML file: styles and drawings inside, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from torchqwen_tpu.planning.drawings import memory_bars, roofline_plot, timeline
from torchqwen_tpu.planning.published import LEFT_OUT, comparisons
from torchqwen_tpu.planning.report import beside_each_other, collectives, headline, machine, notes
from torchqwen_tpu.planning.result import LayoutPlan, Plan, Step

_STYLE = """
:root{color-scheme:light}
*{box-sizing:border-box}
body{font:15px/1.5 system-ui,sans-serif;color:#1b2430;background:#fff;max-width:1080px;margin:0 auto;padding:28px 24px}
h1{font-size:25px;margin:0 0 2px}h2{font-size:19px;margin:34px 0 8px;border-bottom:1px solid #d8dee6;padding-bottom:4px}
h3{font-size:16px;margin:24px 0 6px}p{margin:6px 0}.lead{font-size:17px}.note{color:#5b6776;font-size:13px}
.bad{color:#a3261d}
table{border-collapse:collapse;margin:8px 0 4px;font-variant-numeric:tabular-nums;font-size:13.5px}
th,td{padding:3px 12px 3px 0;text-align:right;white-space:pre}th:first-child,td:first-child{text-align:left}
th{font-weight:600;color:#5b6776;border-bottom:1px solid #b9c3cf}tr+tr td{border-top:1px solid #edf0f4}
svg{display:block;width:100%;height:auto;margin:8px 0}
.scroll{overflow-x:auto}
ul{margin:6px 0;padding-left:22px}
@page{margin:14mm}
@media print{body{max-width:none;padding:0;font-size:11px}h2,h3{break-after:avoid}svg,tr,.scroll{break-inside:avoid}
table{font-size:9.5px}th,td{padding-right:8px}.scroll{overflow:visible}rect{print-color-adjust:exact}}
"""


def write_report(plan: Plan, file: Path) -> None:
    """Write the report of a plan."""
    file.write_text(render(plan), encoding="utf-8")


def render(plan: Plan) -> str:
    request, best = plan.request, plan.best
    title = f"Plan of {request.model_name} on {request.topology}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="lead{"" if best.fits else " bad"}">{escape(headline(plan))}</p>',
        f'<p class="note">{request.concurrency} sequences of {request.input_len:,} + {request.output_len:,} tokens, weights '
        f"{request.dtype}, states {request.state_dtype}, KV pages {request.kv_dtype}, {machine(plan)}. "
        "Compiled by the TPU compiler; every time is modelled, none is measured.</p>",
        "<h2>Layouts</h2>",
        _layouts(plan),
    ]
    if best.remedies:
        helps = "".join(f"<li>{escape(str(remedy))}</li>" for remedy in best.remedies)
        body += ["<h2>What would help</h2>", f"<ul>{helps}</ul>"]
    compiled = [layout for layout in plan.layouts if layout.memory]
    if compiled:
        body += ["<h2>Memory of a core</h2>", memory_bars(compiled)]
        body += [_layout(best, plan.layers)] if best.steps else []
    if rows := comparisons(plan):
        body += ["<h2>Beside published timings</h2>", _table(
            ("", "published", f"modelled, {best.name}", "difference"),
            [(what, published, ours, f"{error:+.0%}") for what, published, ours, error in rows],
        ), f'<p class="note">Google’s Qwen 3.5-397B-A17B in FP8 on one Ironwood VM. {LEFT_OUT}</p>']  # fmt: skip
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
        f"<body>{''.join(body)}</body></html>\n"
    )


def _layouts(plan: Plan) -> str:
    header, *rows = beside_each_other(plan)
    told = [note for layout in plan.layouts for note in notes(layout)]
    return _table(header, rows) + "".join(f'<p class="note">{escape(note)}</p>' for note in told)


def _layout(layout: LayoutPlan, layers: int) -> str:
    memory = layout.memory
    parts = [
        f"<p>Largest concurrency at this length: {memory.largest_concurrency:,}. Largest context at this concurrency: "
        f"{memory.largest_context:,} tokens. First token after {layout.time_to_first_token:.2f} s for a prompt that joins, "
        f"{layout.time_to_first_token_burst:.2f} s on average if all come at once; then one every "
        f"{1e3 * layout.time_per_output_token:.2f} ms.</p>",
        "<h2>Roofline</h2>",
        roofline_plot(list(layout.steps.values())),
    ]
    for step in layout.steps.values():
        parts.append(_step(step, layers))
    return "".join(parts)


def _step(step: Step, layers: int) -> str:
    bound = step.roofline
    drawn = timeline(step)
    costs = [
        (
            name + (" *" if cost.estimated else ""), f"{cost.runs:,.0f}", f"{1e3 * cost.seconds:.3f}",
            f"{cost.seconds / step.seconds:.1%}", f"{cost.cycles:,.0f}", f"{cost.bytes / 1e6:,.1f}", cost.bound,
        )
        for name, cost in step.costs.items() if cost.seconds > 0
    ]  # fmt: skip
    parts = [
        f"<h2>{escape(step.kind.capitalize())}: {1e3 * step.seconds:.2f} ms modelled</h2>",
        f"<p>{step.tokens:,} tokens on all devices; roofline {1e3 * bound.peak:.2f} ms at peak, {1e3 * bound.derated:.2f} ms "
        f"at the bandwidth that was measured; bound by {step.binds}.</p>",
    ]
    if drawn:
        parts += ["<h3>One layer or period of layers</h3>", drawn]
    parts += ["<h3>Kernels and fusions</h3>", _table(("class", "runs", "ms", "share", "bundles", "HBM MB", "bound"), costs)]
    if any(cost.estimated for cost in step.costs.values()):
        parts.append('<p class="note">* XLA’s own estimate of cycles where a program’s schedule was not in the dump.</p>')
    if step.collectives:
        header, *rows = collectives(step, layers)
        parts += ["<h3>Collectives</h3>", _table(header, rows)]
    return "".join(parts)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'
