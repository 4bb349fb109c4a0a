"""Shapes are bucketed: after warm-up nothing is compiled, and what is refused is refused before anything is."""

from __future__ import annotations

import pytest
import torch
from support import moe_config, padded, random_rows, save_random
from transformers import DynamicCache, GenerationConfig

import torchqwen_tpu
from torchqwen_tpu.runtime.graph import compilations

IDS = torch.tensor(random_rows((8, 8, 8), seed=30))


@pytest.fixture
def compiles_nothing():
    """Fails a test that compiled anything since its start, or since the `reset` that this gives."""
    state = {"before": compilations()}
    yield lambda: state.update(before=compilations())
    assert compilations() == state["before"]


def warm_up(model, **kwargs):
    for batch in (IDS[:1], IDS):
        model.generate(batch, max_new_tokens=12, **kwargs)


def test_greedy_after_warm_up(small, compiles_nothing):
    warm_up(small, do_sample=False)
    compiles_nothing()
    for lengths in ((2,), (2, 4, 3), (20, 1, 3), (10, 20, 9, 25)):
        rows = random_rows(lengths, seed=sum(lengths))
        for new_tokens in (1, 7, 20, 33):
            small.generate(**padded(rows, "left"), max_new_tokens=new_tokens, do_sample=False)
            small.generate(**padded(rows, "right"), max_new_tokens=new_tokens, do_sample=False)


def test_stop_tokens_after_warm_up(small, compiles_nothing):
    warm_up(small, do_sample=False)
    compiles_nothing()
    for stops in (3, [5, 6], list(range(8))):
        small.generate(IDS, max_new_tokens=20, do_sample=False, eos_token_id=stops, pad_token_id=0)


def test_sampling_after_warm_up(small, compiles_nothing):
    warm_up(small, do_sample=True, seed=0)
    compiles_nothing()
    for parameters in ({"temperature": 0.5}, {"top_p": 0.7}, {"top_k": 3}, {"top_k": 33, "min_p": 0.2}):
        small.generate(IDS, max_new_tokens=20, do_sample=True, seed=[1, 2, 3], **parameters)
        small.generate(IDS[1:2], max_new_tokens=5, do_sample=True, **parameters)


def test_host_path_after_warm_up(small, compiles_nothing):
    arguments = {"do_sample": False, "repetition_penalty": 1.2, "num_beams": 1}
    warm_up(small, **arguments)
    compiles_nothing()
    small.generate(**padded(random_rows((3, 11, 2)), "left"), max_new_tokens=20, **arguments)


def test_beams_after_warm_up(small, compiles_nothing):
    arguments = {"do_sample": False, "num_beams": 3}
    small.generate(IDS[:1], max_new_tokens=12, **arguments)
    compiles_nothing()
    small.generate(torch.tensor(random_rows((19,))), max_new_tokens=20, length_penalty=0.5, **arguments)


def test_second_turn_after_warm_up(small, compiles_nothing):
    def two_turns(rows, new_tokens):
        first = small.generate(
            **padded(rows, "left"), max_new_tokens=new_tokens, do_sample=False, return_dict_in_generate=True
        )
        ids = torch.cat([first.sequences, IDS[:, :3]], dim=1)
        small.generate(ids, cache=first.cache, max_new_tokens=new_tokens, do_sample=False)

    two_turns(random_rows((5, 3, 8)), 8)
    compiles_nothing()
    two_turns(random_rows((12, 2, 7)), 13)


UNSUPPORTED = {
    "assistant_model": "model",
    "prompt_lookup_num_tokens": 3,
    "guidance_scale": 1.5,
    "negative_prompt_ids": torch.ones(1, 4, dtype=torch.long),
    "custom_generate": "some/repository",
    "num_beam_groups": 2,
    "force_words_ids": [[3]],
    "penalty_alpha": 0.6,
    "dola_layers": "high",
    "cache_implementation": "static",
    "prefill_chunk_size": 16,
    "output_attentions": True,
    "output_hidden_states": True,
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_arguments_of_generate(small, compiles_nothing, name):
    """The error names the argument and goes on to say what to do."""
    with pytest.raises(ValueError, match=rf"{name}: \w+"):
        small.generate(IDS, max_new_tokens=4, **{name: UNSUPPORTED[name]})


@pytest.mark.parametrize("name", ["guidance_scale", "penalty_alpha", "cache_implementation", "output_hidden_states"])
def test_unsupported_settings_of_a_generation_config(small, compiles_nothing, name):
    config = GenerationConfig(max_new_tokens=4)
    setattr(config, name, UNSUPPORTED[name])
    with pytest.raises(ValueError, match=name):
        small.generate(IDS, generation_config=config)
    with pytest.raises(ValueError, match=name):
        small.generate(IDS, config)


def test_settings_that_switch_nothing_on(small):
    plain = small.generate(IDS, max_new_tokens=4, do_sample=False)
    off = {"guidance_scale": 1.0, "num_beam_groups": 1, "output_attentions": False, "assistant_model": None}
    assert torch.equal(small.generate(IDS, max_new_tokens=4, do_sample=False, **off), plain)


EMPTY = torch.zeros(1, 0, dtype=torch.long)
BAD_PROMPTS = {
    "no prompt": {},
    "empty": {"input_ids": EMPTY},
    "no sequence": {"input_ids": torch.zeros(0, 3, dtype=torch.long)},
    "one dimension": {"input_ids": IDS[0]},
    "floats": {"input_ids": IDS.float()},
    "beyond the vocabulary": {"input_ids": torch.tensor([[3, 96]])},
    "negative": {"input_ids": torch.tensor([[3, -1]])},
    "too long": {"input_ids": torch.ones(1, 257, dtype=torch.long)},
    "mask with too many columns": {"input_ids": IDS, "attention_mask": torch.ones(3, 9)},
    "mask with too few rows": {"input_ids": IDS, "attention_mask": torch.ones(2, 8)},
    "mask without a token": {"input_ids": IDS, "attention_mask": torch.ones(3, 8).index_fill(0, torch.tensor(1), 0)},
    "embeddings of another size": {"inputs_embeds": torch.ones(1, 4, 63)},
    "embeddings of two dimensions": {"inputs_embeds": torch.ones(4, 64)},
}


@pytest.mark.parametrize("prompt", BAD_PROMPTS.values(), ids=BAD_PROMPTS)
def test_bad_prompts_are_refused(small, compiles_nothing, prompt):
    with pytest.raises(ValueError):
        small(**prompt)
    with pytest.raises(ValueError):
        small.generate(**prompt, max_new_tokens=4, do_sample=False)


@pytest.mark.parametrize("number", [0, -3])
def test_no_new_tokens_are_refused(small, compiles_nothing, number):
    with pytest.raises(ValueError):
        small.generate(IDS, max_new_tokens=number)


@pytest.mark.parametrize("lengths", [{"max_length": 8}, {"max_length": 5}, {"max_new_tokens": 249}], ids=str)
def test_lengths_that_do_not_fit_are_refused(small, compiles_nothing, lengths):
    with pytest.raises(ValueError):
        small.generate(IDS, **lengths)


def test_other_caches_are_refused(small, small_folder, compiles_nothing):
    other = torchqwen_tpu.AutoModelForCausalLM.from_pretrained(small_folder, dtype="float32")
    compiles_nothing()
    caches = {"foreign": DynamicCache(), "another batch": small.new_cache(2), "another model": other.new_cache(3)}
    for cache in caches.values():
        with pytest.raises(ValueError, match="cache"):
            small(IDS, cache=cache)
        with pytest.raises(ValueError, match="cache"):
            small.generate(IDS, cache=cache, max_new_tokens=4)


def test_masks_that_contradict_the_cache_are_refused(small, compiles_nothing):
    cache = small(**padded(random_rows((2, 5, 3)), "left")).cache
    compiles_nothing()
    for mask in (torch.ones(3, 5 + 9), torch.eye(3, 5 + 8)):
        with pytest.raises(ValueError, match="attention_mask"):
            small(IDS, attention_mask=mask, cache=cache)


def test_a_whole_text_that_the_cache_has_seen_is_refused(small, compiles_nothing):
    for beams in (1, 3):
        cache = small(IDS).cache
        compiles_nothing()
        with pytest.raises(ValueError, match="seen"):
            small.generate(IDS if beams == 1 else IDS[:1], cache=cache, num_beams=beams, max_new_tokens=4)


@pytest.mark.parametrize("name", ["output_attentions", "output_router_logits", "unknown"])
def test_unsupported_arguments_of_forward(small, compiles_nothing, name):
    with pytest.raises(ValueError, match=name):
        small(IDS, **{name: True})


def test_both_kinds_of_input_are_refused(small, compiles_nothing):
    with pytest.raises(ValueError):
        small(IDS, inputs_embeds=torch.ones(3, 8, 64))
    with pytest.raises(ValueError):
        small()


def test_a_model_without_weights_says_so(compiles_nothing):
    model = torchqwen_tpu.Qwen3_5MoeForCausalLM(moe_config())
    with pytest.raises(RuntimeError, match="from_pretrained"):
        model(IDS)
    with pytest.raises(RuntimeError, match="from_pretrained"):
        model.generate(IDS)


def test_a_chunk_length_that_is_no_power_of_two(tmp_path):
    """`prefill_chunk` cuts into steps whose shapes are bucketed like any other."""
    folder = save_random(moe_config(), tmp_path)
    runtime = torchqwen_tpu.RuntimeConfig(prefill_chunk=24)
    model = torchqwen_tpu.AutoModelForCausalLM.from_pretrained(folder, dtype="float32", runtime=runtime)
    model.generate(torch.tensor(random_rows((30,))), max_new_tokens=4, do_sample=False)
    before = compilations()
    model.generate(torch.tensor(random_rows((55,))), max_new_tokens=9, do_sample=False)
    assert compilations() == before
