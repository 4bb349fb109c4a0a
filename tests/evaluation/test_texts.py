"""Texts for harnesses: windows of long ones, and answers up to a stop string."""

from __future__ import annotations

import pytest

from torchqwen_tpu.evaluation.texts import answer, cut_left, rolling_windows, score_texts

utils = pytest.importorskip("lm_eval.utils")


@pytest.mark.parametrize("count", [1, 7, 8, 9, 16, 21])
def test_windows_are_those_of_lm_eval(count):
    ids = list(range(1, count + 1))
    expected = utils.get_rolling_token_windows(ids, prefix_token=0, max_seq_len=8, context_len=1)
    expected = [tuple(map(list, utils.make_disjoint_window(window))) for window in expected]
    assert rolling_windows(ids, 0, 8) == expected
    assert [token for _, scored in expected for token in scored] == ids


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


def test_a_long_text_in_windows_is_that_of_lm_eval(tiny, tokenizer):
    from lm_eval.api.instance import Instance

    from torchqwen_tpu.evaluation.lm_eval_model import TorchQwenLM

    texts = ["import os\nimport sys\n" * 8, "x"]
    model = TorchQwenLM(tiny, tokenizer, max_length=32)
    expected = model.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0) for text in texts])
    assert score_texts(tiny, tokenizer, texts, 32) == pytest.approx(expected, abs=1e-4)
