"""Kernels that communicate, in JAX's TPU interpreter: cases run in a process of as many CPU devices as they need."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

ROOT = Path(__file__).parents[2]
# By default the detector tells about as many DMAs apart as there are devices, and takes others for ordered.
SIMULATOR = pltpu.InterpretParams(detect_races=True, vector_clock_size=256)


def simulate(script: str, cases: dict[str, dict], name: str) -> dict:
    """What came of a case; all of a table are run by `script [case, ...]`, beside this file, in one process, once."""
    return dict(zip(cases, _simulate(script, json.dumps(list(cases.values()))), strict=True))[name]


@functools.cache
def _simulate(script: str, cases: str) -> list[dict]:
    devices = 2 * max(case["chips"] for case in json.loads(cases))
    settings = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        # Threads of XLA's client: the devices wait for each other in callbacks, and copying a large argument of a callback
        # takes a thread of its own, so with few cores they would wait forever.
        "NPROC": "64",
    }
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name(script), cases], env={**os.environ, **settings}, capture_output=True,
        text=True, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@contextlib.contextmanager
def watched() -> Iterator[list]:
    """The detector's states, one for each call of a kernel inside: `races_found`."""
    states, detector = [], interpreter.RaceDetectionState

    def recorded(**arguments):
        states.append(detector(**arguments))
        return states[-1]

    with mock.patch.object(interpreter, "RaceDetectionState", recorded):
        yield states
