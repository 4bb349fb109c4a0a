"""The mixture of experts on TPU.

`pallas_send` routes the tokens and packs them for the all-gather. Of what has travelled `pallas_rows` makes rows that can be
fetched one by one, and `pallas_work` groups the (row, local expert) pairs by expert; `pallas_experts` fetches the rows of an
expert, multiplies and stores each result beside those of the same row; `pallas_combine` adds them up. All of it follows the
pairs that there are, whatever their number for any one expert: nothing is padded to [rows, experts], and nothing dropped.

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
from custom_ops.ragged_moe.pallas_rows import receive
from custom_ops.ragged_moe.pallas_work import work_of_pass
from custom_ops.ragged_moe.quantized import check_scales
from custom_ops.ragged_moe.wire import FP8, Digits, Tokens, pack


def experts(
    rows, expert, weight, gate_up, down, gate_up_scale=None, down_scale=None, *,
    num_experts, row_scale=None, layer=None, interpret: bool = False,
):  # fmt: skip
    """See `custom_ops.ragged_moe` for arguments and results, `experts_of_packed` for the rest."""
    return experts_of_packed(
        pack(Tokens(rows, row_scale, expert, weight)), gate_up, down, gate_up_scale, down_scale, first_expert=0,
        top_k=expert.shape[1], num_experts=num_experts, dtype=rows.dtype, layer=layer, interpret=interpret,
    )  # fmt: skip


def experts_of_packed(
    packed, gate_up, down, gate_up_scale=None, down_scale=None, *,
    first_expert, top_k: int, num_experts: int, dtype, layer=None, interpret: bool = False,
):  # fmt: skip
    """`custom_ops.ragged_moe`'s local experts, of tokens as they have travelled.

    Rows are rounded to BF16, and so are each expert's activations and each pair's result; the weights of FP8 blocks times
    their scales too. Sums are FP32.

    Args:
        packed: [R, `wire.columns`], by `wire.pack` or `pallas_send.send`.
        first_expert: number of the first local expert.
        dtype: float32 for results in it; they are bfloat16 otherwise.
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
    count, hidden = packed.shape[0], down.shape[-2]
    row_scale = jax.ShapeDtypeStruct((count,), jnp.float32) if packed.dtype == FP8 else None
    check_scales(packed, *own, gate_up_scale, down_scale, row_scale)
    if pad := -count % SUBLANES:
        # The largest digits: tokens of an expert that no device has.
        form = Digits.of(packed.dtype, hidden=hidden, top_k=top_k)
        packed = jnp.pad(packed, ((0, pad), (0, 0)), constant_values=form.largest)
    rows, pairs = (jax.ShapeDtypeStruct((count + pad, size), packed.dtype) for size in (hidden, top_k))
    sizes = plan(ExpertsShape.of(rows, pairs, *own, gate_up_scale, num_experts))
    words, routing = receive(packed, hidden=hidden, top_k=top_k, interpret=interpret)
    dtype = jnp.float32 if dtype == jnp.float32 else jnp.bfloat16

    def one_pass(number, before):
        work = work_of_pass(routing, first_expert, number, sizes, interpret=interpret)
        results = results_of_pairs(
            words, work, layer, gate_up, down, gate_up_scale, down_scale, sizes, spare=PIECE, interpret=interpret
        )
        return work.pairs[0], sum_by_row(results, work, before, sizes, dtype=dtype, interpret=interpret)

    found, total = one_pass(0, None)
    if sizes.passes > 1:
        needed = lax.div(found + sizes.pairs - 1, sizes.pairs)
        total = lax.fori_loop(1, needed, lambda number, before: one_pass(number, before)[1], total)
    return total[:count]
