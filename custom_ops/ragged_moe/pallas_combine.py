"""The kernel that adds up the results of each row.

Results lie by row, so those of a block of rows are one run. It comes in pieces, and a product with a matrix of zeros and
ones, exact in FP32, adds each to its row. A result that is not finite would reach all rows of the block that way (0 times NaN):
such results are left out, and their rows set to NaN.
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

PIECE = 128
"""Results that are fetched and added at once."""
BLOCK_ROWS = 128
SUM_COLUMNS = 1024


def sum_by_row(results, row_start, before, plan: Plan, *, dtype, interpret: bool):
    """Sums of each row's results, and of `before` where it is not None.

    Args:
        results: [(places + PIECE) * pitch, 128] words, by `pallas_experts.results_of_pairs`.
        row_start: [rows + 1] int32, the place of each row's first result.
        before: [rows, hidden] of type `dtype`; its memory is used for the result.

    Returns:
        [rows, hidden] of type `dtype`.
    """
    rows, hidden = plan.shape.rows, plan.shape.hidden
    size = min(rows, BLOCK_ROWS)
    blocks = -(-rows // size)
    pad = jnp.full(blocks * size - rows, row_start[-1])
    edges = jnp.concatenate([row_start, pad])
    run_start = edges[::size]
    carried = [] if before is None else [before]

    def kernel(run_start, starts, ends, results, *refs):
        before, (out, *scratch) = refs[: len(carried)], refs[len(carried) :]
        _sum_block(plan, run_start, starts, ends, results, *before or (None,), out, *scratch)

    def of_block(*shape):
        return pl.BlockSpec(shape, lambda block, *_: (block, 0))

    return pl.pallas_call(
        kernel,
        name="ragged_moe_combine",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(blocks,),
            in_specs=[
                of_block(size, 1),
                of_block(size, 1),
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
        input_output_aliases={4: 0} if carried else {},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), disable_bounds_checks=True),
        interpret=interpret,
    )(run_start, edges[:-1, None], edges[1:, None], results, *carried)


def _sum_block(plan: Plan, run_start, starts, ends, results, before, out, pieces, matrix, total, broken, turn, arrived) -> None:
    block, blocks = pl.program_id(0), pl.num_programs(0)
    first, last = run_start[block], run_start[block + 1]
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
        _add_piece(plan, place, starts, ends, pieces.at[half], matrix, total, broken)

    is_broken = jnp.max(broken[...], axis=1, keepdims=True) > 0
    out[...] = jnp.where(is_broken, jnp.nan, total[...]).astype(out.dtype)


def _add_piece(plan: Plan, place, starts, ends, words, matrix, total, broken) -> None:
    finite = jnp.full((PIECE, LANES), True)
    for word in range(plan.words):
        for half, values in enumerate(from_words(words[column(word, PIECE, plan.pitch), :])):
            good = jnp.abs(values) < jnp.inf
            finite &= good
            columns = pl.ds((2 * word + half) * LANES, LANES)
            matrix[:, columns] = jnp.where(good, values, 0).astype(jnp.bfloat16)
    places = place + lax.broadcasted_iota(jnp.int32, (1, PIECE), 1)
    belongs = jnp.where((starts[...] <= places) & (places < ends[...]), 1.0, 0.0).astype(jnp.bfloat16)
    product = functools.partial(jnp.dot, belongs, preferred_element_type=jnp.float32)
    hidden = plan.shape.hidden
    for first in range(0, hidden, SUM_COLUMNS):
        columns = pl.ds(first, min(SUM_COLUMNS, hidden - first))
        total[:, columns] += product(matrix[:, columns])
    bad = jnp.where(finite, 0.0, 1.0)

    @pl.when(jnp.max(bad) > 0)
    def _():
        broken[...] += product(bad.astype(jnp.bfloat16))
