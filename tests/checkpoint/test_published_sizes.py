"""Module trees of the published sizes, built without memory: names, shapes and numbers of parameters."""

from __future__ import annotations

import functools
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import transformers
from transformers import Qwen3_5MoeConfig

from torchqwen_tpu import Qwen3_5MoeForCausalLM

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
SIZES = ["Qwen3.5-397B-A17B", "Qwen3.5-122B-A10B", "Qwen3.5-35B-A3B"]
PARTS = ("layers.0.linear_attn.", "layers.3.self_attn.", "layers.0.mlp.experts.", "layers.0.mlp.shared_expert.")
MILLION, BILLION = 1e6, 1e9


@functools.cache
def shapes(size: str) -> dict[str, torch.Size]:
    """Published names and shapes of our model."""
    with torch.device("meta"):
        model = Qwen3_5MoeForCausalLM(Qwen3_5MoeConfig.from_json_file(CONFIGS / f"{size}.json"))
    assert all(parameter.is_meta for parameter in model.parameters())
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("size", SIZES)
def test_names_and_shapes_are_those_of_transformers(size):
    config = Qwen3_5MoeConfig.from_json_file(CONFIGS / f"{size}.json").get_text_config()
    with torch.device("meta"):
        reference = transformers.Qwen3_5MoeForCausalLM(config)
    assert shapes(size) == {name: tensor.shape for name, tensor in reference.state_dict().items()}


def counted(size: str) -> dict[str, int]:
    """Parameters by part: of the whole model, and those of layer 0 (Gated DeltaNet) and 3 (attention)."""
    counts: dict[str, int] = defaultdict(int)
    for name, shape in shapes(size).items():
        count = shape.numel()
        counts["all"] += count
        counts[name] += count
        for part in PARTS:
            if part in name:
                counts[part] += count
    return counts


def test_397b_by_part():
    counts = counted("Qwen3.5-397B-A17B")
    assert counts["layers.0.linear_attn."] == pytest.approx(118.0 * MILLION, abs=0.05 * MILLION)
    assert counts["layers.3.self_attn."] == pytest.approx(104.9 * MILLION, abs=0.05 * MILLION)
    assert counts["layers.0.mlp.experts."] == pytest.approx(6.442 * BILLION, abs=0.0005 * BILLION)
    assert counts["layers.0.mlp.shared_expert."] == pytest.approx(12.6 * MILLION, abs=0.05 * MILLION)
    assert counts["model.layers.0.mlp.gate.weight"] == pytest.approx(2.1 * MILLION, abs=0.05 * MILLION)
    assert counts["model.embed_tokens.weight"] == pytest.approx(1.017 * BILLION, abs=0.0005 * BILLION)
    assert counts["lm_head.weight"] == counts["model.embed_tokens.weight"]
    assert counts["all"] == pytest.approx(396.3 * BILLION, abs=0.05 * BILLION)


def test_397b_active_parameters():
    """Of a token's experts ten of 512 are active; the embedding is a look-up but counts."""
    counts = counted("Qwen3.5-397B-A17B")
    experts = sum(count for name, count in counts.items() if name.startswith("model.") and ".mlp.experts." in name)
    active = counts["all"] - experts + experts * 10 // 512
    assert active == pytest.approx(16.3 * BILLION, abs=1.1 * BILLION)


@pytest.mark.parametrize(
    ("size", "layers", "experts"),
    [("Qwen3.5-397B-A17B", 60, 512), ("Qwen3.5-122B-A10B", 48, 256), ("Qwen3.5-35B-A3B", 40, 256)],
)
def test_every_fourth_layer_is_attention(size, layers, experts):
    kinds = {}
    for name in shapes(size):
        if name.startswith("model.layers."):
            number, kind = name.split(".")[2:4]
            if kind in ("linear_attn", "self_attn"):
                kinds[int(number)] = kind
    assert kinds == {number: "self_attn" if number % 4 == 3 else "linear_attn" for number in range(layers)}
    assert shapes(size)["model.layers.0.mlp.experts.down_proj"][0] == experts
