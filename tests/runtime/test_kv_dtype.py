"""KV pages in FP8: the engine serves with them, nearly all tokens stay the same, and their memory halves."""

from __future__ import annotations

import pytest
import serving
import torch
from support import moe_config, random_rows

import torchqwen_tpu
from torchqwen_tpu import Engine, EngineConfig, ParallelConfig, RuntimeConfig
from torchqwen_tpu.cache import CacheLayout
from torchqwen_tpu.parallel import build_mesh
from torchqwen_tpu.runtime.budget import plan_budget

FP8 = RuntimeConfig(page_size=16, kv_dtype="float8_e4m3fn")


@pytest.fixture(scope="module")
def rounded(small_folder):
    return torchqwen_tpu.AutoModelForCausalLM.from_pretrained(small_folder, dtype="float32", runtime=FP8)


def test_next_tokens_of_the_trained_checkpoint(tiny, tiny_folder, text):
    """Of 512 tokens of text, with pages as they are and rounded to FP8."""
    rounded = torchqwen_tpu.AutoModelForCausalLM.from_pretrained(tiny_folder, dtype="float32", runtime=FP8)
    ids = torch.tensor([text[:512]])
    exact, other = (model(ids).logits[0].cpu() for model in (tiny, rounded))
    same = (exact.argmax(-1) == other.argmax(-1)).float().mean()
    assert 0.97 <= same
    assert 0 < torch.norm(exact - other) / torch.norm(exact) < 0.02


def test_engine(rounded):
    """A shared prefix among the prompts, and pages for a part of them."""
    prompts = random_rows((1, 16, 17, 90), seed=50)
    prompts.append(prompts[-1][:64] + prompts[0])
    params = [{"do_sample": False, "max_new_tokens": 8}] * len(prompts)
    engine = Engine(rounded, EngineConfig(max_sequences=4, token_budget=64, pages=12))
    outputs = serving.serve(engine, prompts, params)
    expected = serving.alone(engine, prompts, params)
    assert [outputs[number].token_ids for number in range(len(prompts))] == expected
    assert serving.is_empty(engine)


def test_caches_grow_and_change_their_order(rounded):
    """Beams reorder pages and scales; a second turn needs more of them."""
    ids = torch.tensor(random_rows((12,), seed=51))
    first = rounded.generate(ids, max_new_tokens=8, num_beams=3, do_sample=False, return_dict_in_generate=True)
    assert first.sequences.shape == (1, 20)
    one = rounded.generate(ids, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    together = rounded.generate(ids, max_new_tokens=34, do_sample=False)
    again = rounded.generate(one.sequences, cache=one.cache, max_new_tokens=30, do_sample=False)
    assert torch.equal(again, together)


def test_a_budget_holds_nearly_twice_the_pages():
    """Heads of 256: 260 bytes a row in place of 512, beside recurrent states of less than a page's size."""
    config, mesh = moe_config(head_dim=256), build_mesh(ParallelConfig())
    budget = EngineConfig(max_sequences=2, cache_memory=64 << 20, checkpoints=0)
    pages = [
        plan_budget(CacheLayout(config, mesh, RuntimeConfig(page_size=64, kv_dtype=kind), torch.bfloat16), budget, 1 << 20)
        for kind in ("auto", "bfloat16", "float8_e4m3fn")
    ]
    exact, same, half = (plan.shape.pool_pages for plan in pages)
    assert exact == same and 1.95 < half / exact <= 2


def test_unknown_dtypes_are_refused():
    with pytest.raises(ValueError, match="kv_dtype.*float8_e4m3fn.*'int8'"):
        RuntimeConfig(kv_dtype="int8")
