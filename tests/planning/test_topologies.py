"""Slices that the TPU compiler knows."""

from __future__ import annotations

import pytest

pytest.importorskip("libtpu")

from custom_ops.cost_model import CHIPS  # noqa: E402
from torchqwen_tpu.planning.topologies import find_topology, known, larger  # noqa: E402


@pytest.mark.parametrize(
    "name, chips, cores",
    [
        ("tpu7x:1x1x1", 1, 2), ("tpu7x:2x2x1", 4, 2), ("tpu7x:4x4x4", 64, 2), ("v5e:2x4", 8, 1), ("v6e:1x1", 1, 1),
        ("v5p:2x2x2", 8, 1),
    ],
)  # fmt: skip
def test_chips_and_their_places(name, chips, cores):
    found = find_topology(name)
    assert (found.chips, found.chip.cores) == (chips, cores) and name.startswith(found.chip.name)
    assert len(set(found.places)) == chips


@pytest.mark.parametrize(
    "name, message",
    [("tpu99:2x2", "tpu7x:4x4x4"), ("tpu7x:3x1x1", "v6e:2x4"), ("v4:2x2x1", "tpu7x"), ("", "v5e:2x4")],
)
def test_unknown_names_list_those_there_are(name, message):
    with pytest.raises(ValueError, match=message):
        find_topology(name)


def test_every_chip_of_the_cost_model_has_slices():
    names = list(known())
    assert {name.partition(":")[0] for name in names} == {chip.name for chip in CHIPS.values()}
    assert all(find_topology(name) for name in names)


def test_larger_slices_come_smallest_first():
    assert next(larger("v6e:2x4", CHIPS["TPU v6 lite"])) == ("v6e:4x4", 16)
    assert not list(larger("tpu7x:16x16x16", CHIPS["TPU7x"]))
