"""The kernel that adds up the results of each row, times the router's weights.

Results lie by row, so those of a block of rows are one run. It comes in pieces, and a product with a matrix that holds each
result's weight in its row, as the sum of two in BF16, adds each to its row. A result that is not finite would reach all rows of
the block that way (0 times NaN): such results are left out, and their rows set to NaN. A weight that is not finite reaches its
own row alone.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from custom_ops.ragged_moe.pallas_plan import LANES, Plan
from custom_ops.ragged_moe.pallas_rows import column, from_words
from custom_ops.ragged_moe.pallas_work import BLOCK_ROWS, Work

PIECE = 128
"""Results that are fetched and added at once."""
SUM_COLUMNS = 512


def sum_by_row(results, work: Work, before, plan: Plan, *, dtype, interpret: bool):
    """Weighted sums of each row's results, and of `before` where it is not None.

    Args:
        results: [(places + PIECE) * pitch, 128] words, by `pallas_experts.results_of_pairs`.
        before: [rows, hidden] of type `dtype`; its memory is used for the result.

    Returns:
        [rows, hidden] of type `dtype`.
    """
    rows, hidden = plan.shape.rows, plan.shape.hidden
    size, blocks = min(rows, BLOCK_ROWS), len(work.places)
    carried = [] if before is None else [before]

    def kernel(block_start, places, results, *refs):
        before, (out, *scratch) = refs[: len(carried)], refs[len(carried) :]
        _sum_block(plan, block_start, places, results, *before or (None,), out, *scratch)

    def of_block(*shape):
        return pl.BlockSpec(shape, lambda block, *_: (block, 0))

    return pl.pallas_call(
        kernel,
        name="ragged_moe_combine",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(blocks,),
            in_specs=[
                pl.BlockSpec((1, *work.places.shape[1:]), lambda block, *_: (block, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
                *(of_block(size, hidden) for _ in carried),
            ],
            out_specs=of_block(size, hidden),
            scratch_shapes=[
                pltpu.VMEM((2, PIECE * plan.pitch, LANES), jnp.uint32),
                pltpu.VMEM((PIECE, hidden), jnp.bfloat16),
                pltpu.VMEM((size, hidden), jnp.float32),
                pltpu.VMEM((size, LANES), jnp.float32),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((rows, hidden), dtype),
        input_output_aliases={3: 0} if carried else {},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), disable_bounds_checks=True),
        interpret=interpret,
    )(work.block_start, work.places, results, *carried)


def _sum_block(plan: Plan, block_start, places, results, before, out, pieces, matrix, total, broken, turn, arrived) -> None:
    block, blocks = pl.program_id(0), pl.num_programs(0)
    first, last = block_start[block], block_start[block + 1]
    count = jnp.maximum(lax.div(last - first + PIECE - 1, jnp.int32(PIECE)), 1)

    def fetch(place, half):
        source = results.at[pl.ds(place * plan.pitch, PIECE * plan.pitch)]
        return pltpu.make_async_copy(source, pieces.at[half], arrived.at[half])

    @pl.when(block == 0)
    def _():
        turn[0] = 0
        fetch(first, 0).start()

    total[...] = jnp.zeros(total.shape, jnp.float32) if before is None else before[...].astype(jnp.float32)
    broken[...] = jnp.zeros(broken.shape, jnp.float32)

    @pl.loop(0, count)
    def _(number):
        half, place = turn[0], first + number * PIECE
        fetch(0, half).wait()

        # The next piece, of this block or the one after it: every block has one, if only of another's results.
        @pl.when((number + 1 < count) | (block + 1 < blocks))
        def _():
            fetch(jnp.where(number + 1 < count, place + PIECE, last), 1 - half).start()

        turn[0] = 1 - half
        lanes = pl.ds(pl.multiple_of(number * PIECE, PIECE), PIECE)
        known = places[0, :, lanes]
        row, weight = known[0:1], lax.bitcast_convert_type(known[1:2], jnp.float32)
        _add_piece(plan, row, weight, pieces.at[half], matrix, total, broken)

    is_broken = jnp.max(broken[...], axis=1, keepdims=True) > 0
    for columns in _columns(plan):
        out[:, columns] = jnp.where(is_broken, jnp.nan, total[:, columns]).astype(out.dtype)


def _add_piece(plan: Plan, row, weight, words, matrix, total, broken) -> None:
    """row, weight: [1, PIECE] of each result; the row within the block."""
    finite = jnp.full((PIECE, LANES), True)
    for word in range(plan.words):
        for half, values in enumerate(from_words(words[column(word, PIECE, plan.pitch), :])):
            good = jnp.abs(values) < jnp.inf
            finite &= good
            columns = pl.ds((2 * word + half) * LANES, LANES)
            matrix[:, columns] = jnp.where(good, values, 0).astype(jnp.bfloat16)
    belongs = row == lax.broadcasted_iota(jnp.int32, (len(total), PIECE), 0)
    share = jnp.where(belongs, weight, 0)
    high = share.astype(jnp.bfloat16)
    low = (share - high.astype(jnp.float32)).astype(jnp.bfloat16)
    product = functools.partial(jnp.dot, preferred_element_type=jnp.float32)
    for columns in _columns(plan):
        total[:, columns] += product(high, matrix[:, columns]) + product(low, matrix[:, columns])
    bad = jnp.where(finite, 0.0, 1.0)

    @pl.when(jnp.max(bad) > 0)
    def _():
        broken[...] += product(belongs.astype(jnp.float32).astype(jnp.bfloat16), bad.astype(jnp.bfloat16))


def _columns(plan: Plan):
    """All columns, in parts that a product or a copy takes at once."""
    hidden = plan.shape.hidden
    return [pl.ds(first, min(SUM_COLUMNS, hidden - first)) for first in range(0, hidden, SUM_COLUMNS)]
