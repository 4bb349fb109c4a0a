"""The model in lm-eval: the numbers of lm-eval's own transformers model on the same requests."""

from __future__ import annotations

import pytest
import torch

lm_eval = pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402

from torchqwen_tpu.evaluation.lm_eval_model import TorchQwenLM  # noqa: E402

# Texts in which no router has a tie: where two experts are level up to rounding, transformers' own answer is arbitrary.
TEXTS = ["import os\n", "def f(x):\n    return x + 1\n", "One day she found a stone that was as blue as the sky. "]


def instances(kind: str, arguments) -> list[Instance]:
    return [Instance(kind, {}, args, number) for number, args in enumerate(arguments)]


@pytest.fixture(scope="module")
def ours(tiny, tokenizer):
    return TorchQwenLM(tiny, tokenizer=tokenizer, max_length=64)


@pytest.fixture(scope="module")
def theirs(tiny_reference, tokenizer):
    return HFLM(tiny_reference, tokenizer=tokenizer, batch_size=1, max_length=64, device="cpu")


def test_loglikelihood(ours, theirs):
    requests = [(context, after) for context in ("", *TEXTS) for after in ("import sys\n", " = 1", "x" * 20)]
    results = ours.loglikelihood(instances("loglikelihood", requests))
    expected = theirs.loglikelihood(instances("loglikelihood", requests))
    for (value, greedy), (expected_value, expected_greedy) in zip(results, expected, strict=True):
        assert value == pytest.approx(expected_value, abs=1e-3) and greedy == expected_greedy


def test_rolling_loglikelihood_goes_on_beyond_the_length(ours, theirs):
    requests = [(text,) for text in (*TEXTS, "".join(TEXTS) * 3)]
    results = ours.loglikelihood_rolling(instances("loglikelihood_rolling", requests))
    expected = theirs.loglikelihood_rolling(instances("loglikelihood_rolling", requests))
    assert results == pytest.approx(expected, abs=1e-3)


def test_generate_until_is_generate(ours, theirs):
    requests = [(text, {"until": ["\n\n"], "max_gen_toks": 12}) for text in TEXTS]
    assert ours.generate_until(instances("generate_until", requests)) == theirs.generate_until(
        instances("generate_until", requests)
    )


def test_stop_strings_across_tokens_and_new_tokens_are_counted(ours, theirs):
    """A stop string that begins within one token and ends within another; as many tokens as asked for, and none of them
    after a stop."""
    whole = ours.generate_until(instances("generate_until", [(TEXTS[0], {"until": [], "max_gen_toks": 16})]))[0]
    ids = ours.tok_encode(TEXTS[0] + whole)[len(ours.tok_encode(TEXTS[0])) :]
    first, second = ours.tokenizer.decode(ids[4:5]), ours.tokenizer.decode(ids[5:6])
    across = first[-1] + second[0]
    for until, new_tokens in (([across], 16), ([across, whole[3:6]], 16), ([], 5), (["never to be seen"], 3)):
        requests = instances("generate_until", [(TEXTS[0], {"until": until, "max_gen_toks": new_tokens})])
        (answer,) = ours.generate_until(requests)
        assert [answer] == theirs.generate_until(requests)
        assert whole.startswith(answer) and not any(end in answer for end in until)


def test_generate_until_is_the_models_generate(ours, tiny, tokenizer):
    prompt = tokenizer(TEXTS[1], return_tensors="pt")
    expected = tiny.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt.input_ids.shape[1] :]
    requests = instances("generate_until", [(TEXTS[1], {"until": [], "max_gen_toks": 8, "do_sample": False})])
    assert ours.generate_until(requests) == [tokenizer.decode(expected, skip_special_tokens=True)]


def test_long_contexts_lose_tokens_on_the_left_and_say_so(ours, theirs, caplog):
    requests = [("".join(TEXTS) * 3, "import sys\n")]
    ((value, _),) = ours.loglikelihood(instances("loglikelihood", requests))
    assert "left" in caplog.text
    ((expected, _),) = theirs.loglikelihood(instances("loglikelihood", requests))
    assert value == pytest.approx(expected, abs=1e-3)


def test_long_prompts_lose_tokens_on_the_left_and_say_so(ours, theirs, caplog):
    requests = instances("generate_until", [("".join(TEXTS) * 3, {"until": [], "max_gen_toks": 6})])
    answers = ours.generate_until(requests)
    assert "Left truncation" in caplog.text
    assert answers == theirs.generate_until(requests)


def test_an_empty_prompt_is_the_token_that_begins_a_text(ours, tiny):
    """Beside others, too."""
    prompt = torch.tensor([[ours.prefix_token_id]])
    expected = tiny.generate(prompt, max_new_tokens=6, do_sample=False)[0, 1:]
    requests = [(text, {"until": [], "max_gen_toks": 6}) for text in (TEXTS[0], "")]
    assert ours.generate_until(instances("generate_until", requests))[1] == ours.tok_decode(expected)


@pytest.mark.parametrize("add_bos_token", [None, False, True])
def test_texts_are_tokenized_together_as_one_by_one(ours, add_bos_token, monkeypatch):
    """Contexts that end in white space or hold nothing else, that come again, and that begin with the first token."""
    start = ours.tokenizer.decode(ours.prefix_token_id)
    requests = [(before, after) for before in ("import ", "import", f"{start}import\n ", "x") for after in ("os", " os\n")]
    seen = []
    monkeypatch.setattr(ours, "add_bos_token", add_bos_token)
    monkeypatch.setattr(ours, "_loglikelihood_tokens", lambda encoded, **options: seen.append(encoded))
    for own in (ours.loglikelihood, super(TorchQwenLM, ours).loglikelihood):
        own(instances("loglikelihood", [*requests, ("", "os"), ("", f"{start}os")]))
    assert seen[0] == seen[1]


def test_a_continuation_beyond_the_length_is_refused(ours):
    with pytest.raises(ValueError, match="max_length"):
        ours.loglikelihood(instances("loglikelihood", [("a", "b c " * 100)]))


def test_it_is_registered_by_name():
    assert lm_eval.api.registry.get_model("torchqwen") is TorchQwenLM
