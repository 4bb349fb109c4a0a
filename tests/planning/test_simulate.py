"""The schedule played: what overlaps, what waits, loops, and kernels whose loops depend on data."""

from __future__ import annotations

import pytest

from custom_ops.cost_model import HBM_LATENCY, TPU7X
from custom_ops.schedule.bundles import Loop
from torchqwen_tpu.planning.hlo import parse
from torchqwen_tpu.planning.programs import Programs
from torchqwen_tpu.planning.simulate import Player

BIG = 64 << 20
HEADER = """HloModule toy, is_scheduled=true

%half (p: f32[4096,4096]) -> f32[4096,4096] {
  %p = f32[4096,4096]{1,0:T(8,128)} parameter(0)
  ROOT %n = f32[4096,4096]{1,0:T(8,128)S(1)} negate(%p)
}

%condition (c: (s32[], f32[4096,4096])) -> pred[] {
  %c = (s32[]{:T(128)}, f32[4096,4096]{1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%c), index=0
  %limit = s32[]{:T(128)} constant(TURNS)
  ROOT %less = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

%body (c.1: (s32[], f32[4096,4096])) -> (s32[], f32[4096,4096]) {
  %c.1 = (s32[]{:T(128)}, f32[4096,4096]{1,0:T(8,128)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%c.1), index=0
  %a = f32[4096,4096]{1,0:T(8,128)} get-tuple-element(%c.1), index=1
  %work = f32[4096,4096]{1,0:T(8,128)S(1)} fusion(%a), kind=kLoop, calls=%half
  ROOT %t = (s32[]{:T(128)}, f32[4096,4096]{1,0:T(8,128)}) tuple(%i.1, %a)
}

ENTRY %main (x: f32[4096,4096]) -> f32[4096,4096] {
  %x = f32[4096,4096]{1,0:T(8,128)} parameter(0)
"""
LOOP = """  %zero = s32[]{:T(128)} constant(0)
  %carry = (s32[]{:T(128)}, f32[4096,4096]{1,0:T(8,128)}) tuple(%zero, %x)
  ROOT %loop = (s32[]{:T(128)}, f32[4096,4096]{1,0:T(8,128)}) while(%carry), condition=%condition, body=%body
}
"""
READ = BIG / TPU7X.hbm_bandwidth


def play(body: str, schedules=None, trips=lambda loop, path: None, kernel_trips=lambda name, loop: None, turns: int = 1):
    module = parse(HEADER.replace("TURNS", str(turns)) + body)
    label = lambda module, computation, instruction: instruction.name.rstrip("0123456789")  # noqa: E731
    nothing = lambda *arguments: None  # noqa: E731
    programs = Programs(module, schedules or {}, kernel_trips, nothing)
    return Player(module, programs, TPU7X, [(0, 0, 0)], label, trips, nothing).play()


@pytest.mark.parametrize("turns", [1, 2, 60])
def test_a_loop_takes_its_body_times_its_turns(turns):
    result = play(LOOP, turns=turns)
    assert result.costs["work"].runs == turns
    assert result.costs["work"].bytes == turns * BIG
    assert result.seconds == pytest.approx(turns * (READ + HBM_LATENCY))
    assert result.costs["work"].bound == "HBM"


def test_bundles_decide_where_they_take_longer():
    schedules = {"work": Loop(0, 9, own=1_000_000)}
    result = play(LOOP, schedules, turns=3)
    assert result.seconds == pytest.approx(3 * 1_000_000 / TPU7X.clock)
    assert result.costs["work"].bound == "bundles" and result.costs["work"].cycles == 3_000_000


def test_loops_of_a_program_whose_bound_is_data():
    program = Loop(0, 99, own=10, inner=[Loop(1, 50, own=1000, steps=None)])
    schedules = {"work": program}
    known = play(LOOP, schedules, kernel_trips=lambda name, loop: 500 if loop.steps is None else None)
    assert known.costs["work"].cycles == 500_010
    # Without a count XLA's estimate stands for it; this instruction has none.
    assert play(LOOP, schedules).costs["work"].cycles == 0


def test_a_program_runs_once_whatever_is_said_of_its_loops():
    nested = Loop(0, 99, own=10, inner=[Loop(1, 50, own=20, steps=None, inner=[Loop(2, 9, own=30, steps=None)])])
    result = play(LOOP, {"work": nested}, kernel_trips=lambda name, loop: 8 if loop.inner else 2)
    assert result.costs["work"].cycles == 10 + 8 * (20 + 2 * 30)


PREFETCH = """  %ahead = (f32[4096,4096]{1,0:T(8,128)S(1)}, f32[4096,4096]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%x)
  %busy = f32[8,128]{1,0:T(8,128)S(1)} custom-call(), custom_call_target="tpu_custom_call"
  %there = f32[4096,4096]{1,0:T(8,128)S(1)} copy-done(%ahead)
  ROOT %work2 = f32[4096,4096]{1,0:T(8,128)S(1)} fusion(%there), kind=kLoop, calls=%half
}
"""


@pytest.mark.parametrize("bundles", [10, 10_000_000])
def test_a_prefetch_runs_beside_the_core(bundles):
    result = play(PREFETCH, {"busy": Loop(0, 9, own=bundles)})
    assert result.seconds == pytest.approx(max(bundles / TPU7X.clock, READ + HBM_LATENCY))
    waited = result.costs["wait for prefetch"].waiting
    assert waited == pytest.approx(max(READ + HBM_LATENCY - bundles / TPU7X.clock, 0))


def test_loops_that_nothing_is_known_of_are_named():
    assert not play(LOOP).unknown_loops
    body = LOOP.replace("condition=%condition", "condition=%other") + """
%other (d: (s32[], f32[4096,4096])) -> pred[] {
  %d = (s32[]{:T(128)}, f32[4096,4096]{1,0:T(8,128)}) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%d), index=0
  ROOT %lt = pred[]{:T(512)} compare(%j, %j), direction=LT
}
"""
    assert play(body).unknown_loops == {"loop"}
    assert play(body, trips=lambda loop, path: 5).costs["work"].runs == 5
