"""Gated DeltaNet: every implementation against the sequential reference, in prefill, continuation and decode."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import relative_error
from gated_delta_net_cases import (
    BOUND,
    LENGTHS,
    SEQUENCES,
    arguments,
    check,
    decode_arguments,
    in_bucket,
    parametrize_shapes,
    run,
    set_gates,
    shape_of,
)

from custom_ops.gated_delta_net import GatedDeltaNetShape
from custom_ops.gated_delta_net.xla import unit_lower_inverse

OP = "gated_delta_net"


@pytest.fixture
def shape(implementation):
    return shape_of(implementation)


def some_active(shape):
    """A decode call in which some sequences have a row."""
    return decode_arguments(shape, [1, 0, 1, 1, 0, 1], [0, 0, 1, 5, 100, 2])


@pytest.mark.parametrize("contexts", [0, 7, [0, 7] * 5], ids=["fresh", "continued", "mixed"])
def test_lengths_mixed_in_one_call(implementation, shape, contexts):
    check(implementation, shape, arguments(shape, LENGTHS, contexts))


def test_sequences_in_any_order_and_rows_of_none_between_them(implementation, shape):
    args = arguments(shape, LENGTHS, [7, 0] * 5, gap=3)
    order = np.random.default_rng(1).permutation(len(LENGTHS))
    names = ("query_start", "query_length", "context_length", "slot")
    args = args._replace(**{name: getattr(args, name)[order] for name in names})
    result = check(implementation, shape, args)
    taken = np.zeros(len(args.qkv), bool)
    for start, length in zip(args.query_start, args.query_length, strict=True):
        taken[start : start + length] = True
    assert not result.output[~taken].any()


def test_no_sequence_has_rows(implementation, shape):
    args = arguments(shape, [0, 0, 0], [0, 5, 9], gap=5)
    result = run(implementation, shape, args)
    assert not result.output.any()
    np.testing.assert_array_equal(result.conv_state, args.conv_state)
    np.testing.assert_array_equal(result.recurrent_state, args.recurrent_state)


def test_one_sequence_in_a_bucket_of_many(implementation, shape):
    check(implementation, shape, arguments(shape, [0, 0, 0, 5], [0, 0, 0, 9]))


def test_reused_slot_starts_from_zero_whatever_it_holds(implementation, shape):
    args = arguments(shape, [1, 3, 70])
    clean = args._replace(conv_state=args.conv_state * 0, recurrent_state=args.recurrent_state * 0)
    dirty = args._replace(conv_state=args.conv_state * np.nan, recurrent_state=args.recurrent_state * np.nan)
    check(implementation, shape, clean)
    result, expected = run(implementation, shape, dirty), run(implementation, shape, clean)
    np.testing.assert_array_equal(result.output, expected.output)
    np.testing.assert_array_equal(result.conv_state[:3], expected.conv_state[:3])
    np.testing.assert_array_equal(result.recurrent_state[:3], expected.recurrent_state[:3])


def test_moved_slots_keep_their_own_state(implementation, shape):
    args = arguments(shape, [1, 2, 40, 0], [3, 5, 9, 4])
    moved = np.random.default_rng(1).permutation(SEQUENCES)  # sequence i lives in slot moved[i]
    elsewhere = args._replace(
        slot=moved.astype(np.int32),
        conv_state=args.conv_state[np.argsort(moved)],
        recurrent_state=args.recurrent_state[np.argsort(moved)],
    )
    expected, result = run(implementation, shape, args), run(implementation, shape, elsewhere)
    np.testing.assert_array_equal(result.output, expected.output)
    np.testing.assert_array_equal(result.conv_state[moved], expected.conv_state)
    np.testing.assert_array_equal(result.recurrent_state[moved], expected.recurrent_state)


@pytest.mark.parametrize("value", [None, np.nan], ids=["random", "NaN"])
def test_states_of_sequences_without_rows_stay_bit_for_bit(implementation, shape, value):
    """Their slot numbers may even be those of sequences with rows: a bucket's unused places name any slot."""
    args = arguments(shape, [0, 3, 0, 65], [0, 2, 8, 0])
    if value is not None:
        args.conv_state[[0, 2]], args.recurrent_state[[0, 2]] = value, value
    result = run(implementation, shape, args)
    for untouched in (0, 2):
        np.testing.assert_array_equal(result.conv_state[untouched], args.conv_state[untouched])
        np.testing.assert_array_equal(result.recurrent_state[untouched], args.recurrent_state[untouched])
    shared = run(implementation, shape, args._replace(slot=in_bucket([1, 1, 3, 3])))
    np.testing.assert_array_equal(shared.output, result.output)
    np.testing.assert_array_equal(shared.recurrent_state[[1, 3]], result.recurrent_state[[1, 3]])


@pytest.mark.parametrize("split", [1, 2, 3, 31, 32, 64, 100])
def test_a_split_sequence_equals_one_call(implementation, shape, split):
    whole = arguments(shape, [130])
    expected = run(implementation, shape, whole)
    first = run(implementation, shape, whole._replace(query_length=in_bucket([split])))
    rest = whole._replace(
        query_start=in_bucket([split]),
        query_length=in_bucket([130 - split]),
        context_length=in_bucket([split]),
        conv_state=first.conv_state,
        recurrent_state=first.recurrent_state,
    )
    second = run(implementation, shape, rest)
    assert not first.output[split:].any() and not second.output[:split].any()
    assert relative_error(first.output + second.output, expected.output) <= BOUND[implementation]
    assert relative_error(second.recurrent_state, expected.recurrent_state) <= BOUND[implementation]
    np.testing.assert_array_equal(second.conv_state, expected.conv_state)


@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("g", [0.0, -50.0, -1e5, "mixed"])
def test_extreme_gates(implementation, shape, beta, g):
    args = arguments(shape, [1, 5, 65], [0, 4, 4])
    set_gates(args, beta, 0.0 if g == "mixed" else g)
    if g == "mixed":
        set_gates(args, g=-50.0, rows=slice(None, None, 3))
        set_gates(args, g=-1e5, rows=slice(1, None, 7))
    result = check(implementation, shape, args)
    assert np.isfinite(result.output).all()


def test_zero_keys_and_queries(implementation, shape):
    """The norm of a zero vector must not divide by zero; where the keys are zero nothing is written."""
    args = arguments(shape, [1, 5, 65])
    grouped = args.qkv.reshape(len(args.qkv), shape.key_heads, -1)
    grouped[:, :, : 2 * shape.key_dim] = 0
    result = check(implementation, shape, args)
    assert not result.output.any() and not result.recurrent_state[:3].any()


@parametrize_shapes((2, 8, 16, 16), (1, 1, 64, 64), (2, 4, 128, 128))
def test_identical_keys(implementation, shape):
    """beta = 1 without decay: the chunk's triangular system has only ones, powers of it grow beyond any bound."""
    args = arguments(shape, [200])
    set_gates(args, beta=1.0, g=0.0)
    args.conv_weight[:], args.conv_weight[-1] = 0.0, 1.0
    grouped = args.qkv.reshape(len(args.qkv), shape.key_heads, -1)
    grouped[:, :, : 2 * shape.key_dim] = grouped[:1, :, : 2 * shape.key_dim]
    check(implementation, shape, args)


@parametrize_shapes((4, 4, 16, 16), (4, 12, 32, 16), (2, 8, 64, 64), (2, 2, 128, 128), (2, 6, 128, 128), (2, 8, 128, 128))
@pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
def test_heads(implementation, shape, decode):
    if decode:
        args = decode_arguments(shape, [1, 0, 1, 1, 0, 1], [5, 3, 0, 1, 0, 0])
    else:
        args = arguments(shape, [5, 65], [3, 0])
    check(implementation, shape, args, decode=decode)


@pytest.mark.parametrize("active", [[1] * 6, [1, 0, 1, 1, 0, 1], [0] * 6], ids=["all", "some", "none"])
def test_decode(implementation, shape, active):
    args = decode_arguments(shape, active, [0, 0, 1, 5, 100, 2])
    args.conv_state[0], args.recurrent_state[0] = (np.nan, np.nan) if active[0] else (0, 0)  # starts afresh
    result = check(implementation, shape, args, decode=True)
    idle = ~np.array(active, bool)
    assert not result.output[idle].any()
    np.testing.assert_array_equal(result.conv_state[idle], args.conv_state[idle])
    np.testing.assert_array_equal(result.recurrent_state[idle], args.recurrent_state[idle])


def test_decode_is_a_promise_that_changes_nothing(implementation, shape):
    args = some_active(shape)
    for result, expected in zip(run(implementation, shape, args, decode=True), run(implementation, shape, args), strict=True):
        assert relative_error(result, expected) <= BOUND[implementation]


@pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
def test_bfloat16_tokens(implementation, shape, decode):
    """Arithmetic is FP32 from the same BF16 inputs on: only the rounding of the output may differ, by a last bit."""
    args = some_active(shape) if decode else arguments(shape, [3, 65, 200], [0, 3, 9])
    tokens = {name: jnp.asarray(getattr(args, name), jnp.bfloat16) for name in ("qkv", "conv_weight", "conv_state")}
    result = check(implementation, shape, args._replace(**tokens), bound=4e-3, decode=decode)
    assert result.output.dtype == jnp.bfloat16 and result.recurrent_state.dtype == np.float32


@pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
def test_bfloat16_states(implementation, shape, decode):
    """Storage in BF16 costs roundings of the state (2⁻⁹ each), at most one a chunk, and nothing else."""
    args = some_active(shape) if decode else arguments(shape, [3, 65, 200], [0, 3, 9])
    args = args._replace(recurrent_state=np.array(jnp.asarray(args.recurrent_state, jnp.bfloat16).astype(jnp.float32)))
    exact = run("reference", shape, args, decode=decode)
    stored = args._replace(recurrent_state=jnp.asarray(args.recurrent_state, jnp.bfloat16))
    result = run(implementation, shape, stored, decode=decode)
    assert result.recurrent_state.dtype == jnp.bfloat16 and result.output.dtype == np.float32
    assert relative_error(result.recurrent_state, exact.recurrent_state) <= 5e-3
    assert relative_error(result.output, exact.output) <= 5e-3


def test_answers_do_not_depend_on_neighbours(implementation, shape):
    """Equal prompts give equal answers wherever they lie in the batch: bit for bit, but for the kernel that cuts the flat
    batch at multiples of its chunk, where the place decides which rows are rounded together."""
    args = arguments(shape, [65, 5, 65, 1, 65])
    starts = args.query_start
    for name in ("qkv", "b", "a"):
        rows = getattr(args, name)
        for copy in (2, 4):
            rows[starts[copy] : starts[copy] + 65] = rows[starts[0] : starts[0] + 65]
    result = run(implementation, shape, args)
    bound = 1e-4 if implementation == "pallas_tpu" else 0
    for copy in (2, 4):
        output, expected = (result.output[start : start + 65] for start in (starts[copy], starts[0]))
        assert relative_error(output, expected) <= bound
        assert relative_error(result.recurrent_state[copy], result.recurrent_state[0]) <= bound


@pytest.mark.parametrize("size", [16, 32, 64])
@pytest.mark.parametrize("kind", ["random", "ones", "zero"])
def test_unit_lower_inverse(size, kind):
    rng = np.random.default_rng(size)
    full = {
        "random": rng.uniform(-8, 8, (3, size, size)) / size,  # of a moderate condition, to be held against float64
        "ones": np.ones((3, size, size)),
        "zero": np.zeros((3, size, size)),
    }
    lower = np.tril(full[kind], -1).astype(np.float32)
    inverse = np.asarray(jax.jit(unit_lower_inverse)(lower))
    expected = np.linalg.inv(np.eye(size) + lower.astype(np.float64))
    assert np.max(np.abs(inverse - expected)) <= 1e-5 * np.max(np.abs(expected))
    assert not np.triu(inverse, 1).any()


def test_published_channels_are_a_permutation_by_key_head():
    shape = GatedDeltaNetShape(key_heads=2, value_heads=4, key_dim=1, value_dim=2)
    assert shape.channels == 12
    # published: q0 q1 | k0 k1 | v0 v0 v1 v1 v2 v2 v3 v3
    assert shape.published_channels() == [0, 2, 4, 5, 6, 7, 1, 3, 8, 9, 10, 11]
