"""What `python -m custom_ops.schedule` compiles: one core's share of 397B's attention (32 query heads, 2 KV heads of 256, pages
of 256) when every core owns whole requests."""

from __future__ import annotations

import functools

import jax

from custom_ops.ragged_paged_attention.pallas_cost import AttentionWork
from custom_ops.ragged_paged_attention.pallas_layout import AttentionShape
from custom_ops.schedule.cases import Case, Program

QUERY_HEADS, HEADS, DIM, PAGE = 32, 2, 256, 256
SEQUENCES, PAGES = 8, 36
"""Of a core: sequences that a batch has room for, and pages that each has."""
CONTEXT, CHUNK = 8192, 1024
FP8 = "float8_e4m3fn"


def _program(rows: int, page_dtype: str, decode: bool) -> Program:
    from custom_ops.ragged_paged_attention.pallas_tpu import ragged_paged_attention

    pool = (SEQUENCES * PAGES, 2 * HEADS, PAGE)
    arguments = [
        _array((rows, QUERY_HEADS, DIM), "bfloat16"),
        *[_array((rows, HEADS, DIM), "bfloat16")] * 2,
        _array((*pool, DIM), page_dtype),
        *[_array((SEQUENCES,), "int32")] * 3,
        _array((SEQUENCES, PAGES), "int32"),
    ]
    donated = (3,)
    if page_dtype == FP8:
        arguments.append(_array(pool, "float32"))
        donated = (3, 8)
    return Program(functools.partial(ragged_paged_attention, scale=DIM**-0.5, decode=decode), tuple(arguments), donated)


def _array(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _case(name: str, kernel: str, page_dtype: str, decode: bool = False, **load) -> Case:
    shape = AttentionShape(QUERY_HEADS, HEADS, DIM, PAGE, SEQUENCES, PAGES, "bfloat16", page_dtype)
    work = AttentionWork(shape, SEQUENCES if decode else CHUNK, **load)
    least = work.bytes(kernel) if kernel == "attention_write" else work.least_bytes()
    return Case(
        f"{name}, {page_dtype} pages", "pallas_tpu", functools.partial(_program, work.rows, page_dtype, decode), kernel,
        round(least), 0 if kernel == "attention_write" else round(work.matrix_flops()),
        work.turns, round(work.bytes(kernel)),
    )  # fmt: skip


def _cases(page_dtype: str) -> list[Case]:
    chunk = {"sequences": 1, "prefill": CHUNK}
    return [
        _case(f"decode of {SEQUENCES} at {CONTEXT}", "attention_decode", page_dtype, True, decoding=SEQUENCES, context=CONTEXT),
        _case(f"prefill of {CHUNK} at 0", "attention_prefill", page_dtype, **chunk),
        _case(f"prefill of {CHUNK} at {CONTEXT}", "attention_prefill", page_dtype, **chunk, prefill_context=CONTEXT),
        _case(f"writing {CHUNK}", "attention_write", page_dtype, **chunk),
    ]


CASES = [case for page_dtype in ("bfloat16", FP8) for case in _cases(page_dtype)]
