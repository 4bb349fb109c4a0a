"""Shared models: the tiny trained checkpoint, here and in transformers, and a dense one made on the spot."""

from __future__ import annotations

import os

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ["HF_HUB_OFFLINE"] = "1"

from pathlib import Path

import pytest
import torch
import transformers
from transformers.utils import logging

TINY = Path(__file__).parent.parent / "examples" / "tiny-qwen3.5-moe"

logging.set_verbosity_error()
logging.disable_progress_bar()


@pytest.fixture(scope="session")
def tiny_folder() -> Path:
    return TINY


@pytest.fixture(scope="session")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(TINY, padding_side="left")


@pytest.fixture(scope="session")
def tiny():
    """The tiny checkpoint in float32, on one device."""
    import torchqwen_tpu

    return torchqwen_tpu.AutoModelForCausalLM.from_pretrained(TINY, dtype="float32")


@pytest.fixture(scope="session")
def tiny_reference():
    """The tiny checkpoint in float32, in transformers."""
    return transformers.Qwen3_5MoeForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
