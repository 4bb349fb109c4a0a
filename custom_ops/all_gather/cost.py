"""Modelled times: the hierarchical all-gather and XLA's on the same links.

`python -m custom_ops.all_gather.cost` prints them for one machine of four chips.
"""

from __future__ import annotations

from collections.abc import Sequence

from custom_ops.all_gather.shapes import AllGatherShape
from custom_ops.cost_model import HOP
from custom_ops.hypercube.layout import crossed_dimension
from custom_ops.hypercube.links import DIE_TO_DIE, ICI, STATEMENT, Link, flat_time

Cut = Sequence[tuple[int, int]]


def hierarchical_time(shape: AllGatherShape, pieces: Cut, streams: Cut) -> float:
    """Seconds of the kernel: its schedule, played on one core; all cores do the same at once."""
    steps = shape.dimensions
    die, links = Link(DIE_TO_DIE), [Link(ICI / shape.cores) for _ in range(steps)]
    now, arrived, swapped = HOP, {}, 0.0
    parts = [
        (rows, stream, (rows[1] - rows[0]) * (last - first) * shape.itemsize)
        for rows in pieces for stream, (first, last) in enumerate(streams)
    ]  # fmt: skip

    def cross(rows, stream, size, step):
        link = links[crossed_dimension(stream, steps - 1 - step, steps)]
        arrived[rows, stream, step] = link.carry(now, size)

    for step in range(steps):
        for part in parts:
            cross(*part, step)
    for *_, size in parts:
        swapped = die.carry(now, size)
    for step in range(steps):
        for rows, stream, size in parts:
            now = max(now, arrived[rows, stream, step])
            for _ in range(1 << step):
                for later in range(step + 1, steps):
                    cross(rows, stream, size, later)
                swapped = die.carry(now, size)
    return max(now, swapped)


def xla_time(shape: AllGatherShape) -> float:
    """Seconds of XLA's all-gather, which brings each core over ICI all that other chips have."""
    return flat_time(shape.chips, shape.cores, shape.rows * shape.columns * shape.itemsize)


def wire_bytes(shape: AllGatherShape) -> tuple[int, int]:
    """Bytes that one core sends in the hierarchical all-gather: to the other core of its chip, to other chips."""
    per_device = shape.rows * shape.columns * shape.itemsize
    return shape.chips * per_device, (shape.chips - 1) * per_device


def table(shapes: Sequence[AllGatherShape]) -> str:
    """Both times of each shape, in microseconds, under what they rest on."""
    from custom_ops.all_gather.plan import plan  # which chooses pieces by the times above

    lines = ["  rows  columns  chips  dtype          pieces  hierarchical µs  all-gather µs  all-gather / hierarchical"]
    for shape in shapes:
        cut = plan(shape)
        ours, xla = cut.time * 1e6, xla_time(shape) * 1e6
        lines.append(
            f"{shape.devices * shape.rows:6,}  {shape.columns:7,}  {shape.chips:5}  {shape.dtype:13}  {len(cut.pieces):6}  "
            f"{ours:15.1f}  {xla:13.1f}  {xla / ours:25.2f}"
        )
    return "\n".join([STATEMENT, "", *lines])


if __name__ == "__main__":
    SIZES = (8, 64, 512, 1024, 2048, 4096, 8192)
    print(table([AllGatherShape(4, 2, rows // 8, 4220, "int8") for rows in SIZES]))
