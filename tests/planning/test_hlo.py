"""Reading a scheduled module: shapes and padding, trip counts, bytes of fusions, equal programs, devices of collectives."""

from __future__ import annotations

import pytest

from custom_ops.cost_model import TPU7X
from torchqwen_tpu.planning.groups import links_of
from torchqwen_tpu.planning.hlo import arrays_of, parse, trip_count
from torchqwen_tpu.planning.traffic import ProgramKeys, hbm_bytes

MODULE = """HloModule toy, is_scheduled=true

%sliced (param_0: f32[16,8,128], param_1: s32[]) -> f32[8,128] {
  %param_0 = f32[16,8,128]{2,1,0:T(8,128)} parameter(0)
  %param_1 = s32[]{:T(128)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %slice = f32[1,8,128]{2,1,0:T(8,128)} dynamic-slice(%param_0, %param_1, %zero, %zero), dynamic_slice_sizes={1,8,128}
  ROOT %flat = f32[8,128]{1,0:T(8,128)} bitcast(%slice)
}

%sliced.clone (other_0: f32[16,8,128], other_1: s32[]) -> f32[8,128] {
  %other_0 = f32[16,8,128]{2,1,0:T(8,128)} parameter(0)
  %other_1 = s32[]{:T(128)} parameter(1)
  %nought = s32[]{:T(128)} constant(0)
  %piece = f32[1,8,128]{2,1,0:T(8,128)} dynamic-slice(%other_0, %other_1, %nought, %nought), dynamic_slice_sizes={1,8,128}
  ROOT %even = f32[8,128]{1,0:T(8,128)} bitcast(%piece)
}

%updated (param_0.1: f32[16,8,128], param_1.1: f32[1,8,128], param_2.1: s32[]) -> f32[16,8,128] {
  %param_0.1 = f32[16,8,128]{2,1,0:T(8,128)} parameter(0)
  %param_1.1 = f32[1,8,128]{2,1,0:T(8,128)} parameter(1)
  %param_2.1 = s32[]{:T(128)} parameter(2)
  %zero.1 = s32[]{:T(128)} constant(0)
  ROOT %dus = f32[16,8,128]{2,1,0:T(8,128)} dynamic-update-slice(%param_0.1, %param_1.1, %param_2.1, %zero.1, %zero.1)
}

%condition (carry: (s32[], s32[], f32[16,8,128])) -> pred[] {
  %carry = (s32[]{:T(128)}, s32[]{:T(128)}, f32[16,8,128]{2,1,0:T(8,128)}) parameter(0)
  %count = s32[]{:T(128)} get-tuple-element(%carry), index=0
  %limit = s32[]{:T(128)} constant(16)
  ROOT %less = pred[]{:T(512)} compare(%count, %limit), direction=LT
}

%condition_of_data (carry.1: (s32[], s32[], f32[16,8,128])) -> pred[] {
  %carry.1 = (s32[]{:T(128)}, s32[]{:T(128)}, f32[16,8,128]{2,1,0:T(8,128)}) parameter(0)
  %count.1 = s32[]{:T(128)} get-tuple-element(%carry.1), index=0
  %limit.1 = s32[]{:T(128)} get-tuple-element(%carry.1), index=1
  ROOT %less.1 = pred[]{:T(512)} compare(%count.1, %limit.1), direction=LT
}

%body (carry.2: (s32[], s32[], f32[16,8,128])) -> (s32[], s32[], f32[16,8,128]) {
  %carry.2 = (s32[]{:T(128)}, s32[]{:T(128)}, f32[16,8,128]{2,1,0:T(8,128)}) parameter(0)
  %count.2 = s32[]{:T(128)} get-tuple-element(%carry.2), index=0
  %limit.2 = s32[]{:T(128)} get-tuple-element(%carry.2), index=1
  %rows.2 = f32[16,8,128]{2,1,0:T(8,128)} get-tuple-element(%carry.2), index=2
  ROOT %next = (s32[]{:T(128)}, s32[]{:T(128)}, f32[16,8,128]{2,1,0:T(8,128)}) tuple(%count.2, %limit.2, %rows.2)
}

ENTRY %main (rows: f32[16,8,128], index: s32[], bound: s32[]) -> f32[16,8,128] {
  %rows = f32[16,8,128]{2,1,0:T(8,128)} parameter(0)
  %index = s32[]{:T(128)} parameter(1)
  %bound = s32[]{:T(128)} parameter(2)
  %seven = s32[]{:T(128)} constant(7)
  %start = s32[]{:T(128)} constant(0)
  %one = f32[8,128]{1,0:T(8,128)S(1)} fusion(%rows, %index), kind=kLoop, calls=%sliced
  %two = f32[8,128]{1,0:T(8,128)S(1)} fusion(%rows, %index), kind=kLoop, calls=%sliced.clone
  %row = f32[1,8,128]{2,1,0:T(8,128)S(1)} bitcast(%one)
  %three = f32[16,8,128]{2,1,0:T(8,128)} fusion(%rows, %row, %index), kind=kLoop, calls=%updated
  %known.carry = (s32[]{:T(128)}, s32[]{:T(128)}, f32[16,8,128]{2,1,0:T(8,128)}) tuple(%start, %bound, %three)
  %known = (s32[]{:T(128)}, s32[]{:T(128)}, f32[16,8,128]{2,1,0:T(8,128)}) while(%known.carry), condition=%condition, body=%body
  %data = (s32[]{:T(128)}, s32[]{:T(128)}, f32[16,8,128]{2,1,0:T(8,128)}) while(%known.carry), condition=%condition_of_data, body=%body
  %fixed.carry = (s32[]{:T(128)}, s32[]{:T(128)}, f32[16,8,128]{2,1,0:T(8,128)}) tuple(%start, %seven, %three)
  %fixed = (s32[]{:T(128)}, s32[]{:T(128)}, f32[16,8,128]{2,1,0:T(8,128)}) while(%fixed.carry), condition=%condition_of_data, body=%body
  %noted = (s32[]{:T(128)}, s32[]{:T(128)}, f32[16,8,128]{2,1,0:T(8,128)}) while(%known.carry), condition=%condition_of_data, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %last = f32[16,8,128]{2,1,0:T(8,128)} get-tuple-element(%fixed), index=2
}
"""  # noqa: E501
ROW = 8 * 128 * 4


@pytest.fixture(scope="module")
def module():
    return parse(MODULE)


@pytest.mark.parametrize(
    "shape, size, in_hbm",
    [
        ("bf16[8,128]{1,0:T(8,128)(2,1)}", 8 * 128 * 2, True),
        ("f32[3,130]{1,0:T(8,128)}", 8 * 256 * 4, True),
        ("f32[3,130]{0,1:T(8,128)}", 136 * 128 * 4, True),
        ("f8e4m3fn[64,256]{1,0:T(8,128)(4,1)S(1)}", 64 * 256, False),
        ("pred[]", 1, True),
        ("s32[100]{0:T(128)}", 400, True),
    ],
)
def test_bytes_of_an_array(shape, size, in_hbm):
    (array,) = arrays_of(shape)
    assert (array.bytes, array.in_hbm) == (size, in_hbm)


def test_a_tuple_is_its_arrays_and_tokens_take_nothing():
    assert [array.dims for array in arrays_of("(f32[2]{0}, (token[], u8[3,4]{1,0}))")] == [(2,), (3, 4)]


@pytest.mark.parametrize("loop, turns", [("known", 16), ("data", None), ("fixed", 7), ("noted", 3)])
def test_turns_of_a_loop(module, loop, turns):
    assert trip_count(module, module.entry, module.entry.by_name[loop]) == turns


def test_a_fusion_reads_the_slice_that_it_takes(module):
    assert hbm_bytes(module, module.entry, module.entry.by_name["one"]) == ROW


def test_an_update_in_place_writes_only_the_update(module):
    assert hbm_bytes(module, module.entry, module.entry.by_name["three"]) == ROW


def test_programs_that_differ_in_names_are_one(module):
    keys = ProgramKeys(module)
    one, two, three = (keys.key(module.entry, module.entry.by_name[name]) for name in ("one", "two", "three"))
    assert one == two != three


def test_no_entry():
    with pytest.raises(ValueError, match="entry"):
        parse("HloModule nothing\n")


@pytest.mark.parametrize(
    "groups, devices, dimensions",
    [
        ("replica_groups={{0,1,2,3,4,5,6,7}}", 8, (2, 2)),
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", 2, ()),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", 4, (2, 2)),
        ("replica_groups=[1,8]<=[8]", 8, (2, 2)),
        ("replica_groups={}", 8, (2, 2)),
        ("replica_groups=mesh['axis_0'=1,'axis_1'=8] {'axis_1'}", 8, (2, 2)),
        ("replica_groups=mesh['chip'=4,'core'=2] {'core'}", 2, ()),
        ("replica_groups=mesh[chip=4,core=2] {chip}", 4, (2, 2)),
        ("replica_groups=mesh['all'=8] {'all':(2)2}", 2, (2,)),
        ("replica_groups=mesh['all'=8] {'all':(1)2,'all':(4)2}", 4, (2,)),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}", 2, ()),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=(0,2,1,3,4,6,5,7) {'b'}", 2, (2,)),
        ("source_target_pairs={{0,2},{2,0}}", 2, (2,)),
    ],
)
def test_devices_of_a_collective(module, groups, devices, dimensions):
    instruction = module.entry.by_name["one"]
    gather = type(instruction)("g", "all-gather", "f32[8]", (), f", {groups}, metadata={{}}", "")
    links = links_of(gather, TPU7X, [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)])
    assert (links.devices, links.dimensions) == (devices, dimensions)


def test_groups_that_cannot_be_read_are_an_error(module):
    instruction = module.entry.by_name["one"]
    gather = type(instruction)("g", "all-gather", "f32[8]", (), ", replica_groups=ring(8), metadata={}", "")
    with pytest.raises(ValueError, match=r"ring\(8\)"):
        links_of(gather, TPU7X, [(0, 0, 0)])
