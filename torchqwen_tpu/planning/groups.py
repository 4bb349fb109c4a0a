"""Which devices a collective connects, and over which links."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np

from custom_ops.cost_model import Chip, Links
from torchqwen_tpu.planning.hlo import Instruction

_PAIRS = re.compile(r"source_target_pairs=\{([\d,{} ]*)\}")
_EVERYONE = re.compile(r"replica_groups=\{\}")
_LISTED = re.compile(r"replica_groups=\{\{([\d, ]+)\}")
_ORDER = r"[\d,]+|\[[\d,]+\](?:T\([\d,]+\))?"
_TILED = re.compile(rf"replica_groups=\[([\d,]+)\]<=({_ORDER})")
_MESH = re.compile(rf"replica_groups=mesh\[([^\]]+)\](?:, ?device_ids=\(({_ORDER})\))? ?\{{([^}}]*)\}}")
_AXIS = re.compile(r"([^,:=]+)(?::\((\d+)\)(\d+))?")

Places = Sequence[tuple[int, ...]]
"""Where on the torus each chip is, in the order of the devices."""


def links_of(instruction: Instruction, chip: Chip, places: Places) -> Links:
    """How the devices of a collective's first group are connected; device = core + cores * chip.

    Raises:
        ValueError: the devices are written in a way that is not known here.
    """
    group = _first_group(instruction.attributes, chip.cores * len(places))
    chips = sorted({device // chip.cores for device in group})
    extent = [len(set(axis)) for axis in zip(*(places[number] for number in chips), strict=True)]
    return Links(len(group), max(len(chips), 1), tuple(size for size in extent if size > 1))


def _first_group(attributes: str, devices: int) -> list[int]:
    """Devices of the first group in any of the ways in which XLA writes groups: all, listed, as an array's rows, or as axes of
    a mesh (what GSPMD inserts)."""
    if match := _PAIRS.search(attributes):
        pairs = [_integers(pair) for pair in re.findall(r"\d+,\d+", match[1])]
        return next((pair for pair in pairs if pair[0] != pair[1]), [0])
    if _EVERYONE.search(attributes):
        return list(range(devices))
    if match := _LISTED.search(attributes):
        return _integers(match[1])
    if match := _TILED.search(attributes):
        return _in_order(match[2]).reshape(_integers(match[1]))[0].tolist()
    if match := _MESH.search(attributes):
        return _over_axes(*match.groups())
    raise ValueError(f"the devices of a collective cannot be read from what the compiler wrote: {attributes[:200]}")


def _over_axes(axes: str, order: str | None, grouped: str) -> list[int]:
    """Devices of a mesh that differ from its first one along some of its axes.

    Args:
        axes: names and sizes, 'a'=4,'b'=2.
        order: of the devices, None where it is that of their numbers.
        grouped: names, each perhaps with the part that is meant: 'b':(2)4 is the middle one of 'b' as 2 × 4 × what remains.
    """
    sizes = {name: int(size) for name, size in (axis.strip().split("=") for axis in axes.split(","))}
    places = {name: [0] for name in sizes}
    for name, before, size in _AXIS.findall(grouped.replace(" ", "")):
        count = int(size or sizes[name])
        step = sizes[name] // (int(before or 1) * count)
        places[name] = [first + step * number for first in places[name] for number in range(count)]
    devices = _in_order(order or f"[{math.prod(sizes.values())}]").reshape(list(sizes.values()))
    return devices[np.ix_(*places.values())].ravel().tolist()


def _in_order(text: str) -> np.ndarray:
    """Devices as XLA writes their order: a list, or the sizes of an array of their numbers and how its axes are exchanged."""
    if not text.startswith("["):
        return np.array(_integers(text))
    sizes, _, exchanged = text.partition("T")
    sizes = _integers(sizes)
    devices = np.arange(math.prod(sizes)).reshape(sizes)
    return (devices.transpose(_integers(exchanged)) if exchanged else devices).ravel()


def _integers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
