"""What `python -m custom_ops.schedule` compiles: the local experts of one core in 397B's layer on eight cores (64 of 512
experts, FP8 with a scale for each output channel, tokens of all cores in FP8), for steps of 64 to 8,192 tokens.

Routing is even and independent: the counts of experts, tiles and pairs are expectations. The published times (see `PUBLISHED`)
are of the whole layer on the device, communication included; these are of the local experts alone.
"""

from __future__ import annotations

import functools
import math

import jax

from custom_ops.ragged_moe.pallas_combine import BLOCK_ROWS, PIECE
from custom_ops.ragged_moe.pallas_plan import GROUP, ExpertsShape, plan, tiles_of_an_expert
from custom_ops.schedule.bundles import Loop
from custom_ops.schedule.cases import Case, Program

HIDDEN, WIDTH, EXPERTS, LOCAL, TOP_K = 4096, 1024, 512, 64, 10
PUBLISHED = {64: (232, 202), 512: (485, 436), 1024: (753, 547), 2048: (1635, 635), 4096: (1461, 898), 8192: (2086, 1402)}
"""Microseconds of tpu-inference's layer by tokens of a step: in production, and the best known."""
LONG_LOOP = 600
"""Bundles: the loop over pieces of results has more, those over rows fewer."""


def shape_of(tokens: int) -> ExpertsShape:
    return ExpertsShape(tokens, TOP_K, LOCAL, EXPERTS, HIDDEN, WIDTH, "float8_e4m3fn", "channel")


def _build(tokens: int) -> Program:
    from custom_ops.ragged_moe.pallas_tpu import experts

    def function(rows, row_scale, expert, weight, *weights):
        return experts(rows, expert, weight, *weights, num_experts=EXPERTS, row_scale=row_scale)

    arrays = (
        ((tokens, HIDDEN), "float8_e4m3fn"), ((tokens,), "float32"), ((tokens, TOP_K), "int32"), ((tokens, TOP_K), "float32"),
        ((LOCAL, 2 * WIDTH, HIDDEN), "float8_e4m3fn"), ((LOCAL, HIDDEN, WIDTH), "float8_e4m3fn"),
        ((LOCAL, 2 * WIDTH), "float32"), ((LOCAL, HIDDEN), "float32"),
    )  # fmt: skip
    return Program(function, tuple(jax.ShapeDtypeStruct(*array) for array in arrays))


def hit_experts(tokens: int) -> float:
    """Local experts that have a token."""
    return LOCAL * (1 - (1 - TOP_K / EXPERTS) ** tokens)


def _weight_bytes(tokens: int) -> float:
    return hit_experts(tokens) * (shape_of(tokens).weight_bytes + 4 * (2 * WIDTH + HIDDEN))


def least_bytes(tokens: int) -> int:
    """The experts that are hit and all rows read, a sum for each row written in BF16."""
    return round(_weight_bytes(tokens) + 3 * tokens * HIDDEN)


def moved_bytes(tokens: int) -> int:
    """Those, rows written as words, and for each pair its row read, its result written and read."""
    return round(least_bytes(tokens) + 2 * HIDDEN * (tokens + 3 * shape_of(tokens).mean_pairs))


def _trips(tokens: int, loop: Loop) -> int | None:
    """The loops whose bounds are known only when the kernels run: over items, over groups of an item's rows, over pieces."""
    if loop.steps is not None:
        return None
    shape = shape_of(tokens)
    items = math.ceil(LOCAL * tiles_of_an_expert(shape, plan(shape).tile))
    if loop.inner:
        return items
    if loop.own > LONG_LOOP:
        return math.ceil(shape.mean_pairs / math.ceil(tokens / BLOCK_ROWS) / PIECE + 0.5 * (tokens > BLOCK_ROWS))
    return math.ceil(LOCAL * tiles_of_an_expert(shape, GROUP) / items)


def _case(tokens: int, production: int, best: int) -> Case:
    name = f"{tokens} tokens (published layer {production} / {best} µs)"
    flops = round(6 * HIDDEN * WIDTH * shape_of(tokens).mean_pairs)
    trips = functools.partial(_trips, tokens)
    build = functools.partial(_build, tokens)
    return Case(name, "pallas_tpu", build, "ragged_moe", least_bytes(tokens), flops, trips, moved_bytes(tokens))


CASES = [_case(tokens, *published) for tokens, published in PUBLISHED.items()]
