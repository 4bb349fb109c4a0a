"""What a call of Gated DeltaNet must not be given, checked on the host: a kernel runs without bounds checks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def check_metadata(
    query_start: np.ndarray, query_length: np.ndarray, context_length: np.ndarray, slot: np.ndarray,
    *, tokens: int, slots: int, checkpoint_slot: np.ndarray | None = None,
) -> None:  # fmt: skip
    """Check the sequences of one rank, as `custom_ops.gated_delta_net` describes them.

    Args:
        tokens: rows of the flat batch.
        slots: states that the pools hold.

    Raises:
        ValueError: a negative length; rows outside the batch, or not after those of the sequence before; a slot outside
            the pools, or one that two states would be written to; more rows than a sequence has room for checkpoints.
            It names field, sequence and values.
    """
    for name, lengths in (("query_length", query_length), ("context_length", context_length)):
        _refuse(lengths < 0, lambda at, name=name, lengths=lengths: f"{name} of sequence {at} is negative: {lengths[at]}")
    taken = np.flatnonzero(query_length > 0)
    start, length = query_start[taken], query_length[taken]
    end = start.astype(np.int64) + length
    _refuse(
        (start < 0) | (end > tokens),
        lambda at: f"query_start and query_length of sequence {taken[at]} are rows {start[at]} to {end[at]} of {tokens}",
    )
    _refuse(
        start[1:] < end[:-1],
        lambda at: f"query_start of sequence {taken[at + 1]} is {start[at + 1]}, before sequence {taken[at]} ends: "
        f"its query_start is {start[at]} and its query_length {length[at]}",
    )
    _refuse((slot < 0) | (slot >= slots), lambda at: f"slot of sequence {at} is {slot[at]}, and the pools have {slots}")
    if checkpoint_slot is None:
        _check_distinct(slot[taken], taken, ["slot"] * len(taken))
        return
    outside = (checkpoint_slot < -1) | (checkpoint_slot >= slots)
    _refuse(
        outside.any(1), lambda at: f"checkpoint_slot of sequence {at} is {checkpoint_slot[at]}, and the pools have {slots}"
    )
    room = checkpoint_slot.shape[1]
    _refuse(
        (query_length > room) & (checkpoint_slot >= 0).any(1),
        lambda at: f"query_length of sequence {at} is {query_length[at]}, and its checkpoint_slot {checkpoint_slot[at]}",
    )
    sequence, row = np.nonzero((checkpoint_slot >= 0) & (np.arange(room) < query_length[:, None]))
    _check_distinct(
        np.concatenate([slot[taken], checkpoint_slot[sequence, row]]),
        np.concatenate([taken, sequence]),
        ["slot"] * len(taken) + ["checkpoint_slot"] * len(sequence),
    )


def _check_distinct(slot: np.ndarray, sequence: np.ndarray, field: list[str]) -> None:
    """slot, sequence, field: where states are written, by which sequence, and where that was said."""
    order = np.argsort(slot, kind="stable")
    ascending = slot[order]
    repeated = ascending[1:] == ascending[:-1]

    def message(at: int) -> str:
        one, other = order[at], order[at + 1]
        return f"{field[one]} of sequence {sequence[one]} and {field[other]} of sequence {sequence[other]} are both {slot[one]}"

    _refuse(repeated, message)


def _refuse(bad: np.ndarray, message: Callable[[int], str]) -> None:
    if bad.any():
        raise ValueError(message(int(np.argmax(bad))))
