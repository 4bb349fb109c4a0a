"""`generate_batch()` returns what transformers' does."""

from __future__ import annotations

import pytest
import torch
from support import random_rows, reference_tokens
from transformers import GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

PROMPTS = random_rows((3, 40, 1), seed=60)
GREEDY = GenerationConfig(max_new_tokens=9, do_sample=False)


def test_greedy(small, small_reference):
    outputs = small.generate_batch(PROMPTS, GREEDY)
    assert list(outputs) == ["req_0", "req_1", "req_2"]
    for (name, output), prompt in zip(outputs.items(), PROMPTS, strict=True):
        assert isinstance(output, GenerationOutput) and output.is_finished() and output.request_id == name
        assert output.prompt_ids == prompt and output.error is None
        assert output.generated_tokens == reference_tokens(small_reference, prompt, 9)


def test_returned_sequences_are_those_of_generate(small):
    config = GenerationConfig(max_new_tokens=9, do_sample=True, top_k=0, num_return_sequences=2)
    outputs = small.generate_batch(PROMPTS[:1], config, seed=5)
    assert list(outputs) == ["req_0__child#0", "req_0"]
    expected = small.generate(torch.tensor(PROMPTS[:1]), config, seed=5)[:, 3:].tolist()
    assert [outputs["req_0"].generated_tokens, outputs["req_0__child#0"].generated_tokens] == expected


def test_a_bad_request_fails_alone(small):
    outputs = small.generate_batch([PROMPTS[0], "text", [96], PROMPTS[0]], GREEDY)
    states = [output.status for output in outputs.values()]
    assert states == [RequestStatus.FINISHED, RequestStatus.FAILED, RequestStatus.FAILED, RequestStatus.FINISHED]
    assert "96" in outputs["req_2"].error
    assert outputs["req_0"].generated_tokens == outputs["req_3"].generated_tokens


def test_settings_as_keywords(small):
    outputs = small.generate_batch(PROMPTS, GREEDY, max_new_tokens=2)
    assert [len(output.generated_tokens) for output in outputs.values()] == [2, 2, 2]
    assert small.generate_batch([]) == {}
    with pytest.raises(ValueError, match="Engine"):
        small.generate_batch(PROMPTS, persistent_manager=True)
    with pytest.raises(ValueError, match="seed"):
        small.generate_batch(PROMPTS, GREEDY, seed=[1, 2])
    with pytest.raises(NotImplementedError, match="Engine"):
        small.init_continuous_batching()
