"""On several devices a watch sees the numbers of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from watched import generate

from torchqwen_tpu import monitoring

pytestmark = pytest.mark.spmd


def test_four_devices_see_what_one_sees(small, small_folder, tmp_path):
    many, one = tmp_path / "many", tmp_path / "one"
    environment = {name: value for name, value in os.environ.items() if name != "CPU_NUM_DEVICES"}
    command = [sys.executable, str(Path(__file__).parent / "watched.py"), str(small_folder), str(many), "2", "2", "dp_tp"]
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-4000:]
    with monitoring.watch(small, stream=one):
        generate(small)
    many, one = ([json.loads(line) for line in path.read_text().splitlines()] for path in (many, one))
    assert [entry["kind"] for entry in many] == [entry["kind"] for entry in one]
    for sharded, whole in zip(many, one, strict=True):
        assert sharded["tokens"] == whole["tokens"]
        for found, expected in zip(sharded["layers"], whole["layers"], strict=True):
            for name in ("tokens", "busiest_expert", "busiest_share", "idle_experts"):
                assert found["router"][name] == expected["router"][name]
            assert found["router"]["entropy"] == pytest.approx(expected["router"]["entropy"], rel=1e-4)
            assert len(found["router"]["ranks"]) == 2 and found["router"]["device_imbalance"] >= 1
            if "gates" in expected:
                assert found["gates"] == pytest.approx(expected["gates"], rel=1e-4)
                norms = [sorted((state["position"], state["norm"]) for state in layer["states"]) for layer in (found, expected)]
                assert [pair[0] for pair in norms[0]] == [pair[0] for pair in norms[1]]
                assert [pair[1] for pair in norms[0]] == pytest.approx([pair[1] for pair in norms[1]], rel=1e-3)
            else:
                # Of one rank's queries and keys, and only those meet: never above that of all.
                bound = expected["attention"]["logit_bound"]
                assert found["attention"]["logit_max"] <= found["attention"]["logit_bound"] * (1 + 1e-4)
                assert 0 < found["attention"]["logit_bound"] <= bound * (1 + 1e-4)
