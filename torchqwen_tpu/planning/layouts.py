"""Names of layouts on a topology, and what a layout asks of a model that has few key-value heads."""

from __future__ import annotations

import copy
import re

from transformers import PretrainedConfig

from torchqwen_tpu.config import LAYOUTS
from torchqwen_tpu.parallel.mesh import DeviceMesh

AUTO = "auto"
_NAMED = re.compile(r"dp\d+|dp\d+tp\d+|tp\d+")


def is_layout(name: str) -> bool:
    """Whether this is a layout's name: 'dp', 'dp_tp', 'tp', or with its sizes: 'dp8', 'dp4tp2', 'tp8'; or 'auto'."""
    return name in (*LAYOUTS, AUTO) or _NAMED.fullmatch(name) is not None


def sized_name(mesh: DeviceMesh) -> str:
    """A layout's name with its sizes: data-parallel ranks, and devices that share a rank's heads."""
    ranks, shares = mesh.ranks, mesh.devices // mesh.ranks
    if shares == 1:
        return f"dp{ranks}"
    return f"tp{shares}" if ranks == 1 else f"dp{ranks}tp{shares}"


def meshes(name: str, chips: int, cores: int) -> list[DeviceMesh]:
    """The layouts that a name stands for on chips × cores: one, or for 'auto' all that differ.

    Raises:
        ValueError: a name with sizes that are not those of this topology; it says which are.
    """
    all_of = [DeviceMesh(chips, cores, layout) for layout in LAYOUTS]
    if name in LAYOUTS:
        return [mesh for mesh in all_of if mesh.layout == name]
    different = list({sized_name(mesh): mesh for mesh in reversed(all_of)}.values())[::-1]
    if name == AUTO:
        return different
    chosen = [mesh for mesh in different if sized_name(mesh) == name]
    if not chosen:
        sizes = ", ".join(sized_name(mesh) for mesh in different)
        raise ValueError(f"{name} is no layout of {chips} chips × {cores} cores; there are {sizes}")
    return chosen


def key_value_copies(config: PretrainedConfig, mesh: DeviceMesh) -> int:
    """Devices that have to keep a key-value head each for themselves: 1 where heads divide, more where a layout splits a
    layer's heads over more devices than it has key-value heads."""
    shards, heads = mesh.shards("heads"), config.get_text_config().num_key_value_heads
    return shards // heads if shards > heads and shards % heads == 0 else 1


def with_copies(config: PretrainedConfig, copies: int) -> PretrainedConfig:
    """The model with every key-value head `copies` times: the same function, each copy serving a part of the query heads."""
    if copies == 1:
        return config
    config = copy.deepcopy(config)
    config.get_text_config().num_key_value_heads *= copies
    return config
