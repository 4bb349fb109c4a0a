"""register(): transformers' own AutoModelForCausalLM gives this library's classes, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
import torch
import transformers
import torchqwen_tpu

before = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert type(before).__module__.startswith("transformers."), type(before)
torchqwen_tpu.register()
torchqwen_tpu.register()  # a second time changes nothing
for folder in sys.argv[1:]:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, parallel=torchqwen_tpu.ParallelConfig(chips=1, cores=1)
    )
    assert type(model) is torchqwen_tpu.Qwen3_5MoeForCausalLM, type(model)
    parameter = "model.layers.1.self_attn.o_proj.weight"
    assert torch.equal(model.state_dict()[parameter].cpu(), before.state_dict()[parameter].float())
"""


def test_register(checkpoint, checkpoint_folder, tmp_path):
    text = checkpoint.text_only().write(tmp_path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, checkpoint_folder, text],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_auto_class_is_no_model():
    from torchqwen_tpu import AutoModelForCausalLM

    with pytest.raises(OSError, match="from_pretrained"):
        AutoModelForCausalLM()
