"""Which implementation runs where."""

from __future__ import annotations

import pytest

from custom_ops import implementations
from custom_ops.gated_delta_net import GatedDeltaNetShape
from custom_ops.implementations import IMPLEMENTATIONS, implementation

WIDE, TINY = GatedDeltaNetShape(16, 64, 128, 128), GatedDeltaNetShape(2, 8, 64, 64)


@pytest.fixture
def chosen(monkeypatch):
    """(platform, override, shape) → which implementation of Gated DeltaNet is called, and with which keywords."""

    def named(name):
        return lambda **static: (name, static)

    monkeypatch.setitem(IMPLEMENTATIONS, "gated_delta_net", {name: named(name) for name in IMPLEMENTATIONS["gated_delta_net"]})
    return lambda platform, override, shape: implementation("gated_delta_net", platform, override)(shape=shape)


@pytest.mark.parametrize(
    ("platform", "override", "shape", "name"),
    [
        ("cpu", None, WIDE, "xla"),
        ("cpu", None, TINY, "xla"),
        ("tpu", None, WIDE, "pallas_tpu"),
        ("tpu", None, TINY, "xla"),
        ("tpu", "xla", WIDE, "xla"),
        ("cpu", "reference", TINY, "reference"),
    ],
)
def test_choice_by_platform_shape_and_override(chosen, platform, override, shape, name):
    assert chosen(platform, override, shape) == (name, {"shape": shape})


def test_pallas_is_interpreted_where_there_is_no_tpu(chosen):
    assert chosen("cpu", "pallas_tpu", WIDE) == ("pallas_tpu", {"shape": WIDE, "interpret": True})
    assert chosen("tpu", "pallas_tpu", WIDE) == ("pallas_tpu", {"shape": WIDE})


def test_an_override_that_does_not_take_the_shape_is_refused(chosen):
    with pytest.raises(ValueError, match="pallas_tpu.*key_dim=64"):
        chosen("cpu", "pallas_tpu", TINY)


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
def test_unknown_names_are_refused_with_those_there_are(op):
    with pytest.raises(ValueError, match="'fast'.*reference, xla"):
        implementation(op, "cpu", "fast")


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize("platform", implementations.PREFERRED)
def test_every_operation_has_an_implementation_for_every_platform(op, platform):
    assert callable(implementation(op, platform))
