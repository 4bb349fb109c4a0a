"""What `python -m custom_ops.schedule` compiles: the kernels of one core in 397B's layer on eight cores (64 of 512 experts, FP8
with a scale for each output channel, tokens of all cores in int8), for steps of 64 to 8,192 tokens.

Routing is even and independent: the counts of experts, tiles and pairs are expectations. The published times (see `PUBLISHED`)
are of the whole layer on the device, communication included; so are those of `report`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax

from custom_ops.ragged_moe.cost import (
    MICRO_BATCHES,
    MoeShape,
    all_gather_time,
    flat_all_gather_time,
    pipelined_time,
    reduce_scatter_time,
)
from custom_ops.ragged_moe.load import ExpertsLoad
from custom_ops.ragged_moe.pallas_plan import ExpertsShape
from custom_ops.ragged_moe.wire import FOR_FP8_WEIGHTS, FP8, columns
from custom_ops.reduce_scatter import ReduceScatterShape
from custom_ops.reduce_scatter.cost import STATEMENT as LINKS
from custom_ops.reduce_scatter.cost import xla_time
from custom_ops.schedule.cases import Case, Program
from custom_ops.schedule.model import CLOCK, HBM_BYTES_PER_SECOND, Row

HIDDEN, WIDTH, EXPERTS, LOCAL, TOP_K = 4096, 1024, 512, 64, 10
CHIPS, CORES = 4, 2
PUBLISHED = {64: (232, 202), 512: (485, 436), 1024: (753, 547), 2048: (1635, 635), 4096: (1461, 898), 8192: (2086, 1402)}
"""Microseconds of tpu-inference's layer by tokens of a step: in production, and the best known."""


def shape_of(tokens: int) -> ExpertsShape:
    return ExpertsShape(tokens, TOP_K, LOCAL, EXPERTS, HIDDEN, WIDTH, "float8_e4m3fn", "channel")


def _build(tokens: int) -> Program:
    """All that a core does in a layer but communicate: its own tokens sent, and those of all cores through its experts."""
    from custom_ops.ragged_moe.pallas_send import send
    from custom_ops.ragged_moe.pallas_tpu import experts_of_packed

    def function(hidden, logits, valid, packed, *weights):
        sent = send(hidden, logits, valid, top_k=TOP_K, round_weights=False, wire=FOR_FP8_WEIGHTS)
        results = experts_of_packed(packed, *weights, first_expert=0, top_k=TOP_K, num_experts=EXPERTS, dtype=hidden.dtype)
        return sent, results

    own = tokens // (CHIPS * CORES)
    arrays = (
        ((own, HIDDEN), "bfloat16"), ((own, EXPERTS), "float32"), ((own,), "bool"),
        ((tokens, columns(FOR_FP8_WEIGHTS, hidden=HIDDEN, top_k=TOP_K)), FOR_FP8_WEIGHTS.name),
        ((LOCAL, 2 * WIDTH, HIDDEN), FP8.name), ((LOCAL, HIDDEN, WIDTH), FP8.name),
        ((LOCAL, 2 * WIDTH), "float32"), ((LOCAL, HIDDEN), "float32"),
    )  # fmt: skip
    return Program(function, tuple(jax.ShapeDtypeStruct(*array) for array in arrays))


def hit_experts(tokens: int) -> float:
    """Local experts that have a token."""
    return ExpertsLoad(shape_of(tokens), tokens).hit


def least_bytes(tokens: int) -> int:
    """The experts that are hit and all rows read, a sum for each row written in BF16."""
    weights = hit_experts(tokens) * (shape_of(tokens).weight_bytes + 4 * (2 * WIDTH + HIDDEN))
    return round(weights + 3 * tokens * HIDDEN)


def _case(tokens: int, production: int, best: int) -> Case:
    load = ExpertsLoad(shape_of(tokens), tokens)
    return Case(
        name=f"{tokens} tokens (published layer {production} / {best} µs)",
        implementation="pallas_tpu",
        build=functools.partial(_build, tokens),
        kernel="ragged_moe",
        hbm_bytes=least_bytes(tokens),
        matrix_flops=round(6 * HIDDEN * WIDTH * shape_of(tokens).mean_pairs),
        trips=load.turns,
        kernel_bytes=load.bytes,
    )


CASES = [_case(tokens, *published) for tokens, published in PUBLISHED.items()]


def report(rows: Sequence[Row]) -> str:
    """The layer of each step that was measured, communication and XLA's own work included, in microseconds."""
    measured = {int(row.case.split()[0]): row for row in rows}
    shape = MoeShape(CHIPS, CORES, 0, HIDDEN, EXPERTS, TOP_K, WIDTH, FOR_FP8_WEIGHTS.name, FP8.name)
    lines = [
        "tokens  all-gather  flat  kernels  XLA  reduce-scatter   flat  micro-batches   layer    published  byte bound  share"
    ]
    for tokens, row in measured.items():
        choices = []
        for parts in MICRO_BATCHES:
            part, size = measured.get(tokens // parts), dataclasses.replace(shape, tokens=tokens // parts)
            if part is not None and tokens % parts == 0:
                local = 1e-6 * part.time + part.xla_cycles / CLOCK
                choices.append((pipelined_time(size, parts, local), parts))
        layer, parts = min(choices)
        whole = dataclasses.replace(shape, tokens=tokens)
        flat = xla_time(ReduceScatterShape(CHIPS, CORES, tokens, HIDDEN, "bfloat16"))
        gathers = (all_gather_time(whole), flat_all_gather_time(whole))
        times = (*gathers, row.xla_cycles / CLOCK, reduce_scatter_time(whole), flat, layer)
        gather, flat_gather, rest, scatter, flat_scatter, layer = (1e6 * time for time in times)
        bound = 1e6 * least_bytes(tokens) / HBM_BYTES_PER_SECOND
        production, best = PUBLISHED[tokens]
        lines.append(
            f"{tokens:6,}  {gather:10.1f}  {flat_gather:5.1f}  {row.time:7.1f}  {rest:3.0f}  {scatter:14.1f}  "
            f"{flat_scatter:5.1f}  {parts:13}  {layer:6.1f}  {production:4} / {best:4}  {bound:10.1f}  {bound / layer:5.0%}"
        )
    notes = (
        "A layer of 397B on one machine of four chips, modelled, in µs: parts of a whole step, then the layer in as many "
        "micro-batches as are best. The all-gather is our kernel, or XLA's where few rows gain nothing, the reduce-"
        "scatter our kernel; flat is what XLA's would take. The all-gather of a further micro-batch is XLA's, hidden behind "
        "the experts of the one before; a reduce-scatter is hidden behind nothing. Share: of the byte bound in the layer. "
        "Published: tpu-inference, in production / best known."
    )
    return "\n".join([notes, LINKS, "", *lines])
