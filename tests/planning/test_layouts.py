"""Layouts by name, and copies of key-value heads."""

from __future__ import annotations

import pytest
from support import moe_config

from torchqwen_tpu.parallel.mesh import DeviceMesh
from torchqwen_tpu.planning.layouts import key_value_copies, meshes, sized_name, with_copies


@pytest.mark.parametrize(
    "chips, cores, names",
    [
        (4, 2, ["dp8", "dp4tp2", "tp8"]), (1, 2, ["dp2", "tp2"]), (8, 1, ["dp8", "tp8"]), (1, 1, ["dp1"]),
        (64, 2, ["dp128", "dp64tp2", "tp128"]),
    ],
)  # fmt: skip
def test_names_of_all_layouts_that_differ(chips, cores, names):
    found = meshes("auto", chips, cores)
    assert [sized_name(mesh) for mesh in found] == names
    for mesh in found:
        assert meshes(sized_name(mesh), chips, cores) == [mesh]


def test_names_without_sizes():
    assert [mesh.layout for name in ("dp", "dp_tp", "tp") for mesh in meshes(name, 4, 2)] == ["dp", "dp_tp", "tp"]


def test_a_name_of_another_topology_says_which_there_are():
    with pytest.raises(ValueError, match="dp8, dp4tp2, tp8"):
        meshes("dp16", 4, 2)


@pytest.mark.parametrize("heads, copies", [(2, 4), (8, 1), (16, 1), (3, 1)])
def test_copies_of_key_value_heads(heads, copies):
    config = moe_config(num_attention_heads=48, num_key_value_heads=heads)
    assert key_value_copies(config, DeviceMesh(4, 2, "dp")) == 1
    assert key_value_copies(config, DeviceMesh(4, 2, "tp")) == copies
    own = with_copies(config, copies)
    assert own.num_key_value_heads == heads * copies and config.num_key_value_heads == heads
