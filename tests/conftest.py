"""Shared models, here and in transformers: the tiny trained checkpoint, and a small random one."""

from __future__ import annotations

import gc
import os

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ["HF_HUB_OFFLINE"] = "1"
# The tests compile many small graphs and run each a few times: compiling fast counts, running fast does not. XLA's older
# emitter of fusions takes a third less of the processor than the one by MLIR.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false")
if "PYTEST_XDIST_WORKER" in os.environ:
    # The processes share the cores: further threads of torch would mostly wait for one another, and burn a core as they do.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path

import jax
import pytest
import torch
import transformers
from support import moe_config, reference_of, reference_tokens, save_random
from transformers.utils import logging

TINY = Path(__file__).parent.parent / "examples" / "tiny-qwen3.5-moe"

TEXT = """Once upon a time there was a little girl who lived near a big forest. Every day she walked along the river
with her dog and looked for stones. One day she found a stone that was as blue as the sky. "Look!" she said. "This must
be magic." The dog barked and ran in a circle. They took the stone home and put it by the window, where it shone all
night. """

logging.set_verbosity_error()
logging.disable_progress_bar()


def pytest_addoption(parser):
    parser.addoption("--soak-seconds", default=120, type=float, help="how long the soak test of the engine runs")


@pytest.fixture(scope="module", autouse=True)
def _compiled_by_jax_is_released():
    """What a module compiled with JAX goes with it: a process may map only so many pieces of memory (65,530 by default on
    Linux), every compiled function takes some, and XLA crashes beyond."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session")
def tiny_folder() -> Path:
    return TINY


@pytest.fixture(scope="session")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(TINY, padding_side="left")


@pytest.fixture(scope="session")
def text(tokenizer) -> list[int]:
    """Tokens among which no router has a tie: where two experts are level up to rounding, transformers' own answer
    jumps with the length of the input."""
    return tokenizer(TEXT * 10)["input_ids"][21:]


@pytest.fixture(scope="session")
def tiny():
    """The tiny checkpoint in float32, on one device."""
    import torchqwen_tpu

    return torchqwen_tpu.AutoModelForCausalLM.from_pretrained(TINY, dtype="float32")


@pytest.fixture(scope="session")
def tiny_reference():
    """The tiny checkpoint in float32, in transformers."""
    return transformers.Qwen3_5MoeForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def tiny_continuations(tiny_reference, text) -> list[tuple[list[int], list[int]]]:
    """Prompts, and the 64 tokens with which transformers goes on after each alone."""
    prompts = (text[:7], text[20:21], text[40:66])
    return [(row, reference_tokens(tiny_reference, row, 64, eos_token_id=None)) for row in prompts]


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory) -> Path:
    """A mixture of experts of three layers with random weights, for what does not need a trained one."""
    return save_random(moe_config(), tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def small(small_folder):
    import torchqwen_tpu

    return torchqwen_tpu.AutoModelForCausalLM.from_pretrained(small_folder, dtype="float32")


@pytest.fixture(scope="session")
def small_reference(small_folder):
    return reference_of(small_folder)
