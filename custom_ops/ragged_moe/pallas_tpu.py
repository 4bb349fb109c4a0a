"""Local experts on TPU.

The (row, expert) pairs are sorted by expert (`pallas_work`, XLA); `pallas_experts` fetches the rows of an expert, multiplies
and stores each result beside those of the same row; `pallas_combine` adds them up. All of it follows the pairs that there are,
whatever their number for any one expert: nothing is padded to [rows, experts], and nothing dropped.

Results of pairs lie in HBM in between. There is room for a bounded number of them (`Plan.pairs`); a step that has more,
because routing is very uneven, makes another pass over the experts that are left, so that no weights are read twice but those
of an expert on the border.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from custom_ops.ragged_moe.pallas_combine import PIECE, sum_by_row
from custom_ops.ragged_moe.pallas_experts import results_of_pairs
from custom_ops.ragged_moe.pallas_plan import SUBLANES, ExpertsShape, plan
from custom_ops.ragged_moe.pallas_rows import pack
from custom_ops.ragged_moe.pallas_work import sort_pairs, work_of_pass
from custom_ops.ragged_moe.quantized import check_scales


def experts(
    rows, expert, weight, gate_up, down, gate_up_scale=None, down_scale=None, *,
    num_experts, row_scale=None, layer=None, interpret: bool = False,
):  # fmt: skip
    """See `custom_ops.ragged_moe` for arguments and results.

    Rows are rounded to BF16, and so are each expert's activations and each pair's result; the weights of FP8 blocks times
    their scales too. Sums are FP32.

    interpret: run the kernels in Pallas' interpreter, on any backend and far slower.

    Raises:
        ValueError: sizes that `pallas_plan.supports` refuses, scales that do not fit.
    """
    stacks = (gate_up, down, gate_up_scale, down_scale)
    if layer is None:  # stacks of one layer
        layer, stacks = jnp.int32(0), tuple(None if part is None else part[None] for part in stacks)
    # The kernel reads the weights where they lie; scales, a thousandth of them, are taken out of their stacks.
    gate_up, down, *scales = stacks
    gate_up_scale, down_scale = (None if stack is None else stack[layer] for stack in scales)
    own = [jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype) for stack in (gate_up, down)]
    check_scales(rows, *own, gate_up_scale, down_scale, row_scale)
    count, pad = len(rows), -len(rows) % SUBLANES
    if pad:  # rows that meet no expert
        rows, weight = (jnp.pad(part, ((0, pad), (0, 0))) for part in (rows, weight))
        expert = jnp.pad(expert, ((0, pad), (0, 0)), constant_values=gate_up.shape[1])
        row_scale = None if row_scale is None else jnp.pad(row_scale, (0, pad))
    sizes = plan(ExpertsShape.of(rows, expert, *own, gate_up_scale, num_experts))
    words = pack(rows, row_scale, hidden=sizes.shape.hidden, interpret=interpret)
    pairs = sort_pairs(expert, weight, sizes)
    dtype = rows.dtype if rows.dtype == jnp.float32 else jnp.bfloat16

    def one_pass(number, before):
        work = work_of_pass(pairs, number, sizes)
        results = results_of_pairs(
            words, work, layer, gate_up, down, gate_up_scale, down_scale, sizes, spare=PIECE, interpret=interpret
        )
        return sum_by_row(results, work.row_start, before, sizes, dtype=dtype, interpret=interpret)

    total = one_pass(0, None)
    if sizes.passes > 1:
        needed = lax.div(jnp.sum(pairs.counts) + sizes.pairs - 1, sizes.pairs)
        total = lax.fori_loop(1, needed, one_pass, total)
    return total[:count]
