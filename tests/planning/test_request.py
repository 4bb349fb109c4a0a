"""What a plan refuses before any work, and what it finds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torchqwen_tpu.checkpoint.resolve import read_config
from torchqwen_tpu.cli import main
from torchqwen_tpu.parallel.mesh import DeviceMesh
from torchqwen_tpu.planning import PlanRequest, planner
from torchqwen_tpu.planning.config import find_config
from torchqwen_tpu.planning.request import graphs


@pytest.mark.parametrize("wrong", [{"concurrency": 0}, {"layout": "ep"}, {"dtype": "int4"}, {"input_len": -1}])
def test_requests_that_cannot_be(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PlanRequest("m", **wrong)


def test_a_model_is_a_folder_or_its_configuration(tiny_folder):
    assert find_config(str(tiny_folder)) == find_config(str(tiny_folder / "config.json")) == tiny_folder / "config.json"


@pytest.mark.parametrize("model", ["Qwen/Qwen3.5-35B-A3B", "models/Qwen3.5-35B-A3B/config.json", "models/Qwen3.5-35B-A3B.json"])
def test_the_name_of_a_model(model):
    assert PlanRequest(model).model_name == "Qwen3.5-35B-A3B"


def test_no_such_model(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing-here"):
        find_config(str(tmp_path / "nothing-here"))
    with pytest.raises(FileNotFoundError, match="config.json"):
        find_config(str(tmp_path))


@pytest.mark.parametrize("text, message", [("{", "JSON"), ('{"model_type": "llama"}', "llama"), ("[]", "None")])
def test_configurations_of_others(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path / "config.json")


def test_both_graphs_share_their_cache():
    request = PlanRequest("m", concurrency=60, input_len=100, output_len=10)
    both = graphs(request, Path("config.json"), DeviceMesh(4, 2, "dp"))
    assert both["decode"].tokens is None and both["extend"].tokens == 1024
    assert both["decode"].tokens_per_sequence == both["extend"].tokens_per_sequence == 110


@pytest.mark.parametrize("watched", [False, True])
def test_a_watch_looks_at_every_kind_of_step(watched):
    request = PlanRequest("m", watched=watched)
    assert {graph.watched for graph in graphs(request, Path("config.json"), DeviceMesh(4, 2, "dp")).values()} == {watched}


def command(capsys, *arguments: str) -> tuple[int, str]:
    status = main(["plan", *arguments])
    return status, capsys.readouterr().err


def test_an_unknown_topology_is_one_line_with_those_there_are(capsys, tiny_folder):
    status, error = command(capsys, "--model", str(tiny_folder), "--topology", "tpu99:2x2")
    assert status == 2 and len(error.splitlines()) == 1
    assert "tpu99" in error and "tpu7x" in error and "v5e" in error


def test_without_libtpu_one_line_names_the_extra(capsys, tiny_folder, monkeypatch):
    from custom_ops import tpu_compiler

    monkeypatch.setattr(tpu_compiler.importlib.util, "find_spec", lambda name: None)
    tpu_compiler.topology.cache_clear()
    status, error = command(capsys, "--model", str(tiny_folder))
    assert status == 2 and len(error.splitlines()) == 1 and "torchqwen-tpu[tpu]" in error


def test_heads_that_a_layout_cannot_split(tiny_folder):
    with pytest.raises(ValueError, match="heads"):
        planner.plan(PlanRequest(str(tiny_folder), layout="tp"))


def test_a_report_needs_a_folder(capsys, tiny_folder, tmp_path):
    status, error = command(capsys, "--model", str(tiny_folder), "--report", str(tmp_path / "no" / "r.html"))
    assert status == 2 and "no folder" in error


def test_parameters_of_a_published_size():
    file = Path(__file__).parents[1] / "data" / "configs" / "Qwen3.5-397B-A17B.json"
    counts = planner.count_parameters(read_config(file))
    assert json.loads(file.read_text())["model_type"] == "qwen3_5_moe"
    assert sum(counts.values()) == pytest.approx(396.3e9, rel=0.001)
    assert counts["routed experts"] == pytest.approx(60 * 6.442e9, rel=0.001)
