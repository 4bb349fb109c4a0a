"""The report of a watch: one HTML page that needs nothing else."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from torchqwen_tpu.monitoring.plots import Series, heat_map, line_plot, page, table

if TYPE_CHECKING:
    from torchqwen_tpu.monitoring.watch import Watch


def write_report(watch: Watch, path: Path) -> None:
    """Write findings and plots; a plot without a look behind it is left out."""
    sections = [f"<p>{watch.steps} steps of a model of {len(watch.recorder.kinds)} layers.</p>", _findings(watch)]
    if watch.loads is not None and watch.loads.total.any():
        sections += _loads(watch.loads.total, watch.model.mesh.devices)
    if watch.growth.seen:
        series = [
            Series(f"layer {layer}", *zip(*sorted(looks), strict=True)) for layer, looks in sorted(watch.growth.seen.items())
        ]
        sections.append(
            line_plot("Recurrent states", "tokens that the state holds", "norm of the largest head", series, log_y=True)
        )
    if watch.attention:
        sections.append(_logits(watch))
    path.write_text(page("Numerical watch", sections), encoding="utf-8")


def _findings(watch: Watch) -> str:
    if not watch.findings:
        return "<p>Nothing was beyond its limit.</p>"
    items = "".join(f"<li>step {finding.step}: {escape(finding.message)}</li>" for finding in watch.findings)
    return f"<h2>Beyond its limit</h2><ul>{items}</ul>"


def _loads(total: np.ndarray, devices: int) -> list[str]:
    """Heat maps of the experts' load, and a table of the loads of devices and ranks."""
    load = total.sum(1)
    fair = load.sum(1, keepdims=True) / load.shape[1]
    names = [f"layer {number}" for number in range(len(load))]
    relative = load / np.maximum(fair, 1)
    sections = [heat_map("Load of the experts", "expert", "", relative, names, "times the mean")]
    by_device = load.reshape(len(load), devices, -1).sum(2)
    rows = [
        [name, f"{own.max():.2f}", str(int(own.argmax())), str(int((own == 0).sum())),
         f"{device.max() / max(device.mean(), 1):.2f}", " ".join(f"{rank.max() / max(rank.mean(), 1):.2f}" for rank in ranks)]
        for name, own, device, ranks in zip(names, relative, by_device, total, strict=True)
    ]  # fmt: skip
    header = ["", "largest load over mean", "expert", "idle experts", "busiest device over mean",
              "largest load over mean, by rank of tokens"]  # fmt: skip
    return [*sections, table(header, rows)]


def _logits(watch: Watch) -> str:
    layers = [number for number, kind in enumerate(watch.recorder.kinds) if kind != "linear_attention"]
    steps = [step for step, _, _ in watch.attention]
    largest = np.array([np.maximum(-low, high) for _, low, high in watch.attention])
    series = [Series(f"layer {layer}", steps, values) for layer, values in zip(layers, largest.T, strict=True)]
    return line_plot("Attention logits (sampled)", "step", "largest absolute logit", series)
