"""An FP8 checkpoint on a mesh: every device holds its share alone, and the answers are those of one device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import load, quantized, random_checkpoint, wide_config
from sharded_fp8 import ROWS
from support import padded

from torchqwen_tpu import RuntimeConfig
from torchqwen_tpu.config import QUANTIZATIONS

pytestmark = pytest.mark.spmd
SCRIPT = Path(__file__).parent / "sharded_fp8.py"
VOCABULARY = 97
"""A prime: no layout divides it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = wide_config(vocab_size=VOCABULARY)
    return quantized(random_checkpoint(config)).write(tmp_path_factory.mktemp("fp8"), shards=2)


@pytest.fixture(scope="module")
def sharded(folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("sharded") / "answers.pt"
    environment = {name: value for name, value in os.environ.items() if name != "CPU_NUM_DEVICES"}
    command = [sys.executable, str(SCRIPT), str(folder), str(output)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-4000:]
    return torch.load(output)


@pytest.mark.parametrize("policy", QUANTIZATIONS)
def test_logits_of_one_device(folder, sharded, policy):
    model = load(folder, dtype="float32", runtime=RuntimeConfig(quantization=policy))
    torch.testing.assert_close(sharded[policy]["logits"], model(**padded(ROWS)).logits.cpu(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("policy", QUANTIZATIONS)
def test_an_expert_is_on_its_owner_alone(sharded, policy):
    """Eight experts with their scales on eight devices; heads, and the scales of their columns, over the cores of a chip."""
    shards = sharded[policy]["shards"]
    experts = {name: shapes for name, shapes in shards.items() if ".experts." in name}
    assert len(experts) == (4 if policy == "dequantize" else 8)
    for name, shapes in experts.items():
        assert len(shapes) == 8 and all(shape[0] == 1 for shape in shapes), name
    if policy != "dequantize":
        name = "model.layers.1.self_attn.qkv_proj.weight"
        assert {shape[-1] for shape in shards[name]} == {shape[-1] for shape in shards[name + "_scale"]} == {192}


@pytest.mark.parametrize("policy", QUANTIZATIONS)
def test_a_vocabulary_that_does_not_divide_is_whole_everywhere(sharded, policy):
    """Embedding and head are on every device, without padding that could be sampled, scored or saved."""
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        shapes = sharded[policy]["shards"][name]
        assert len(shapes) == 8 and all(sorted(shape) == [VOCABULARY, 160] for shape in shapes)
    assert sharded[policy]["logits"].shape[-1] == VOCABULARY
    assert sharded[policy]["tokens"].max() < VOCABULARY
