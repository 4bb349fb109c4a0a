"""Gated DeltaNet: checkpoints of the states after each token, which speculative decoding goes on from."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from comparison import relative_error
from gated_delta_net_cases import BOUND, SEQUENCES, arguments, check, in_bucket, run, shape_of

OP = "gated_delta_net"
WINDOW = 5
"""Most rows that a sequence with checkpoints takes."""
SLOTS = SEQUENCES * (1 + WINDOW)


@pytest.fixture
def shape(implementation):
    return shape_of(implementation)


def checkpoint_slots(lengths, rng) -> np.ndarray:
    """A slot for each of the first rows of sequences with `lengths` (0: none is kept), in no order, beyond the others."""
    free = iter(rng.permutation(np.arange(SEQUENCES, SLOTS)))
    slots = np.full((SEQUENCES, WINDOW), -1, np.int32)
    for sequence, length in enumerate(lengths):
        slots[sequence, :length] = [next(free) for _ in range(length)]
    return slots


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_windows_beside_decode_and_prefill(implementation, shape, dtype):
    """Each checkpoint is the state of a call that ends with its token; nothing else in the pools changes."""
    kept = [1, 2, 3, 4, 5, 0, 0, 0, 5, 2]
    args = arguments(shape, [1, 2, 3, 4, 5, 1, 65, 0, 5, 3], [6, 7, 8, 9, 1, 5, 4, 3, 0, 2], slots=SLOTS)
    args = args._replace(recurrent_state=np.array(jnp.asarray(args.recurrent_state, dtype)))
    args.conv_state[8], args.recurrent_state[8] = np.nan, np.nan  # starts afresh
    slots = checkpoint_slots(kept, np.random.default_rng(1))
    slots[2, 1] = -1  # one in the middle that is not kept
    # BF16 pools may round to the other side, which is 2⁻⁸ of an element.
    bound = BOUND[implementation] if dtype == "float32" else 5e-3
    without = run(implementation, shape, args)
    result = run(implementation, shape, args._replace(checkpoint_slot=slots))

    assert relative_error(result.output, without.output) <= BOUND[implementation]
    for row in range(WINDOW):
        # The checkpoint of the call in hand as the last state of a shorter one.
        cut = run("reference", shape, args._replace(query_length=np.minimum(args.query_length, row + 1)))
        sequences = np.flatnonzero(slots[:, row] >= 0)
        for name in ("conv_state", "recurrent_state"):
            pool, expected = getattr(result, name), getattr(cut, name)
            assert relative_error(pool[slots[sequences, row]], expected[sequences]) <= bound
    for name in ("conv_state", "recurrent_state"):
        untouched = np.setdiff1d(np.arange(SEQUENCES, SLOTS), slots)
        np.testing.assert_array_equal(getattr(result, name)[untouched], getattr(args, name)[untouched])
        np.testing.assert_array_equal(getattr(result, name)[7], getattr(args, name)[7])
    own = slice(0, SEQUENCES)
    np.testing.assert_array_equal(result.conv_state[own], without.conv_state[own])
    assert relative_error(np.delete(result.recurrent_state[own], 7, 0), np.delete(without.recurrent_state[own], 7, 0)) <= bound


def test_no_checkpoint_is_kept(implementation, shape):
    args = arguments(shape, [1, 2, 3, 65, 5], [0, 4, 4, 0, 9], slots=SLOTS)
    result = check(implementation, shape, args._replace(checkpoint_slot=np.full((SEQUENCES, WINDOW), -1, np.int32)))
    np.testing.assert_array_equal(result.conv_state[5:], args.conv_state[5:])
    np.testing.assert_array_equal(result.recurrent_state[5:], args.recurrent_state[5:])


def test_checkpoints_of_rows_beyond_the_sequence_are_not_written(implementation, shape):
    args = arguments(shape, [2, 0], [4, 4], slots=SLOTS)
    slots = checkpoint_slots([5, 5], np.random.default_rng(1))
    result = check(implementation, shape, args._replace(checkpoint_slot=slots))
    untouched = np.r_[slots[0, 2:], slots[1]]
    np.testing.assert_array_equal(result.recurrent_state[untouched], args.recurrent_state[untouched])
    np.testing.assert_array_equal(result.conv_state[untouched], args.conv_state[untouched])


@pytest.mark.parametrize("drafts", range(WINDOW))
def test_going_on_from_a_checkpoint_equals_never_having_rejected(implementation, shape, drafts):
    """Windows of one token and `drafts` more, of which some are accepted, against the accepted tokens alone."""
    rng = np.random.default_rng(drafts)
    sequences, context, total = 4, 7, 20
    plain = arguments(shape, [total] * sequences, context, slots=SLOTS)
    expected = run("reference", shape, plain)
    starts = plain.query_start[:sequences]

    accepted = np.zeros(sequences, int)  # of the `total` tokens of each sequence
    home = np.arange(sequences)  # the slot that each sequence goes on from
    state = plain
    output = np.zeros_like(expected.output)
    while accepted.min() < total:
        window = np.minimum(drafts + 1, total - accepted)
        count = np.array([rng.integers(1, rows + 1) if rows else 0 for rows in window])
        free = np.setdiff1d(np.arange(SLOTS), home)
        slots = np.full((SEQUENCES, WINDOW), -1, np.int32)
        slots[:sequences, : drafts + 1] = rng.choice(free, (sequences, drafts + 1), replace=False)
        args = arguments(shape, window, context + accepted, slots=SLOTS)
        for sequence, first in enumerate(args.query_start[:sequences]):
            # Rows that will be rejected keep the random tokens that are there.
            to = slice(first, first + count[sequence])
            own = slice(starts[sequence] + accepted[sequence], starts[sequence] + accepted[sequence] + count[sequence])
            for name in ("qkv", "b", "a"):
                getattr(args, name)[to] = getattr(plain, name)[own]
        args = args._replace(
            slot=in_bucket(home), checkpoint_slot=slots, conv_state=state.conv_state, recurrent_state=state.recurrent_state
        )
        state = run(implementation, shape, args)
        for sequence, first in enumerate(args.query_start[:sequences]):
            at = starts[sequence] + accepted[sequence]
            output[at : at + count[sequence]] = state.output[first : first + count[sequence]]
        home = np.where(count > 0, slots[np.arange(sequences), count - 1], home)
        accepted += count

    assert relative_error(output, expected.output) <= BOUND[implementation]
    assert relative_error(state.recurrent_state[home], expected.recurrent_state[:sequences]) <= BOUND[implementation]
    np.testing.assert_array_equal(state.conv_state[home], expected.conv_state[:sequences])
