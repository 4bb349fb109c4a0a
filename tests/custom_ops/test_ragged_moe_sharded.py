"""Mixture of experts over eight devices (4 chips × 2 cores) in every layout, against one device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def answers():
    """What `sharded_moe.py` prints."""
    settings = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
    }
    script = Path(__file__).with_name("sharded_moe.py")
    done = subprocess.run(
        [sys.executable, script], env={**os.environ, **settings}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def errors(answers):
    """By 'implementation layout case': the largest relative error, and whether a row of no token got something."""
    return answers["errors"]


@pytest.mark.parametrize("case", ["uniform", "skewed", "empty ranks", "one expert"])
@pytest.mark.parametrize("layout", ["dp", "dp_tp", "tp"])
def test_eight_devices_equal_one(errors, layout, case):
    error, leaked = errors[f"xla {layout} {case}"]
    assert error <= 1e-5 and not leaked


@pytest.mark.parametrize("layout", ["dp", "dp_tp", "tp"])
def test_reference_is_sharded_the_same_way(errors, layout):
    assert max(error for name, (error, _) in errors.items() if name.startswith(f"reference {layout} ")) <= 1e-5


@pytest.mark.parametrize("layout", ["dp", "dp_tp", "tp"])
@pytest.mark.parametrize(
    "wire, bound",
    [
        ("bfloat16", 4e-3), ("float8_e4m3fn", 4e-2), ("float8_e4m3fn in blocks", 4e-2), ("int8", 1.2e-2),
        ("int8 in blocks", 1.2e-2), ("int8 and BF16", 1.2e-2),
    ],
)
def test_wires(answers, wire, bound, layout):
    """Whatever the routing, against rows of float32 and the same weights."""
    errors = answers["wires"][f"{wire} {layout}"]
    assert len(errors) == 4 and all(0 < error <= bound for error in errors.values())


@pytest.mark.parametrize("layout", ["dp", "dp_tp", "tp"])
def test_micro_batches_give_the_same(answers, layout):
    assert answers["micro-batches"][layout] <= 1e-5


@pytest.mark.parametrize("layout", ["dp", "dp_tp", "tp"])
def test_what_is_not_finite_stays_so_and_with_its_token(answers, layout):
    poisoned, others_untouched = answers["not finite"][layout]
    assert poisoned and others_untouched
