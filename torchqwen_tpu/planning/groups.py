"""Which devices a collective connects, and over which links."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from custom_ops.cost_model import Chip, Links
from torchqwen_tpu.planning.hlo import Instruction

_GROUPS = re.compile(r"replica_groups=(\{\{[\d,{} ]*\}\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)")
_PAIRS = re.compile(r"source_target_pairs=\{([\d,{} ]*)\}")


Places = Sequence[tuple[int, ...]]
"""Where on the torus each chip is, in the order of the devices."""


def links_of(instruction: Instruction, chip: Chip, places: Places) -> Links:
    """How the devices of a collective's first group are connected; device = core + cores * chip."""
    group = _first_group(instruction.attributes)
    chips = sorted({device // chip.cores for device in group})
    extent = [len(set(axis)) for axis in zip(*(places[number] for number in chips), strict=True)]
    return Links(len(group), max(len(chips), 1), tuple(size for size in extent if size > 1))


def _first_group(attributes: str) -> list[int]:
    if match := _PAIRS.search(attributes):
        pairs = [list(map(int, pair.split(","))) for pair in re.findall(r"\{(\d+,\d+)\}", "{" + match[1] + "}")]
        return next((pair for pair in pairs if pair[0] != pair[1]), [0])
    match = _GROUPS.search(attributes)
    if not match:
        return [0]
    text = match[1]
    if text.startswith("{"):
        return [int(number) for number in text[2:].split("}")[0].split(",") if number.strip()]
    shape, _, rest = text.partition("<=")
    sizes, order = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", rest).groups()
    devices = np.arange(np.prod(list(map(int, sizes.split(","))))).reshape(list(map(int, sizes.split(","))))
    if order:
        devices = devices.transpose(list(map(int, order.split(","))))
    return devices.reshape(list(map(int, shape.strip("[]").split(","))))[0].tolist()
