"""Modelled times of a mixture of experts over a machine's links, and the number of micro-batches that follows from them.

`python -m custom_ops.ragged_moe.cost` prints them for a layer of 397B on one machine of four chips.

A kernel of the core blocks it, XLA's all-gather does not. Before the first experts that costs nothing but what XLA would have
put beside its own (`all_gather.plan.BESIDE`), so the hierarchical kernel dispatches the first micro-batch; the others are
left to XLA, which hides them. Of up to 8,192 tokens of 397B one micro-batch is the best choice: two would hide half the rows
in XLA's all-gather, which takes as long for them as the kernel for all, and read the weights twice. From 16,384 tokens on
weights are read behind matrix work, and two or four micro-batches gain.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from custom_ops.all_gather import AllGatherShape
from custom_ops.all_gather import cost as gathering
from custom_ops.all_gather import plan as gather_plan
from custom_ops.hypercube.links import HBM
from custom_ops.ragged_moe.wire import FOR_FP8_WEIGHTS, FP8, columns
from custom_ops.reduce_scatter import ReduceScatterShape
from custom_ops.reduce_scatter.cost import STATEMENT, xla_time
from custom_ops.reduce_scatter.plan import plan

MATRIX_FLOPS = 1.155e15
"""A core's multiplications and additions a second in BF16, in which rows are multiplied whatever the wire and the weights."""
MICRO_BATCHES = (1, 2, 3, 4)
LEAST_ROWS = 128
"""Rows a device below which a micro-batch is not worth its overheads, which the model does not have."""


@dataclass(frozen=True)
class MoeShape:
    """One layer over chips × cores, tokens and experts over all of them.

    Args:
        tokens: of all devices.
        width: of an expert.
        wire, weights: dtypes of the rows on their way to the experts and of the experts' weights.
    """

    chips: int
    cores: int
    tokens: int
    hidden: int
    experts: int
    top_k: int
    width: int
    wire: str
    weights: str

    @property
    def devices(self) -> int:
        return self.chips * self.cores


def wire_bytes(shape: MoeShape) -> int:
    """Bytes of one token in the all-gather."""
    return columns(shape.wire, hidden=shape.hidden, top_k=shape.top_k) * jnp.dtype(shape.wire).itemsize


def all_gather_time(shape: MoeShape) -> float:
    """Seconds of the dispatch, which the experts wait for: the hierarchical kernel where it gains, else XLA's all-gather."""
    rows = _rows(shape)
    return gather_plan.plan(rows).time if gather_plan.gains(rows) else gathering.xla_time(rows)


def flat_all_gather_time(shape: MoeShape) -> float:
    """Seconds of XLA's all-gather."""
    return gathering.xla_time(_rows(shape))


def _rows(shape: MoeShape) -> AllGatherShape:
    """What each device sends."""
    wide = columns(shape.wire, hidden=shape.hidden, top_k=shape.top_k)
    return AllGatherShape(shape.chips, shape.cores, shape.tokens // shape.devices, wide, shape.wire)


def reduce_scatter_time(shape: MoeShape) -> float:
    """Seconds of the combine in BF16: the hierarchical kernel, or XLA's where there is none for the shape."""
    sums = ReduceScatterShape(shape.chips, shape.cores, shape.tokens, shape.hidden, "bfloat16")
    cut = plan(sums) if shape.cores == 2 else None
    return cut.time if cut else xla_time(sums)


def experts_bound(shape: MoeShape) -> float:
    """Seconds that one core's experts take at least when tokens choose evenly: their weights read once, or the matrix work."""
    itemsize = jnp.dtype(shape.weights).itemsize
    hit = shape.experts * (1 - (1 - shape.top_k / shape.experts) ** shape.tokens) / shape.devices
    read = hit * 3 * shape.hidden * shape.width * itemsize / HBM
    flops = shape.tokens * shape.top_k / shape.devices * 6 * shape.hidden * shape.width
    return max(read, flops / MATRIX_FLOPS)


def layer_time(shape: MoeShape, micro_batches: int) -> float:
    """Seconds of dispatch, experts and combine, the experts as fast as their bound."""
    part = dataclasses.replace(shape, tokens=shape.tokens // micro_batches)
    return pipelined_time(part, micro_batches, experts_bound(part))


def pipelined_time(part: MoeShape, micro_batches: int, experts: float) -> float:
    """Seconds of so many micro-batches of the shape `part`, whose experts take `experts` seconds each. The first all-gather has
    nothing before it; that of another is XLA's, hidden behind the experts of the micro-batch before (XLA leaves it to the
    SparseCore). The reduce-scatter, a kernel of the core itself, is hidden behind nothing."""
    gather, scatter = all_gather_time(part), reduce_scatter_time(part)
    waited = max(0.0, flat_all_gather_time(part) - experts)
    return gather + micro_batches * (experts + scatter) + (micro_batches - 1) * waited


@functools.cache
def micro_batches(shape: MoeShape) -> int:
    """Into how many equal parts the tokens are cut, by the model: more parts hide more, and read the weights once each."""
    rows = shape.tokens // shape.devices
    counts = [count for count in MICRO_BATCHES if rows % count == 0 and (count == 1 or rows // count >= LEAST_ROWS)]
    return min(counts, key=lambda count: layer_time(shape, count))


def table(shapes: Sequence[MoeShape]) -> str:
    """Times of each shape in microseconds, under what they rest on."""
    lines = ["tokens  bytes a token  all-gather  experts, bound  reduce-scatter  micro-batches   layer"]
    for shape in shapes:
        count = micro_batches(shape)
        gather, experts, scatter, layer = (
            1e6 * time
            for time in (all_gather_time(shape), experts_bound(shape), reduce_scatter_time(shape), layer_time(shape, count))
        )
        lines.append(
            f"{shape.tokens:6,}  {wire_bytes(shape):13,}  {gather:10.1f}  {experts:14.1f}  {scatter:14.1f}  {count:13}  "
            f"{layer:6.1f}"
        )
    notes = (
        "Parts of a whole step, then the layer in as many micro-batches as are best. All-gather: our kernel, or XLA's where "
        "that is said to be faster; reduce-scatter: our kernel in BF16. Experts: the least that reading weights or matrix work "
        "takes, tokens choosing evenly."
    )
    return "\n".join([STATEMENT, notes, "", *lines])


if __name__ == "__main__":
    LAYER = MoeShape(4, 2, 64, 4096, 512, 10, 1024, FOR_FP8_WEIGHTS.name, FP8.name)
    print(table([dataclasses.replace(LAYER, tokens=tokens) for tokens in (64, 512, 1024, 2048, 4096, 8192, 16384, 32768)]))
