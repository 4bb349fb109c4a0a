"""Gated DeltaNet: every implementation against the sequential reference, in prefill, continuation and decode."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from custom_ops.gated_delta_net import GatedDeltaNetShape
from custom_ops.gated_delta_net.xla import unit_lower_inverse

OP = "gated_delta_net"
SHAPE = GatedDeltaNetShape(key_heads=2, value_heads=8, key_dim=16, value_dim=16)
LENGTHS = (0, 1, 2, 3, 4, 5, 63, 64, 65, 200)
"""Shorter than the convolution, one less and one more than a chunk, several chunks, and nothing at all."""
TOKENS, SEQUENCES = 448, len(LENGTHS)
WIDTH = 4
FP32 = 1e-5
"""Largest relative error (RMS) in FP32."""


class Arguments(NamedTuple):
    """Arguments of the operation, in its order."""

    qkv: np.ndarray
    beta: np.ndarray
    decay: np.ndarray
    conv_weight: np.ndarray
    query_start: np.ndarray
    query_length: np.ndarray
    context_length: np.ndarray
    slot: np.ndarray
    conv_state: np.ndarray
    recurrent_state: np.ndarray


class Result(NamedTuple):
    output: np.ndarray
    conv_state: np.ndarray
    recurrent_state: np.ndarray


def arguments(lengths, contexts=0, *, shape=SHAPE, gap=0) -> Arguments:
    """Random tokens of sequences laid one after the other, `gap` rows apart.

    Always in the same bucket of rows and sequences, so that little is compiled; unused sequences have no rows.
    """
    starts = np.cumsum(np.add(lengths, gap)) - lengths
    contexts = np.broadcast_to(contexts, len(lengths))
    return _arguments(_in_bucket(starts), _in_bucket(lengths), _in_bucket(contexts), TOKENS, shape)


def decode_arguments(active, contexts, shape=SHAPE) -> Arguments:
    """One row a sequence, row i and slot i being sequence i's, whether it is active or not."""
    return _arguments(np.arange(len(active)), active, contexts, len(active), shape)


def _in_bucket(values):
    return np.pad(values, (0, SEQUENCES - len(values)))


def _arguments(starts, lengths, contexts, tokens, shape) -> Arguments:
    rng = np.random.default_rng(0)
    count = len(lengths)

    def normal(*size):
        return rng.standard_normal(size).astype(np.float32)

    return Arguments(
        qkv=normal(tokens, shape.channels),
        beta=rng.uniform(0, 1, (tokens, shape.value_heads)).astype(np.float32),
        decay=-rng.exponential(0.3, (tokens, shape.value_heads)).astype(np.float32),
        conv_weight=normal(WIDTH, shape.channels) / 2,
        query_start=np.array(starts, np.int32),
        query_length=np.array(lengths, np.int32),
        context_length=np.array(contexts, np.int32),
        slot=np.arange(count, dtype=np.int32),
        conv_state=normal(count, WIDTH - 1, shape.channels),
        recurrent_state=normal(count, shape.value_heads, shape.key_dim, shape.value_dim),
    )


@pytest.fixture
def run(compiled):
    """Runs one implementation: (name, arguments, static arguments) → `Result` of NumPy arrays."""

    def runner(implementation: str, args: Arguments, shape=SHAPE, decode=False) -> Result:
        return Result(*map(np.asarray, compiled(OP, implementation, shape=shape, decode=decode)(*args)))

    return runner


@pytest.fixture
def check(run, relative_error):
    """Asserts that an implementation agrees with the reference in output and states, and returns its result."""

    def checker(implementation: str, args: Arguments, bound=FP32, **static) -> Result:
        result, expected = run(implementation, args, **static), run("reference", args, **static)
        for name, value in result._asdict().items():
            reference = getattr(expected, name)
            assert value.dtype == reference.dtype and value.shape == reference.shape
            assert relative_error(value, reference) <= bound, name
        return result

    return checker


@pytest.mark.parametrize("contexts", [0, 7, [0, 7] * 5], ids=["fresh", "continued", "mixed"])
def test_lengths_mixed_in_one_call(implementation, check, contexts):
    check(implementation, arguments(LENGTHS, contexts))


def test_sequences_in_any_order_and_rows_of_none_between_them(implementation, check):
    args = arguments(LENGTHS, [7, 0] * 5, gap=3)
    order = np.random.default_rng(1).permutation(len(LENGTHS))
    names = ("query_start", "query_length", "context_length", "slot")
    args = args._replace(**{name: getattr(args, name)[order] for name in names})
    result = check(implementation, args)
    taken = np.zeros(len(args.qkv), bool)
    for start, length in zip(args.query_start, args.query_length, strict=True):
        taken[start : start + length] = True
    assert not result.output[~taken].any()


def test_no_sequence_has_rows(implementation, run):
    args = arguments([0, 0, 0], [0, 5, 9], gap=5)
    result = run(implementation, args)
    assert not result.output.any()
    np.testing.assert_array_equal(result.conv_state, args.conv_state)
    np.testing.assert_array_equal(result.recurrent_state, args.recurrent_state)


def test_one_sequence_in_a_bucket_of_many(implementation, check):
    check(implementation, arguments([0, 0, 0, 5], [0, 0, 0, 9]))


def test_reused_slot_starts_from_zero_whatever_it_holds(implementation, run, check):
    args = arguments([1, 3, 70])
    clean = args._replace(conv_state=args.conv_state * 0, recurrent_state=args.recurrent_state * 0)
    dirty = args._replace(conv_state=args.conv_state * np.nan, recurrent_state=args.recurrent_state * np.nan)
    check(implementation, clean)
    result, expected = run(implementation, dirty), run(implementation, clean)
    np.testing.assert_array_equal(result.output, expected.output)
    np.testing.assert_array_equal(result.conv_state[:3], expected.conv_state[:3])
    np.testing.assert_array_equal(result.recurrent_state[:3], expected.recurrent_state[:3])


def test_moved_slots_keep_their_own_state(implementation, run):
    args = arguments([1, 2, 40, 0], [3, 5, 9, 4])
    moved = np.random.default_rng(1).permutation(SEQUENCES)  # sequence i lives in slot moved[i]
    elsewhere = args._replace(
        slot=moved.astype(np.int32),
        conv_state=args.conv_state[np.argsort(moved)],
        recurrent_state=args.recurrent_state[np.argsort(moved)],
    )
    expected, result = run(implementation, args), run(implementation, elsewhere)
    np.testing.assert_array_equal(result.output, expected.output)
    np.testing.assert_array_equal(result.conv_state[moved], expected.conv_state)
    np.testing.assert_array_equal(result.recurrent_state[moved], expected.recurrent_state)


@pytest.mark.parametrize("value", [None, np.nan], ids=["random", "NaN"])
def test_states_of_sequences_without_rows_stay_bit_for_bit(implementation, run, value):
    """Their slot numbers may even be those of sequences with rows: a bucket's unused places name any slot."""
    args = arguments([0, 3, 0, 65], [0, 2, 8, 0])
    if value is not None:
        args.conv_state[[0, 2]], args.recurrent_state[[0, 2]] = value, value
    result = run(implementation, args)
    for untouched in (0, 2):
        np.testing.assert_array_equal(result.conv_state[untouched], args.conv_state[untouched])
        np.testing.assert_array_equal(result.recurrent_state[untouched], args.recurrent_state[untouched])
    shared = run(implementation, args._replace(slot=_in_bucket([1, 1, 3, 3]).astype(np.int32)))
    np.testing.assert_array_equal(shared.output, result.output)
    np.testing.assert_array_equal(shared.recurrent_state[[1, 3]], result.recurrent_state[[1, 3]])


@pytest.mark.parametrize("split", [1, 2, 3, 31, 32, 64, 100])
def test_a_split_sequence_equals_one_call(implementation, run, relative_error, split):
    whole = arguments([130])
    expected = run(implementation, whole)
    first = run(implementation, whole._replace(query_length=_in_bucket([split]).astype(np.int32)))
    rest = whole._replace(
        query_start=_in_bucket([split]).astype(np.int32),
        query_length=_in_bucket([130 - split]).astype(np.int32),
        context_length=_in_bucket([split]).astype(np.int32),
        conv_state=first.conv_state,
        recurrent_state=first.recurrent_state,
    )
    second = run(implementation, rest)
    assert not first.output[split:].any() and not second.output[:split].any()
    assert relative_error(first.output + second.output, expected.output) <= FP32
    assert relative_error(second.recurrent_state, expected.recurrent_state) <= FP32
    np.testing.assert_array_equal(second.conv_state, expected.conv_state)


@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("decay", [0.0, -50.0, -1e5, "mixed"])
def test_extreme_gates(implementation, check, beta, decay):
    args = arguments([1, 5, 65], [0, 4, 4])
    args.beta[:] = beta
    args.decay[:] = 0.0 if decay == "mixed" else decay
    if decay == "mixed":
        args.decay[::3], args.decay[1::7] = -50.0, -1e5
    result = check(implementation, args)
    assert np.isfinite(result.output).all()


def test_zero_keys_and_queries(implementation, check):
    """The norm of a zero vector must not divide by zero; where the keys are zero nothing is written."""
    args = arguments([1, 5, 65])
    grouped = args.qkv.reshape(len(args.qkv), SHAPE.key_heads, -1)
    grouped[:, :, : 2 * SHAPE.key_dim] = 0
    result = check(implementation, args)
    assert not result.output.any() and not result.recurrent_state[:3].any()


@pytest.mark.parametrize("heads", [SHAPE, GatedDeltaNetShape(1, 1, 64, 64)], ids=["8 heads", "1 head of 64"])
def test_identical_keys(implementation, check, heads):
    """beta = 1 without decay: the chunk's triangular system has only ones, powers of it grow beyond any bound."""
    args = arguments([200], shape=heads)
    args.beta[:], args.decay[:], args.conv_weight[:] = 1.0, 0.0, 0.0
    args.conv_weight[-1] = 1.0
    grouped = args.qkv.reshape(len(args.qkv), heads.key_heads, -1)
    grouped[:, :, : 2 * heads.key_dim] = grouped[:1, :, : 2 * heads.key_dim]
    check(implementation, args, shape=heads)


@pytest.mark.parametrize(
    "heads",
    [
        GatedDeltaNetShape(4, 4, 16, 16),
        GatedDeltaNetShape(4, 12, 32, 16),
        GatedDeltaNetShape(2, 8, 64, 64),
    ],
    ids=lambda heads: f"{heads.key_heads} for {heads.value_heads}, {heads.key_dim} by {heads.value_dim}",
)
@pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
def test_heads(implementation, check, heads, decode):
    if decode:
        args = decode_arguments([1, 0, 1, 1, 0, 1], [5, 3, 0, 1, 0, 0], shape=heads)
    else:
        args = arguments([5, 65], [3, 0], shape=heads)
    check(implementation, args, shape=heads, decode=decode)


@pytest.mark.parametrize("active", [[1] * 6, [1, 0, 1, 1, 0, 1], [0] * 6], ids=["all", "some", "none"])
def test_decode(implementation, check, run, active):
    args = decode_arguments(active, [0, 0, 1, 5, 100, 2])
    args.conv_state[0], args.recurrent_state[0] = (np.nan, np.nan) if active[0] else (0, 0)  # starts afresh
    result = check(implementation, args, decode=True)
    idle = ~np.array(active, bool)
    assert not result.output[idle].any()
    np.testing.assert_array_equal(result.conv_state[idle], args.conv_state[idle])
    np.testing.assert_array_equal(result.recurrent_state[idle], args.recurrent_state[idle])


def test_decode_is_a_promise_that_changes_nothing(implementation, run, relative_error):
    args = decode_arguments([1, 0, 1, 1, 0, 1], [0, 0, 1, 5, 100, 2])
    for result, expected in zip(run(implementation, args, decode=True), run(implementation, args), strict=True):
        assert relative_error(result, expected) <= FP32


@pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
def test_bfloat16_tokens(implementation, check, decode):
    """Arithmetic is FP32 from the same BF16 inputs on: only the rounding of the output may differ, by a last bit."""
    args = decode_arguments([1, 0, 1, 1, 0, 1], [0, 0, 1, 5, 100, 2]) if decode else arguments([3, 65, 200], [0, 3, 9])
    tokens = {name: jnp.asarray(getattr(args, name), jnp.bfloat16) for name in ("qkv", "conv_weight", "conv_state")}
    result = check(implementation, args._replace(**tokens), bound=4e-3, decode=decode)
    assert result.output.dtype == jnp.bfloat16 and result.recurrent_state.dtype == np.float32


@pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
def test_bfloat16_states(implementation, run, relative_error, decode):
    """Storage in BF16 costs roundings of the state (2⁻⁹ each), at most one a chunk, and nothing else."""
    args = decode_arguments([1, 0, 1, 1, 0, 1], [0, 0, 1, 5, 100, 2]) if decode else arguments([3, 65, 200], [0, 3, 9])
    args = args._replace(recurrent_state=np.array(jnp.asarray(args.recurrent_state, jnp.bfloat16).astype(jnp.float32)))
    exact = run("reference", args, decode=decode)
    stored = args._replace(recurrent_state=jnp.asarray(args.recurrent_state, jnp.bfloat16))
    result = run(implementation, stored, decode=decode)
    assert result.recurrent_state.dtype == jnp.bfloat16 and result.output.dtype == np.float32
    assert relative_error(result.recurrent_state, exact.recurrent_state) <= 5e-3
    assert relative_error(result.output, exact.output) <= 5e-3


def test_answers_do_not_depend_on_neighbours(implementation, run):
    """Equal prompts give equal answers, bit for bit, wherever they lie in the batch."""
    args = arguments([65, 5, 65, 1, 65])
    starts = args.query_start
    for name in ("qkv", "beta", "decay"):
        rows = getattr(args, name)
        for copy in (2, 4):
            rows[starts[copy] : starts[copy] + 65] = rows[starts[0] : starts[0] + 65]
    result = run(implementation, args)
    for copy in (2, 4):
        np.testing.assert_array_equal(
            result.output[starts[copy] : starts[copy] + 65], result.output[starts[0] : starts[0] + 65]
        )
        np.testing.assert_array_equal(result.recurrent_state[copy], result.recurrent_state[0])


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
