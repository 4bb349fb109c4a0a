"""Gated DeltaNet: bad metadata is refused on the host, by name and value."""

from __future__ import annotations

import numpy as np
import pytest

from custom_ops.gated_delta_net.metadata import check_metadata

TOKENS, SLOTS = 32, 16
NONE = [-1, -1, -1]


def metadata(**changed) -> dict:
    """Five sequences: a window with checkpoints, none, a decode row, a prefill, none; with the fields in `changed`."""
    fields = {
        "query_start": [0, 0, 3, 5, 99],
        "query_length": [3, 0, 1, 27, 0],
        "context_length": [9, 0, 4, 0, 7],
        "slot": [4, 4, 0, 15, 4],
        "checkpoint_slot": [[8, 9, 7], [8, 8, 8], NONE, NONE, NONE],
    } | changed
    arrays = {name: None if value is None else np.array(value, np.int32) for name, value in fields.items()}
    return arrays | {"tokens": TOKENS, "slots": SLOTS}


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"checkpoint_slot": None},
        {"query_length": [0] * 5},
        {"query_length": [1, 0, 1, 1, 0], "checkpoint_slot": [[8, 4, 0], NONE, [9, 8, 8], NONE, NONE]},
        {"query_start": [0, 1, 2, 3, 4], "query_length": [1] * 5, "slot": [0, 1, 2, 3, 4], "checkpoint_slot": None},
    ],
    ids=["mixed", "no checkpoints", "no rows", "checkpoints of rows that are not there", "decode"],
)
def test_good_metadata_passes(changed):
    check_metadata(**metadata(**changed))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"query_length": [3, -2, 1, 27, 0]}, ["query_length", "sequence 1", "-2"]),
        ({"context_length": [9, 0, 4, -1, 7]}, ["context_length", "sequence 3", "-1"]),
        ({"query_length": [3, 0, 1, 28, 0]}, ["query_length", "sequence 3", "5", "33", "32"]),
        ({"query_start": [-1, 0, 3, 5, 0]}, ["query_start", "sequence 0", "-1"]),
        ({"query_length": [3, 0, 1, 2**31 - 1, 0]}, ["query_length", "sequence 3", str(5 + 2**31 - 1)]),
        ({"query_start": [6, 0, 9, 0, 0], "query_length": [3, 0, 1, 2, 0]}, ["query_start", "sequence 3", "sequence 2", "9"]),
        ({"query_start": [0, 0, 2, 5, 0]}, ["query_start", "sequence 2", "sequence 0", "2", "3"]),
        ({"query_start": [0, 0, 0, 5, 0]}, ["query_start", "sequence 2", "sequence 0"]),
        ({"slot": [4, 4, 0, 16, 4]}, ["slot", "sequence 3", "16"]),
        ({"slot": [4, 4, 0, -1, 4]}, ["slot", "sequence 3", "-1", "16"]),
        ({"slot": [4, 99, 0, 15, 4]}, ["slot", "sequence 1", "99"]),
        ({"slot": [4, 0, 4, 15, 1]}, ["slot", "sequence 0", "sequence 2", "both 4"]),
        ({"slot": [4, 0, 4, 15, 1], "checkpoint_slot": None}, ["slot", "sequence 0", "sequence 2", "both 4"]),
        ({"checkpoint_slot": [[8, 9, 16], NONE, NONE, NONE, NONE]}, ["checkpoint_slot", "sequence 0", "16"]),
        ({"checkpoint_slot": [NONE, NONE, [-2, 1, 1], NONE, NONE]}, ["checkpoint_slot", "sequence 2", "-2"]),
        ({"checkpoint_slot": [[8, 9, 15], NONE, NONE, NONE, NONE]}, ["checkpoint_slot", "sequence 0", "sequence 3", "both 15"]),
        ({"checkpoint_slot": [[8, 9, 8], NONE, NONE, NONE, NONE]}, ["checkpoint_slot", "sequence 0", "both 8"]),
        ({"checkpoint_slot": [[8, 9, 7], NONE, [9, -1, -1], NONE, NONE]}, ["checkpoint_slot", "sequence 2", "both 9"]),
        ({"checkpoint_slot": [NONE, NONE, NONE, [1, 2, 3], NONE]}, ["query_length", "sequence 3", "27", "checkpoint_slot"]),
    ],
)
def test_bad_metadata_is_refused_by_name_and_value(changed, named):
    with pytest.raises(ValueError) as refused:
        check_metadata(**metadata(**changed))
    for text in named:
        assert text in str(refused.value)
