"""What a decode call costs the host: arguments do not grow with the depth of scanned layers."""

from __future__ import annotations

import json

import pytest

from torchqwen_tpu.cli import main
from torchqwen_tpu.host_benchmark import measure_host


@pytest.fixture(scope="module")
def scanned():
    return {layers: measure_host(layers, sequences=2, scan_layers=True, calls=3) for layers in (8, 16)}


def test_arguments_do_not_grow_with_depth(scanned):
    assert scanned[8].arguments == scanned[16].arguments < 100


def test_times(scanned):
    for time in scanned.values():
        assert 0 < time.host < time.call < time.first_call


def test_on_the_command_line(capsys):
    options = ["--layers", "4", "--sequences", "2", "--calls", "1", "--forms", "unrolled", "--json"]
    assert not main(["bench", "host", *options])
    report = json.loads(capsys.readouterr().out)
    assert report["unrolled"]["arguments"] > 4 * 10
