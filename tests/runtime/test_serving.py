"""Random load on one and on eight devices, under every layout: each request gets what it would get alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from serving import RUNTIME, is_empty, load, serve
from support import moe_config, save_random

import torchqwen_tpu
from torchqwen_tpu import Engine, EngineConfig
from torchqwen_tpu.runtime.graph import compilations

SCRIPT = Path(__file__).parent / "serving.py"
MESHES = {"dp": (4, 2, "dp"), "dp_tp": (4, 2, "dp_tp"), "tp": (4, 2, "tp")}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8, "linear_num_key_heads": 8, "linear_num_value_heads": 8}
FULL_LOAD = {"count": 200, "longest": 900, "most_new": 120}
ENGINES = {
    "all pages": {"max_sequences": 16, "token_budget": 256},
    # A request of 1,020 tokens takes 64 pages, and sixteen, eight or two at once share what a rank has.
    "a third of the pages": {"max_sequences": 16, "token_budget": 256, "pages": 64},
}


def run(folder: Path, mesh: tuple[int, int, str], load: dict, engine: dict, *options) -> dict:
    """What `serving.py` reports, from a process of its own."""
    chips, cores, layout = map(str, mesh)
    environment = {name: value for name, value in os.environ.items() if name != "CPU_NUM_DEVICES"}
    command = [sys.executable, SCRIPT, folder, "--chips", chips, "--cores", cores, "--layout", layout]
    command += ["--load", json.dumps(load), "--engine", json.dumps(engine), *options]
    process = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads(process.stdout)


@pytest.mark.spmd
def test_four_ranks_of_two_cores(small_folder):
    """Quick: 30 short requests over four ranks of two slots, pages for one long request each."""
    small_load, sizes = {"count": 30, "longest": 120, "most_new": 40}, {"max_sequences": 8, "token_budget": 64, "pages": 10}
    result = run(small_folder, (4, 2, "dp_tp"), small_load, {**sizes, "max_length": 160}, "--aborts", "7")
    assert result["wrong"] == [] and result["empty"] and result["compilations"] == 0 and result["aborted"] > 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model whose heads eight devices share, with room for 2,048 tokens."""
    return save_random(moe_config(**HEADS, max_position_embeddings=2048), tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def answers(folder, tmp_path_factory) -> Path:
    """The full load on one device, each request alone."""
    result = run(folder, (1, 1, "dp"), FULL_LOAD, ENGINES["all pages"])
    assert result["wrong"] == [] and result["empty"] and result["compilations"] == 0
    path = tmp_path_factory.mktemp("answers") / "alone.json"
    path.write_text(json.dumps(result["alone"]))
    return path


@pytest.mark.long
@pytest.mark.spmd
@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("mesh", [(1, 1, "dp"), *MESHES.values()], ids=["one device", *MESHES])
def test_full_load(folder, answers, mesh, engine):
    """200 requests of 1 to 900 tokens with 1 to 120 new ones; where pages are few, some are aborted as well."""
    few = "pages" in engine
    result = run(folder, mesh, FULL_LOAD, engine, "--expected", answers, *(["--aborts", "9"] if few else []))
    assert result["wrong"] == [] and result["empty"] and result["compilations"] == 0
    assert result["run alone"] <= 20  # a rounding apart at most
    if few:
        assert result["aborted"] > 0 and (result["preemptions"] > 0 or mesh[2] == "dp")


@pytest.mark.long
def test_soak(small_folder, soak_seconds):
    """Random load for a while: no growth in memory, no compilation, no wrong answer, nothing left in the pools."""
    model = torchqwen_tpu.AutoModelForCausalLM.from_pretrained(small_folder, dtype="float32", runtime=RUNTIME)
    engine = Engine(model, EngineConfig(max_sequences=8, token_budget=64, pages=24))
    prompts, params = load(60, longest=150, most_new=60)
    torch.manual_seed(0)

    def round_of(number: int):
        aborted = frozenset(range(number % 7, 60, 11))
        outputs = serve(engine, prompts, params, seed=number, aborted=aborted)
        return {place: output.token_ids for place, output in outputs.items() if output.finish_reason != "abort"}

    expected = {**round_of(0), **round_of(1)}
    for number in range(2, 8):  # allocators settle
        round_of(number)
    compiled, memory = compilations(), resident()
    deadline, rounds = time.monotonic() + soak_seconds, 8
    while time.monotonic() < deadline:
        assert all(expected[place] == tokens for place, tokens in round_of(rounds).items())
        rounds += 1
    assert is_empty(engine)
    assert compilations() == compiled and engine.statistics.compilations == 0
    assert resident() - memory < 64 * 2**20, f"{rounds} rounds"


def resident() -> int:
    """Bytes of memory that the process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def soak_seconds(request) -> float:
    return float(request.config.getoption("--soak-seconds"))
