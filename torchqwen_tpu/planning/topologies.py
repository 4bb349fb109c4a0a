"""Topologies that a plan can be for: the chips of the cost model, in sizes that the TPU compiler takes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from custom_ops.cost_model import CHIPS, Chip
from custom_ops.tpu_compiler import topology
from torchqwen_tpu.planning.groups import Places

_SQUARE = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBIC = ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")
SIZES = {"tpu7x": _CUBIC, "v6e": _SQUARE, "v5e": _SQUARE, "v5p": _CUBIC}
"""Chips along each axis of the slices of each chip. The compiler takes any multiple of a host's chips."""


@dataclass(frozen=True)
class Topology:
    """A slice: where each of its chips is, in the order of the compiler's devices."""

    chip: Chip
    places: Places

    @property
    def chips(self) -> int:
        return len(self.places)


def find_topology(name: str) -> Topology:
    """The topology that the compiler knows by this name.

    Raises:
        ValueError: it knows none, or the cost model does not know its chip; the message lists those there are.
        TpuCompilerMissing: libtpu is not installed.
    """
    try:
        devices = topology(name).devices
    except ValueError as error:
        raise ValueError(f"{error}; it takes {', '.join(known())} and other multiples of a host's chips") from error
    kind = devices[0].device_kind
    if kind not in CHIPS:
        raise ValueError(f"the cost model does not know {kind}; it knows those of {', '.join(known())}")
    chip = CHIPS[kind]
    return Topology(chip, tuple(tuple(device.coords) for device in devices[:: chip.cores]))


def known() -> Iterator[str]:
    """Names that the compiler takes, of the chips that the cost model knows."""
    for chip in CHIPS.values():
        for size in SIZES[chip.name]:
            try:
                topology(f"{chip.name}:{size}")
            except ValueError:
                continue
            yield f"{chip.name}:{size}"


def larger(name: str, chip: Chip) -> Iterator[tuple[str, int]]:
    """Slices of the same chip with more chips than `name` has, and how many, the smallest first."""
    own = _count(name.partition(":")[2])
    for size in SIZES[chip.name]:
        if _count(size) > own:
            yield f"{chip.name}:{size}", _count(size)


def _count(size: str) -> int:
    return math.prod(int(length) for length in size.split("x"))
