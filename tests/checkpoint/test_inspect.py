"""`torchqwen-tpu inspect`: what it counts, what it finds wrong, and its exit status."""

from __future__ import annotations

import json

import pytest
import torch
from checkpoints import WHOLE, load, quantized, random_checkpoint, wide_config
from conftest import TINY

from torchqwen_tpu import RuntimeConfig
from torchqwen_tpu.cli import main
from torchqwen_tpu.config import QUANTIZATIONS

NORM = WHOLE + "norm.weight"
QUERY = WHOLE + "layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def checkpoint():
    return quantized(random_checkpoint(wide_config()))


@pytest.fixture
def inspect(capsys):
    """Exit status and JSON of the command."""

    def run(folder, *options: str):
        status = main(["inspect", str(folder), "--json", *options])
        return status, json.loads(capsys.readouterr().out)

    return run


def test_trained_checkpoint(inspect):
    status, result = inspect(TINY)
    assert status == 0 and result["loads"]
    assert result["eos_token_ids"] and result["model_type"] == "qwen3_5_moe" and result["files"] == 3
    parts = {size["part"] for size in result["sizes"]}
    assert parts == {
        "experts", "shared experts", "routers", "Gated DeltaNet", "attention", "embedding", "head", "norms", "vision",
        "multi-token prediction",
    }  # fmt: skip
    parameters = sum(size["parameters"] for size in result["sizes"] if size["part"] not in ("vision", "multi-token prediction"))
    assert parameters == pytest.approx(12.6e6, abs=0.05e6)
    files = sum(file.stat().st_size for file in TINY.glob("*.safetensors"))
    assert 0 < files - sum(size["bytes"] for size in result["sizes"]) < 100_000  # the headers


@pytest.mark.parametrize("policy", QUANTIZATIONS)
def test_bytes_a_device_are_those_of_the_loaded_model(checkpoint, tmp_path, inspect, policy):
    folder = checkpoint.write(tmp_path)
    status, result = inspect(folder, "--chips", "1", "--cores", "1", "--quantization", policy)
    model = load(folder, runtime=RuntimeConfig(quantization=policy))
    held = {}
    for value in model.parameters():
        name = str(value.dtype).removeprefix("torch.")
        held[name] = held.get(name, 0) + value.numel() * value.element_size()
    assert status == 0 and result["device_bytes"] == held


def test_a_mesh_splits_the_experts(checkpoint, tmp_path, inspect):
    folder = checkpoint.write(tmp_path)
    _, one = inspect(folder, "--chips", "1", "--cores", "1")
    _, eight = inspect(folder, "--chips", "4", "--cores", "2")
    experts = sum(size["bytes"] for size in one["sizes"] if (size["part"], size["dtype"]) == ("experts", "F8_E4M3"))
    assert one["device_bytes"]["float8_e4m3fn"] - eight["device_bytes"]["float8_e4m3fn"] == experts * 7 // 8
    assert one["device_bytes"]["bfloat16"] == eight["device_bytes"]["bfloat16"]


@pytest.mark.parametrize(
    ("change", "kind", "name"),
    [
        (lambda tensors: tensors.pop(NORM), "missing", "model.norm.weight"),
        (lambda tensors: tensors.update({WHOLE + "extra": torch.ones(1)}), "unexpected", WHOLE + "extra"),
        (lambda tensors: tensors.update({NORM: tensors[NORM][1:].clone()}), "mismatched", NORM),
        (lambda tensors: tensors.pop(QUERY + "_scale_inv"), "mismatched", QUERY),
        (lambda tensors: tensors.update({QUERY + "_scale_inv": torch.zeros(2, 2)}), "damaged", QUERY + "_scale_inv"),
    ],
    ids=["missing", "unexpected", "wrong shape", "no scale", "zero scale"],
)
def test_what_would_not_load(checkpoint, tmp_path, inspect, capsys, change, kind, name):
    folder = checkpoint.write(tmp_path, change=change)
    status, result = inspect(folder)
    assert status == 1 and not result["loads"] and any(name in problem for problem in result[kind])
    with pytest.raises(ValueError, match=name):
        load(folder)
    assert main(["inspect", str(folder)]) == 1
    assert name in capsys.readouterr().out


def test_truncated_file(checkpoint, tmp_path, inspect):
    folder = checkpoint.write(tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    status, result = inspect(folder)
    assert status == 1 and "model.safetensors" in result["damaged"][0]


def test_no_checkpoint_at_all(tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["chat_template.jinja", "tokenizer_config.json", None])
def test_chat_template(checkpoint, tmp_path, inspect, where):
    folder = checkpoint.write(tmp_path)
    if where:
        (folder / where).write_text('{"chat_template": "{{ messages }}"}')
    assert inspect(folder)[1]["chat_template"] == bool(where)
