"""Modelled times: the hierarchical reduce-scatter and XLA's psum_scatter on the same links.

`python -m custom_ops.reduce_scatter.cost` prints them for one machine of four chips.
"""

from __future__ import annotations

from collections.abc import Sequence

from custom_ops.cost_model import HOP
from custom_ops.hypercube.layout import LANES, crossed_dimension, step_slabs, streams
from custom_ops.hypercube.links import DIE_TO_DIE, HBM, ICI, Link, flat_time
from custom_ops.hypercube.links import STATEMENT as LINKS
from custom_ops.reduce_scatter.shapes import ReduceScatterShape

SUMS = 1.3e12
"""Elements added a second: 1.7 bundles for 1,024 FP32 sums in the compiler's schedule, at 2.2 GHz (inferred)."""

STATEMENT = f"{LINKS} Reduce-scatter: {SUMS / 1e12:.1f}e12 sums a second; HBM at {HBM / 1e12:.2f} TB/s."


def hierarchical_time(shape: ReduceScatterShape, micro_batches: int) -> float:
    """Seconds of the kernel: its schedule, played on one core, with the busiest links; all cores do the same at once."""
    rows, hidden = -(-shape.rows_per_device // micro_batches), -(-shape.hidden // LANES) * LANES
    slab = rows * hidden
    widths = [last - first for first, last in streams(0, hidden, shape.dimensions)]
    die, links = Link(DIE_TO_DIE), [Link(ICI / shape.cores) for _ in range(shape.dimensions)]
    now, swapped, arrived = HOP, {}, {}

    def start_phase_1(index):
        load = slab * shape.chips * shape.itemsize
        swapped[index] = max(die.carry(now, load), now + load / HBM)

    def start_steps(index, step):
        for stream, width in enumerate(widths) if step < shape.dimensions else ():
            load = step_slabs(step, shape.chips)[1] * rows * width * shape.itemsize
            link = links[crossed_dimension(stream, step, shape.dimensions)]
            arrived[index, step, stream] = link.carry(now, load)

    def finish_phase_1(index):
        nonlocal now
        now = max(now, swapped[index]) + shape.chips * slab / SUMS
        start_steps(index, 0)

    def finish_step(index, step):
        nonlocal now
        for stream, width in enumerate(widths):
            now = max(now, arrived[index, step, stream]) + step_slabs(step, shape.chips)[1] * rows * width / SUMS
        start_steps(index, step + 1)

    for index in range(min(micro_batches, 2)):
        start_phase_1(index)
    for number in range(micro_batches + shape.dimensions):
        if number < micro_batches:
            finish_phase_1(number)
        if number + 2 < micro_batches:
            start_phase_1(number + 2)
        for step in range(shape.dimensions):
            if 0 <= number - 1 - step < micro_batches:
                finish_step(number - 1 - step, step)
    return now + slab * shape.itemsize / HBM


def xla_time(shape: ReduceScatterShape) -> float:
    """Seconds of psum_scatter, which sends each core's terms over ICI for itself."""
    return flat_time(shape.chips, shape.cores, shape.rows_per_device * shape.hidden * shape.itemsize)


def wire_bytes(shape: ReduceScatterShape) -> tuple[int, int]:
    """Bytes that one core sends in the hierarchical reduce-scatter: to the other core of its chip, to other chips."""
    per_device = shape.rows_per_device * shape.hidden * shape.itemsize
    return shape.chips * per_device, (shape.chips - 1) * per_device


def table(shapes: Sequence[ReduceScatterShape]) -> str:
    """Both times of each shape that the kernel takes, in microseconds, under what they rest on."""
    from custom_ops.reduce_scatter.plan import plan  # which chooses micro-batches by the times above

    lines = ["  rows  hidden  chips  dtype     micro-batches  hierarchical µs  psum_scatter µs  psum_scatter / hierarchical"]
    for shape in shapes:
        cut = plan(shape)
        if cut is None:
            continue
        ours, xla = cut.time * 1e6, xla_time(shape) * 1e6
        lines.append(
            f"{shape.rows:6,}  {shape.hidden:6,}  {shape.chips:5}  {shape.dtype:8}  {cut.micro_batches:13}  {ours:15.1f}  "
            f"{xla:15.1f}  {xla / ours:27.2f}"
        )
    return "\n".join([STATEMENT, "", *lines])


if __name__ == "__main__":
    SIZES = (8, 64, 512, 1024, 2048, 4096, 8192)
    print(table([ReduceScatterShape(4, 2, rows, 4096, dtype) for dtype in ("bfloat16", "float32") for rows in SIZES]))
