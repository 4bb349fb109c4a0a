"""The drawings of the report, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from custom_ops.cost_model import GIB
from torchqwen_tpu.planning.outcome import Event
from torchqwen_tpu.planning.result import LayoutPlan, Step

_COLOURS = ("#2f6fb5", "#e08a2e", "#4f9d5d", "#b5483f", "#7d62ab", "#8a6a52", "#c96a9f", "#6b7683", "#a9a238", "#3aa0a8")
_WIDTH = 1000
_TEXT = 'font-family="system-ui,sans-serif" font-size="12" fill="#1b2430"'


def memory_bars(layouts: Sequence[LayoutPlan]) -> str:
    """A bar a layout: weights by part, states, temporaries, what is left."""
    parts: dict[str, None] = {}
    for layout in layouts:
        parts |= dict.fromkeys(_memory(layout))
    colour = {part: _COLOURS[number % len(_COLOURS)] for number, part in enumerate(parts)}
    most = max(max(layout.memory.capacity, layout.memory.used) for layout in layouts)
    scale, drawn, y = (_WIDTH - 80) / most, [], 8
    for layout in layouts:
        x = 70.0
        drawn.append(_text(0, y + 17, layout.name))
        for part, size in _memory(layout).items():
            width = size * scale
            drawn.append(_box(x, y, width, 24, colour[part], f"{part}: {size / GIB:.2f} GiB"))
            x += width
        edge = 70 + layout.memory.capacity * scale
        drawn.append(f'<path d="M{edge:.1f} {y - 4}v32" stroke="#1b2430" stroke-width="1.5"/>')
        y += 36
    drawn.append(_text(70, y + 8, f"line: {layouts[0].memory.capacity / GIB:.0f} GiB of HBM a core"))
    y += 22
    legend, height = _legend(colour, y)
    return _svg(height, [*drawn, *legend])


def _memory(layout: LayoutPlan) -> dict[str, int]:
    memory = layout.memory
    rest = {"padding and metadata": memory.padding, "temporaries": memory.temporaries, "programs": memory.code}
    return {name: size for name, size in {**memory.weights, **memory.states, **rest}.items() if size > 0}


def roofline_plot(steps: Sequence[Step]) -> str:
    """Of every step the modelled time beside its bounds."""
    most = max(max(step.seconds, step.roofline.derated) for step in steps)
    scale, drawn, y = (_WIDTH - 290) / most, [], 8
    for step in steps:
        bound = step.roofline
        drawn.append(_text(0, y + 15, step.kind))
        for offset, seconds, colour, what in (
            (0, step.seconds, _COLOURS[0], "modelled"),
            (12, bound.derated, "#9db4cc", "roofline at measured bandwidth"),
            (24, bound.peak, "#cdd8e3", "roofline at peak"),
        ):
            drawn.append(_box(110, y + offset, seconds * scale, 10, colour, f"{what}: {1e3 * seconds:.2f} ms"))
        drawn.append(_text(118 + most * scale, y + 15, f"{1e3 * step.seconds:.2f} ms, {bound.peak / step.seconds:.0%} of peak"))
        y += 46
    names = ("modelled", "roofline at measured bandwidth", "roofline at peak")
    legend, height = _legend(dict(zip(names, (_COLOURS[0], "#9db4cc", "#cdd8e3"), strict=True)), y + 4)
    return _svg(height, [*drawn, *legend])


def timeline(step: Step) -> str:
    """Core, HBM and links over one turn of the loop over layers; empty where there is none."""
    events = _one_turn(step.events)
    if not events:
        return ""
    start, end = min(event.start for event in events), max(event.end for event in events)
    scale = (_WIDTH - 70) / (end - start)
    names: dict[str, float] = {}
    for event in events:
        names[event.name] = names.get(event.name, 0.0) + event.end - event.start
    longest = sorted(names, key=names.get, reverse=True)[: len(_COLOURS) - 1]
    colour = {name: _COLOURS[number] for number, name in enumerate(longest)}
    lanes = [lane for lane in ("core", "HBM", "links") if any(event.lane == lane for event in events)]
    drawn = []
    for number, lane in enumerate(lanes):
        drawn.append(_text(0, number * 34 + 24, lane))
        drawn.append(f'<rect x="65" y="{number * 34 + 8}" width="{_WIDTH - 70}" height="24" fill="#f3f5f8"/>')
    for event in events:
        x, width = 65 + (event.start - start) * scale, (event.end - event.start) * scale
        shade = colour.get(event.name, "#c4ccd6")
        title = f"{event.name}: {1e6 * (event.end - event.start):.1f} µs"
        drawn.append(_box(x, lanes.index(event.lane) * 34 + 8, width, 24, shade, title))
    y = len(lanes) * 34 + 16
    drawn.append(_text(65, y + 8, f"{1e6 * (end - start):,.0f} µs"))
    legend, height = _legend(colour | {"everything else": "#c4ccd6"}, y + 20)
    return _svg(height, [*drawn, *legend])


def _one_turn(events: Sequence[Event]) -> list[Event]:
    """The events of a later turn of the innermost loop that is drawn and takes longest."""
    turns: dict[tuple, float] = {}
    for event in events:
        if event.path and event.lane == "core":
            turns[event.path] = turns.get(event.path, 0.0) + event.end - event.start
    deepest = max((len(path) for path in turns), default=0)
    later = {path: seconds for path, seconds in turns.items() if len(path) == deepest and all(turn for _, turn in path)}
    if not (chosen := later or {path: seconds for path, seconds in turns.items() if len(path) == deepest}):
        return []
    path = max(chosen, key=chosen.get)
    return [event for event in events if event.path == path]


def _legend(colours: dict[str, str], y: float) -> tuple[list[str], float]:
    drawn, x = [], 0.0
    for name, colour in colours.items():
        width = 30 + 7.2 * len(name)
        if x + width > _WIDTH:
            x, y = 0.0, y + 20
        drawn += [_box(x, y, 12, 12, colour, name), _text(x + 17, y + 11, name)]
        x += width
    return drawn, y + 24


def _box(x: float, y: float, width: float, height: float, colour: str, title: str) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(width, 0.3):.2f}" height="{height}" fill="{colour}">'
        f"<title>{escape(title)}</title></rect>"
    )


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {_TEXT}>{escape(text)}</text>'


def _svg(height: float, drawn: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" xmlns="http://www.w3.org/2000/svg" role="img">{"".join(drawn)}</svg>'
