"""Paged attention: every implementation against the token-by-token reference, over pages that hold NaN elsewhere."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

OP = "ragged_paged_attention"
TOKENS, SEQUENCES, DIM = 448, 8, 16
SCALE = DIM**-0.5
CAPACITY = 512
"""Positions that a sequence's pages have room for."""
FP32 = 1e-5


class Arguments(NamedTuple):
    """Arguments of the operation, in its order."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    pages: np.ndarray
    query_start: np.ndarray
    query_length: np.ndarray
    context_length: np.ndarray
    page_table: np.ndarray


def arguments(
    lengths, contexts, *, page_size=64, heads=(4, 1), starts=None, tokens=TOKENS, sequences=SEQUENCES
) -> Arguments:
    """Random tokens and a random past; what no token has written is NaN, and pages lie in no order."""
    rng = np.random.default_rng(0)
    query_heads, kv_heads = heads
    starts = np.cumsum(lengths) - lengths if starts is None else starts
    lengths, contexts, starts = (
        np.pad(np.array(values, np.int32), (0, sequences - len(values))) for values in (lengths, contexts, starts)
    )
    per_sequence = CAPACITY // page_size
    table = rng.permutation(sequences * per_sequence).reshape(sequences, per_sequence).astype(np.int32)
    pages = np.full((sequences * per_sequence, page_size, 2 * kv_heads, DIM), np.nan, np.float32)
    for sequence, context in enumerate(contexts):
        position = np.arange(context)
        past = rng.standard_normal((context, 2 * kv_heads, DIM))
        pages[table[sequence, position // page_size], position % page_size] = past

    def normal(count):
        return rng.standard_normal((tokens, count, DIM)).astype(np.float32)

    return Arguments(normal(query_heads), normal(kv_heads), normal(kv_heads), pages, starts, lengths, contexts, table)


@pytest.fixture
def check(compiled, relative_error):
    """Asserts that an implementation agrees with the reference in output and pages, and returns its output."""

    def checker(implementation: str, args: Arguments, bound=FP32, decode=False):
        result = compiled(OP, implementation, scale=SCALE, decode=decode)(*args)
        expected = compiled(OP, "reference", scale=SCALE, decode=decode)(*args)
        assert [part.dtype for part in result] == [part.dtype for part in expected]
        np.testing.assert_array_equal(np.asarray(result[1], np.float32), np.asarray(expected[1], np.float32))
        assert np.isfinite(np.asarray(result[0], np.float32)).all()
        assert relative_error(result[0], expected[0]) <= bound
        return np.asarray(result[0])

    return checker


def rows_of_none(args: Arguments) -> np.ndarray:
    taken = np.zeros(len(args.query), bool)
    for start, length in zip(args.query_start, args.query_length, strict=True):
        taken[start : start + length] = True
    return ~taken


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("contexts", [[0] * 6, [300, 0, 1, 16, 64, 255], [15, 63, 17, 300, 128, 200]], ids=str)
def test_lengths_and_contexts_mixed_in_one_call(implementation, check, page_size, contexts):
    args = arguments([0, 1, 2, 65, 130, 200], contexts, page_size=page_size)
    output = check(implementation, args)
    assert not output[rows_of_none(args)].any()


@pytest.mark.parametrize("heads", [(2, 2), (4, 1), (8, 2)], ids=lambda heads: f"{heads[0]} query, {heads[1]} KV")
def test_grouped_heads(implementation, check, heads):
    check(implementation, arguments([3, 130, 1], [0, 70, 300], heads=heads))


def test_sequences_in_any_order_and_rows_of_none_between_them(implementation, check):
    args = arguments([5, 130, 1, 0, 66], [7, 0, 64, 9, 250], starts=[440, 20, 3, 0, 200])
    output = check(implementation, args)
    assert rows_of_none(args).sum() == TOKENS - 202 and not output[rows_of_none(args)].any()


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("context", ["page - 1", "page", "page + 1", "blocks"])
@pytest.mark.parametrize("length", [1, 2])
def test_next_tokens_at_the_border_of_a_page(implementation, check, page_size, context, length):
    context = {"page - 1": page_size - 1, "page": page_size, "page + 1": page_size + 1, "blocks": 256}[context]
    check(implementation, arguments([length, length], [context, 4 * page_size - 1], page_size=page_size))


def test_a_sequence_fills_its_pages_to_the_last_place(implementation, check):
    check(implementation, arguments([CAPACITY - 300, 1], [300, CAPACITY - 1]))


def test_no_sequence_has_rows(implementation, check):
    assert not check(implementation, arguments([0, 0], [5, 0])).any()


def test_pages_of_others_stay_bit_for_bit(implementation, compiled):
    args = arguments([0, 3, 0], [100, 62, 0])
    _, pages = compiled(OP, implementation, scale=SCALE)(*args)
    written = np.zeros(args.pages.shape[:2], bool)
    for position in range(62, 65):
        written[args.page_table[1, position // 64], position % 64] = True
    np.testing.assert_array_equal(np.asarray(pages)[~written], args.pages[~written])
    assert np.isfinite(np.asarray(pages)[written]).all()


def decode_arguments(active, contexts, **sizes) -> Arguments:
    count = len(active)
    return arguments(active, contexts, starts=np.arange(count), tokens=count, sequences=count, **sizes)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("active", [[1] * 8, [1, 0, 1, 1, 0, 1, 1, 0], [0] * 8], ids=["all", "some", "none"])
def test_decode(implementation, check, page_size, active):
    args = decode_arguments(active, [0, 1, 15, 16, 63, 64, 300, 255], page_size=page_size)
    output = check(implementation, args, decode=True)
    assert not output[rows_of_none(args)].any()


def test_a_split_sequence_equals_one_call(implementation, compiled, relative_error):
    run = compiled(OP, implementation, scale=SCALE)
    whole = arguments([200], [0])
    expected, _ = run(*whole)
    for split in (1, 63, 64, 65, 128):
        first, second = (np.pad(np.array([n], np.int32), (0, SEQUENCES - 1)) for n in (split, 200 - split))
        before, pages = run(*whole._replace(query_length=first))
        after, _ = run(*whole._replace(query_start=first, query_length=second, context_length=first, pages=pages))
        assert relative_error(before + after, expected) <= FP32


@pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
def test_bfloat16(implementation, check, decode):
    """Scores and softmax stay FP32; weights and outputs may be rounded to BF16 (2⁻⁹ each)."""
    lengths = [1] * 4 if decode else [1, 65, 130, 3]
    args = (decode_arguments if decode else arguments)(lengths, [300, 0, 17, 64])
    arrays = {name: jnp.asarray(getattr(args, name), jnp.bfloat16) for name in ("query", "key", "value", "pages")}
    check(implementation, args._replace(**arrays), bound=8e-3, decode=decode)


def test_large_scores(implementation, check):
    """Scores of some hundreds: without the running maximum their exponentials would overflow."""
    args = arguments([130, 1], [0, 300])
    check(implementation, args._replace(query=args.query * 100), bound=1e-4)
