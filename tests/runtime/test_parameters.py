"""Parameters of a request: transformers' names and defaults, and one clear error for what an engine does not have."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig

from torchqwen_tpu.runtime.parameters import resolve_parameters

MODEL = GenerationConfig(do_sample=True, temperature=0.6, top_k=20, top_p=0.95, eos_token_id=[7, 9], pad_token_id=9)


def resolve(given=None, defaults=MODEL, prompt_tokens=10):
    return resolve_parameters(given, defaults, prompt_tokens)


def test_the_models_configuration_fills_what_is_open():
    own = resolve({"max_new_tokens": 5, "top_p": 0.5, "seed": 3})
    assert (own.temperature, own.top_k, own.top_p, own.min_p) == (0.6, 20, 0.5, 0)
    assert own.eos == (7, 9) and own.max_new_tokens == 5 and own.seed == 3


def test_greedy_ignores_what_sampling_would_use():
    own = resolve(GenerationConfig(do_sample=False, temperature=0.3))
    assert not own.samples and own.temperature == 0 and own.max_new_tokens is None


def test_transformers_defaults():
    own = resolve({"do_sample": True}, GenerationConfig())
    assert (own.temperature, own.top_k, own.top_p) == (1.0, 50, 1.0) and own.eos == ()
    assert not resolve(None, GenerationConfig()).samples


def test_lengths():
    assert resolve({"max_length": 30}).max_new_tokens == 20
    assert resolve({"max_length": 30, "max_new_tokens": 4}).max_new_tokens == 4
    assert resolve(None, GenerationConfig(max_new_tokens=6)).max_new_tokens == 6
    assert resolve(None, GenerationConfig(max_length=30)).max_new_tokens == 20
    for wrong in ({"max_length": 10}, {"max_new_tokens": 0}, {"max_new_tokens": 2.5}):
        with pytest.raises(ValueError, match="max_new_tokens"):
            resolve(wrong)


def test_shortest_lengths():
    """min_new_tokens goes before min_length, which counts the prompt."""
    assert resolve({"min_new_tokens": 3}).min_new_tokens == 3
    assert resolve({"min_length": 14}).min_new_tokens == 4 and resolve({"min_length": 5}).min_new_tokens == 0
    assert resolve({"min_length": 30, "min_new_tokens": 2}).min_new_tokens == 2
    assert resolve().min_new_tokens == 0 and not resolve().penalizes


def test_penalties_of_greedy_requests():
    own = resolve({"do_sample": False, "repetition_penalty": 1.3})
    assert own.repetition_penalty == 1.3 and own.penalizes and not own.samples
    assert not resolve({"do_sample": False, "min_new_tokens": 4, "eos_token_id": []}, GenerationConfig()).penalizes


def test_seeds_come_from_torch_where_none_is_given():
    torch.manual_seed(0)
    seeds = [resolve().seed for _ in range(3)]
    torch.manual_seed(0)
    assert [resolve().seed for _ in range(3)] == seeds and len(set(seeds)) == 3


@pytest.mark.parametrize(("given", "named"), [
    ({"temprature": 0.5}, "did you mean 'temperature'"),
    ({"frequency": 0.5}, "unknown sampling parameter 'frequency'"),
    ({"temperature": 0.0}, "temperature=0.0"),
    ({"temperature": "hot"}, "temperature='hot'"),
    ({"top_k": -1}, "top_k=-1"),
    ({"top_p": 1.5}, "top_p=1.5"),
    ({"min_p": -0.1}, "min_p"),
    ({"seed": -1}, "seed=-1"),
    ({"num_beams": 4}, "num_beams=4"),
    ({"num_return_sequences": 2}, "num_return_sequences=2"),
    ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size=3"),
    ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
    ({"repetition_penalty": "1.3"}, "repetition_penalty='1.3'"),
    ({"min_new_tokens": 1.5}, "min_new_tokens=1.5"),
    (GenerationConfig(num_beams=2), "num_beams=2"),
    ({"eos_token_id": list(range(9))}, "eos_token_id"),
    ("greedy", "params must be"),
])  # fmt: skip
def test_errors_name_the_parameter(given, named):
    with pytest.raises(ValueError, match=named):
        resolve(given)


WITHOUT_EFFECT = [{"num_beams": 1}, {"repetition_penalty": 1.0}, {"use_cache": False}, {"pad_token_id": 3}]


@pytest.mark.parametrize("given", WITHOUT_EFFECT, ids=str)
def test_settings_without_effect(given):
    assert resolve({**given, "seed": 1}) == resolve({"seed": 1})
