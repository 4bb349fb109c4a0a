"""The chunk kernel: long sequences, 64 rows at a time, as matrix products.

A chunk is a block of 64 rows of the batch that begins at a multiple of 64, and one sequence that has rows in it; the
block's other rows have g = 0 and beta = 0 and so neither change the state nor let it decay. Where a sequence is cut thus
depends on where it lies in the batch, and with it the rounding of its results (about 1e-6 of them). The mathematics is that of
`xla`, in stages over all heads; the scratch between stages is what lets the compiler fill one head's latency with another's
work. Two value heads lie side by side wherever a matrix is 64 wide ("a pair"). The inverse of the unit lower triangular
matrix is made of blocks: those of 16 on the diagonal by substitution in FP32, then twice the size, twice.
All products take FP32 operands as sums of two BF16 matrices. The running state is FP32 from chunk to chunk.

Schedule for tpu7x, 16 key and 64 value heads: about 18,300 bundles a chunk (convolution and norms 4,700, reading the
state and the triangular matrices 3,700, inverses 4,100, solving 1,900, outputs 2,000, new state 1,800), and 1,600 more where
a sequence begins and ends. Vector arithmetic fills about 10,500 of a chunk and the matrix unit 7,800 (70 % of the time of
doubling the inverses' blocks); the rest is latency between them. The compiler spills registers in these loops.
Gates are copied over the lanes by the unit that moves lanes, which has little else to do. HBM bytes a chunk: 1.5 MiB of
tokens in and 1 MiB out in BF16, and a sequence's states once each way. XLA then copies the output from
[tokens, heads * 128] to [tokens, heads, 128].
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from custom_ops.gated_delta_net.pallas_chunk_copies import START, WAIT, begin_sequence, drain, end_sequence, load
from custom_ops.gated_delta_net.pallas_chunk_memory import Chunk, Operands, Scratch, declare
from custom_ops.gated_delta_net.pallas_chunk_rows import prepare_rows
from custom_ops.gated_delta_net.pallas_chunk_state import read_state, solve, update_state, write_output
from custom_ops.gated_delta_net.pallas_chunk_triangle import invert, set_pair
from custom_ops.gated_delta_net.pallas_launch import launch
from custom_ops.gated_delta_net.shapes import GatedDeltaNetShape
from custom_ops.gated_delta_net.tiling import CHUNK, LANES, chunk_table


def _kernel(chunk: Chunk) -> None:
    index, chunks = chunk.index, pl.num_programs(0)
    out = chunk.operands.out

    @pl.when(index == 0)
    def _():
        chunk.scratch.pending[0] = 0
        load(chunk, index, START)

    load(chunk, index, WAIT)

    @pl.when(chunk.is_first)
    def _():
        begin_sequence(chunk)

    @pl.when(index + 1 < chunks)
    def _():
        load(chunk, index + 1, START)

    @pl.when(chunk.begin == chunk.end)
    def _():
        out[...] = jnp.zeros(out.shape, out.dtype)

    @pl.when(chunk.begin < chunk.end)
    def _():
        drain(chunk)  # the convolution writes the window that a copy may still read
        _compute(chunk)

    @pl.when(chunk.is_last)
    def _():
        end_sequence(chunk)

    @pl.when(index == chunks - 1)
    def _():
        drain(chunk)


def _compute(chunk: Chunk) -> None:
    """Outputs of the chunk's rows, and the running state after them."""
    key_heads, pairs = chunk.shape.key_heads, chunk.shape.value_heads // 2

    def of_chunk(stage):
        return functools.partial(stage, chunk)

    valid = chunk.valid(LANES)
    prepare_rows(chunk, valid)
    chunk.together((key_heads, of_chunk(read_state)), (pairs, of_chunk(set_pair)), most=4)
    invert(chunk)
    chunk.loop(pairs, of_chunk(solve), 16)
    chunk.loop(pairs, functools.partial(write_output, chunk, valid), 16)
    chunk.loop(key_heads, of_chunk(update_state), 8)


def prefill(
    qkv, b, a, conv_weight, a_log, dt_bias, start, length, fresh, slot, conv_pool, state_pool,
    *, shape: GatedDeltaNetShape, interpret: bool,
):
    """Sequences of any length, in place.

    Args:
        qkv: [tokens, channels], at least 64 tokens; b, a: [tokens, value heads] float32.
        start, length: [sequences] rows of each sequence; sequences without rows are left alone.
        fresh: [sequences] bool, whether a sequence starts from zero; slot: [sequences] where its states live.

    Returns:
        [tokens, value heads * 128], zero in rows of no sequence, and the pools.
    """
    tokens, value_heads = len(qkv), shape.value_heads
    count, *scalars = chunk_table(start, length, fresh, slot, tokens)
    scratch = declare(shape, conv_pool.shape[1], conv_pool.dtype, state_pool.dtype)

    def kernel(*refs):
        split = len(refs) - len(scratch)
        *arguments, _, _, out, new_conv_pool, new_state_pool = refs[:split]
        operands = Operands(*arguments, out, new_conv_pool, new_state_pool)
        index = pl.program_id(0)
        scalars_of_chunk = (ref[index] for ref in (operands.flags, operands.begin, operands.end))
        _kernel(Chunk(index, *scalars_of_chunk, shape, operands, Scratch(*refs[split:]), unroll=not interpret))

    def of_chunk(array):
        return pl.BlockSpec((CHUNK, *array.shape[1:]), lambda t, block, *_: (block[t], 0))

    return launch(
        kernel, "gated_delta_net_chunk", scalars, (qkv, b, a), (conv_weight / 2, a_log, dt_bias), (conv_pool, state_pool),
        steps=count, of_rows=of_chunk, output=jax.ShapeDtypeStruct((tokens, value_heads * LANES), qkv.dtype),
        scratch=scratch, vmem_bytes=62 * 2**20, interpret=interpret,
    )  # fmt: skip
