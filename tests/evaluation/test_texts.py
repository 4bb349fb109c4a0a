"""Texts for harnesses: contexts that are too long, and answers up to a stop string."""

from __future__ import annotations

import pytest

from torchqwen_tpu.evaluation.texts import answer, cut_left


@pytest.mark.parametrize(("length", "expected"), [(9, [1, 2, 3]), (4, [1, 2, 3]), (3, [2, 3]), (2, [3])])
def test_long_contexts_lose_tokens_on_the_left(length, expected):
    assert cut_left([1, 2, 3], [4, 5], length) == expected


def test_answers_end_before_the_first_stop_string(tiny, tokenizer):
    prompts = ["import os\nimport ", "def f(x):\n    return "]
    (whole, other) = (text for _, text in answer(tiny, tokenizer, prompts, 12, do_sample=False))
    stop = whole[2:5]
    (tokens, text), (_, unstopped) = answer(tiny, tokenizer, prompts, 12, (stop,), do_sample=False)
    assert text == whole[: whole.find(stop)] and len(tokens) <= 12
    assert unstopped == other.split(stop)[0]
