"""Paged attention: every implementation against the token-by-token reference, over pages that hold NaN elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
from attention_cases import (
    CAPACITY,
    OP,
    SCALE,
    SEQUENCES,
    TOKENS,
    arguments,
    check,
    decode_arguments,
    in_bfloat16,
    in_fp8,
    rows_of_none,
)
from comparison import compiled, relative_error

FP32 = 1e-5
BFLOAT16 = 8e-3
"""Weights and outputs may be rounded to BF16 (2⁻⁹ each)."""


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("contexts", [[0] * 6, [300, 0, 1, 16, 64, 255], [15, 63, 17, 300, 128, 200]], ids=str)
def test_lengths_and_contexts_mixed_in_one_call(implementation, page_size, contexts):
    args = arguments([0, 1, 2, 65, 130, 200], contexts, page_size=page_size)
    output = check(implementation, args)
    assert not output[rows_of_none(args)].any()


@pytest.mark.parametrize("heads", [(2, 2), (4, 1), (8, 2)], ids=lambda heads: f"{heads[0]} query, {heads[1]} KV")
def test_grouped_heads(implementation, heads):
    check(implementation, arguments([3, 130, 1], [0, 70, 300], heads=heads))


def test_sequences_in_any_order_and_rows_of_none_between_them(implementation):
    args = arguments([5, 130, 1, 0, 66], [7, 0, 64, 9, 250], starts=[440, 20, 3, 0, 200])
    output = check(implementation, args)
    assert rows_of_none(args).sum() == TOKENS - 202 and not output[rows_of_none(args)].any()


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("context", ["page - 1", "page", "page + 1", "blocks"])
@pytest.mark.parametrize("length", [1, 2])
def test_next_tokens_at_the_border_of_a_page(implementation, page_size, context, length):
    context = {"page - 1": page_size - 1, "page": page_size, "page + 1": page_size + 1, "blocks": 256}[context]
    check(implementation, arguments([length, length], [context, 4 * page_size - 1], page_size=page_size))


def test_a_sequence_fills_its_pages_to_the_last_place(implementation):
    check(implementation, arguments([CAPACITY - 300, 1], [300, CAPACITY - 1]))


def test_no_sequence_has_rows(implementation):
    assert not check(implementation, arguments([0, 0], [5, 0])).any()


def test_pages_of_others_stay_bit_for_bit(implementation):
    args = arguments([0, 3, 0], [100, 62, 0])
    _, pages = compiled(OP, implementation, scale=SCALE)(*args)
    written = np.zeros(args.pages.shape[:3], bool)
    for position in range(62, 65):
        written[args.page_table[1, position // 64], :, position % 64] = True
    np.testing.assert_array_equal(np.asarray(pages)[~written], args.pages[~written])
    assert np.isfinite(np.asarray(pages)[written]).all()


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("active", [[1] * 8, [1, 0, 1, 1, 0, 1, 1, 0], [0] * 8], ids=["all", "some", "none"])
def test_decode(implementation, page_size, active):
    args = decode_arguments(active, [0, 1, 15, 16, 63, 64, 300, 255], page_size=page_size)
    output = check(implementation, args, decode=True)
    assert not output[rows_of_none(args)].any()


def test_a_split_sequence_equals_one_call(implementation):
    run = compiled(OP, implementation, scale=SCALE)
    whole = arguments([200], [0])
    expected, _ = run(*whole)
    for split in (1, 63, 64, 65, 128):
        first, second = (np.pad(np.array([n], np.int32), (0, SEQUENCES - 1)) for n in (split, 200 - split))
        before, pages = run(*whole._replace(query_length=first))
        after, _ = run(*whole._replace(query_start=first, query_length=second, context_length=first, pages=pages))
        assert relative_error(before + after, expected) <= FP32


@pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
def test_bfloat16(implementation, decode):
    """Scores and softmax stay FP32."""
    lengths = [1] * 4 if decode else [1, 65, 130, 3]
    args = (decode_arguments if decode else arguments)(lengths, [300, 0, 17, 64])
    check(implementation, in_bfloat16(args), bound=BFLOAT16, decode=decode)


def test_large_scores(implementation):
    """Scores of some hundreds: without the running maximum their exponentials would overflow."""
    args = arguments([130, 1], [0, 300])
    check(implementation, args._replace(query=args.query * 100), bound=1e-4)


LARGE_PAGES = {"page_size": 256, "capacity": 1536, "heads": (32, 2)}
"""As a model has them on a TPU."""


@pytest.mark.parametrize("fp8", [False, True], ids=["float32 pages", "FP8 pages"])
def test_large_pages(implementation, fp8):
    """Decoding and prefilled sequences in one call, none, and contexts around the ends of pages and of blocks of them."""
    args = arguments([1, 70, 1, 0, 3, 1, 1, 2], [255, 186, 256, 9, 1023, 1024, 0, 257], tokens=128, **LARGE_PAGES)
    output = check(implementation, in_fp8(args) if fp8 else args)
    assert not output[rows_of_none(args)].any()


@pytest.mark.parametrize("fp8", [False, True], ids=["float32 pages", "FP8 pages"])
def test_decode_over_large_pages(implementation, fp8):
    args = decode_arguments([1, 1, 0, 1, 1, 1, 1, 1], [255, 0, 300, 256, 1023, 1024, 1535, 257], **LARGE_PAGES)
    check(implementation, in_fp8(args) if fp8 else args, decode=True)


def test_shared_pages(implementation):
    """Sequences with one prefix read its page and leave it as it is."""
    args = decode_arguments([1, 1, 1, 1, 0, 0, 0, 0], [300, 299, 256, 9, 0, 0, 0, 0], **LARGE_PAGES)
    args.page_table[1:3, 0] = args.page_table[0, 0]
    check(implementation, args, decode=True)


@pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
def test_rounding_of_fp8_pages(implementation, decode):
    """Against the same call with the pages as they were: 3 bits of a mantissa, so up to 2⁻⁴ of each element, 2.6 % on average;
    of the output 4 % are allowed."""
    build, lengths = (decode_arguments, [1] * 8) if decode else (arguments, [1, 70, 1, 0, 3, 1, 1, 2])
    sizes = LARGE_PAGES if decode else LARGE_PAGES | {"tokens": 128}
    args = build(lengths, [255, 186, 256, 9, 1023, 1024, 0, 257], **sizes)
    exact = compiled(OP, "reference", scale=SCALE, decode=decode)(*args)[0]
    rounded = compiled(OP, implementation, scale=SCALE, decode=decode)(*in_fp8(args))[0]
    assert 1e-3 < relative_error(rounded, exact) <= 0.04
