"""Every example prints what its docstring says."""

from __future__ import annotations

import ast
import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
MARK = "Expected output:\n\n"


def expected(file: Path) -> list[str]:
    """Lines of the output, as the docstring gives them."""
    return _lines(ast.get_docstring(ast.parse(file.read_text())).split(MARK)[1])


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def test_every_example_is_run():
    names = {file.stem for file in EXAMPLES.glob("*.py")}
    assert names == {"generate", "chat", "batch_two_turns", "spmd_eight_devices", "score", "inspect_next_line"}


@pytest.mark.parametrize(
    "command",
    [["generate.py"], ["chat.py"], ["batch_two_turns.py"], ["spmd_eight_devices.py", "one"], ["score.py"]],
    ids=" ".join,
)
def test_output_is_as_documented(command, monkeypatch, capsys):
    """As the main module of this process, where one example's graphs are the next one's too."""
    monkeypatch.setattr(sys, "argv", command)
    runpy.run_path(str(EXAMPLES / command[0]), run_name="__main__")
    assert _lines(capsys.readouterr().out) == expected(EXAMPLES / command[0])


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["spmd_eight_devices.py"], marks=pytest.mark.spmd),
        pytest.param(["spmd_eight_devices.py", "dp_tp"], marks=[pytest.mark.spmd, pytest.mark.slow]),
        pytest.param(["inspect_next_line.py"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_output_of_a_process_of_its_own(command):
    if command[0] == "inspect_next_line.py" and importlib.util.find_spec("inspect_ai") is None:
        pytest.skip("inspect-ai is not installed")
    # The number of virtual devices may be left over from another test of this process.
    environment = {name: value for name, value in os.environ.items() if name != "CPU_NUM_DEVICES"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    result = subprocess.run(
        [sys.executable, EXAMPLES / command[0], *command[1:]],
        env=environment, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert _lines(result.stdout) == expected(EXAMPLES / command[0])
