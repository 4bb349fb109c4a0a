"""Plots as SVG, without a plotting library: lines over an axis, and heat maps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import numpy as np

WIDTH, HEIGHT = 760, 300
LEFT, RIGHT, TOP, BOTTOM = 70, 150, 34, 46
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0", "#ff8ab7")


class Series(NamedTuple):
    """Points of one line; values that are not finite break it."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


def line_plot(title: str, x_label: str, y_label: str, series: Sequence[Series], log_y: bool = False) -> str:
    """Lines over a shared axis as one SVG element; with `log_y` values that are not positive break a line."""
    points = [(np.asarray(one.x, float), _scaled(one.y, log_y)) for one in series]
    x_range = _range(np.concatenate([x for x, _ in points] or [np.zeros(0)]))
    y_range = _range(np.concatenate([y for _, y in points] or [np.zeros(0)]))
    body = [_axes(x_label, y_label, x_range, y_range, log_y)]
    for number, (one, (x, y)) in enumerate(zip(series, points, strict=True)):
        colour = COLOURS[number % len(COLOURS)]
        place_x = LEFT + (x - x_range[0]) / (x_range[1] - x_range[0]) * (WIDTH - LEFT - RIGHT)
        place_y = HEIGHT - BOTTOM - (y - y_range[0]) / (y_range[1] - y_range[0]) * (HEIGHT - TOP - BOTTOM)
        body.append(f'<path d="{_path(place_x, place_y)}" fill="none" stroke="{colour}" stroke-width="1.5" '
                    'stroke-linecap="round"/>')  # fmt: skip
        if number < 15:
            height = TOP + 8 + 15 * number
            body.append(f'<line x1="{WIDTH - RIGHT + 12}" x2="{WIDTH - RIGHT + 28}" y1="{height}" y2="{height}" '
                        f'stroke="{colour}" stroke-width="3"/>')  # fmt: skip
            body.append(_text(WIDTH - RIGHT + 33, height + 4, one.name, "start"))
    return _svg(title, WIDTH, HEIGHT, body)


def heat_map(title: str, x_label: str, y_label: str, values: np.ndarray, rows: Sequence[str], unit: str) -> str:
    """[rows, columns] as coloured cells, white for zero and dark for the largest; more than 128 columns are joined by their
    largest value."""
    columns = values.shape[1]
    joined = -(-columns // 128)
    padded = np.pad(values, ((0, 0), (0, -columns % joined)), constant_values=0)
    cells = padded.reshape(len(values), -1, joined).max(2)
    largest = float(cells.max()) or 1.0
    high = max(8, min(22, 420 // max(len(values), 1)))
    wide = (WIDTH - LEFT - RIGHT) / cells.shape[1]
    height = TOP + high * len(values) + BOTTOM
    body = []
    for row, name in enumerate(rows):
        top = TOP + row * high
        body.append(_text(LEFT - 6, top + high / 2 + 4, name, "end"))
        for column, value in enumerate(cells[row]):
            number = f"{column * joined}" if joined == 1 else f"{column * joined}–{min((column + 1) * joined, columns) - 1}"
            words = escape(f"{name}, {x_label} {number}: {value:.3g} {unit}")
            body.append(
                f'<rect x="{LEFT + column * wide:.1f}" y="{top}" width="{wide:.1f}" height="{high}" '
                f'fill="{_shade(value / largest)}"><title>{words}</title></rect>'
            )
    body.append(_text((LEFT + WIDTH - RIGHT) / 2, height - 14, f"{x_label} (0 to {columns - 1})", "middle"))
    body.append(_text(14, TOP - 10, y_label, "start"))
    body.append(_text(WIDTH - RIGHT + 12, TOP + 10, f"white 0, dark {largest:.3g}", "start"))
    body.append(_text(WIDTH - RIGHT + 12, TOP + 26, unit, "start"))
    return _svg(title, WIDTH, height, body)


def page(title: str, sections: Sequence[str]) -> str:
    """A self-contained HTML page."""
    style = (
        "body{font:15px/1.5 system-ui,sans-serif;max-width:820px;margin:2em auto;padding:0 1em}"
        "table{border-collapse:collapse}td,th{padding:.2em .8em;border-bottom:1px solid #ccc;text-align:right}"
        "td:first-child,th:first-child{text-align:left}svg{max-width:100%;height:auto}"
    )
    head = f"<meta charset='utf-8'><title>{escape(title)}</title><style>{style}</style>"
    body = f"<h1>{escape(title)}</h1>{''.join(sections)}"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{body}</body></html>\n"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table of plain text."""
    def line(cells, tag):
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return f"<table>{line(header, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"


def _svg(title: str, width: int, height: int, body: list[str]) -> str:
    background = f'<rect width="{width}" height="{height}" fill="white"/>'
    heading = f'<text x="{LEFT}" y="18" font-size="14" font-weight="bold">{escape(title)}</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui,sans-serif" font-size="11" role="img"><title>{escape(title)}</title>'
        f"{background}{heading}{''.join(body)}</svg>\n"
    )


def _axes(x_label: str, y_label: str, x_range, y_range, log_y: bool) -> str:
    parts = []
    for value in _ticks(*y_range, whole=log_y):
        y = HEIGHT - BOTTOM - (value - y_range[0]) / (y_range[1] - y_range[0]) * (HEIGHT - TOP - BOTTOM)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 6, y + 4, f"1e{value:.0f}" if log_y else f"{value:.4g}", "end"))
    for value in _ticks(*x_range):
        x = LEFT + (value - x_range[0]) / (x_range[1] - x_range[0]) * (WIDTH - LEFT - RIGHT)
        parts.append(_text(x, HEIGHT - BOTTOM + 16, f"{value:,.6g}", "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x_label, "middle"))
    parts.append(_text(14, TOP - 4, y_label, "start"))
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _scaled(values, log: bool) -> np.ndarray:
    values = np.asarray(values, float)
    if not log:
        return values
    return np.where(values > 0, np.log10(np.where(values > 0, values, 1)), np.nan)


def _range(values: np.ndarray) -> tuple[float, float]:
    finite = values[np.isfinite(values)]
    if not finite.size:
        return 0.0, 1.0
    low, high = float(finite.min()), float(finite.max())
    margin = (high - low) * 0.04 or abs(high) * 0.1 or 1.0
    return (low if low == 0 else low - margin), high + margin


def _ticks(low: float, high: float, whole: bool = False) -> list[float]:
    step = 10 ** math.floor(math.log10((high - low) / 3))
    step = next(step * factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= 6)
    step = max(1.0, round(step)) if whole else step
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _path(x: np.ndarray, y: np.ndarray) -> str:
    parts, pen_down = [], False
    for a, b in zip(x, y, strict=True):
        if np.isfinite(b):
            parts.append(f"L{a:.1f},{b:.1f}" if pen_down else f"M{a:.1f},{b:.1f}h0")  # h0: a lone point is a dot
        pen_down = bool(np.isfinite(b))
    return "".join(parts)


def _shade(share: float) -> str:
    light = np.array([255, 255, 255])
    dark = np.array([8, 48, 107])
    red, green, blue = (light + (dark - light) * math.sqrt(max(share, 0))).astype(int)
    return f"#{red:02x}{green:02x}{blue:02x}"
