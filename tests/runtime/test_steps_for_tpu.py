"""Steps of 397B-A17B for a machine of Ironwood, by the TPU compiler: they fit, no cache is copied, no layer is unrolled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HBM = 96 * 2**30
"""Bytes of a core."""


@pytest.mark.spmd
@pytest.mark.parametrize(
    "kind, kernel",
    [
        pytest.param("decode", "gated_delta_net_decode", marks=pytest.mark.slow),
        pytest.param("mixed", "gated_delta_net_chunk", marks=pytest.mark.long),
    ],
)
def test_steps_of_397b(kind, kernel):
    settings = {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": "8",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(Path(__file__).with_name("steps_for_tpu.py")), kind]
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    step = json.loads(done.stdout.splitlines()[-1])
    assert step["argument bytes"] + step["temporary bytes"] < HBM
    assert step["aliased bytes"] >= step["state bytes"]
    assert step["copies"] == []
    assert step["inputs"] < 100
    assert step["kernels"][kernel] == 3  # of the 45 layers the three of a period
    assert step["kernels"]["attention_decode"] == 1
