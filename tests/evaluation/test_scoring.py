"""Scores of given tokens: those of one request at a time in float32, whatever they are batched with."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import random_rows

from torchqwen_tpu.evaluation import score, score_requests, scoring
from torchqwen_tpu.evaluation.batches import plan_batches
from torchqwen_tpu.runtime.graph import compilations


@pytest.fixture(scope="module")
def rows():
    return random_rows([1, 2, 40, 7, 90, 3])


def expected_logits(reference, tokens) -> torch.Tensor:
    """[n - 1, vocabulary] log-probabilities of what follows each token but the last."""
    with torch.no_grad():
        return reference(torch.tensor([tokens])).logits[0, :-1].float().log_softmax(-1)


def test_every_token_but_the_first(small, small_reference, rows):
    for tokens, scored in zip(rows, score(small, rows, top_k=3), strict=True):
        assert scored.token_ids.tolist() == tokens[1:]
        logprobs = expected_logits(small_reference, tokens)
        own = logprobs[torch.arange(len(tokens) - 1), tokens[1:]]
        np.testing.assert_allclose(scored.logprob, own, atol=1e-4)
        np.testing.assert_array_equal(scored.rank, (logprobs > own[:, None]).sum(-1))
        np.testing.assert_allclose(scored.entropy, -(logprobs.exp() * logprobs).sum(-1), atol=1e-4)
        best = logprobs.topk(3)
        np.testing.assert_allclose(scored.top_logprobs, best.values, atol=1e-4)
        np.testing.assert_array_equal(scored.top_ids, best.indices)


def test_order_and_batch_size_change_nothing(small, rows):
    whole = score(small, rows)
    for batch_size, order in ((1, [3, 0, 5, 1, 4, 2]), (4, [5, 4, 3, 2, 1, 0])):
        again = score(small, [rows[number] for number in order], batch_size=batch_size)
        for number, scored in zip(order, again, strict=True):
            np.testing.assert_allclose(scored.logprob, whole[number].logprob, atol=1e-5)


def test_requests_share_contexts(small, small_reference):
    """Continuations of one context, of another one, of a context of one token, and an empty one."""
    context, other, *continuations = random_rows([30, 1, 5, 1, 9, 4])
    requests = [(context, part) for part in continuations] + [(other, continuations[0]), (context, [])]
    for (before, after), scored in zip(requests, score_requests(small, requests), strict=True):
        logprobs = expected_logits(small_reference, before + after)[len(before) - 1 :]
        np.testing.assert_allclose(scored.logprob, logprobs[torch.arange(len(after)), after], atol=1e-4)
        assert scored.is_greedy == (logprobs.argmax(-1).tolist() == after)


@pytest.mark.parametrize("continuations", [[[3], [5], [7]], [[3], [5, 6]], [[4, 4], [4, 4]]], ids=str)
def test_short_continuations_of_one_context(small, small_reference, continuations):
    """One token each is scored where the context ends, without a step of its own; equal ones are told apart."""
    (context,) = random_rows([9])
    for part, scored in zip(continuations, score_requests(small, [(context, part) for part in continuations]), strict=True):
        logprobs = expected_logits(small_reference, context + part)[len(context) - 1 :]
        np.testing.assert_allclose(scored.logprob, logprobs[torch.arange(len(part)), part], atol=1e-4)


def test_batches_of_one_context_each(small, rows):
    """More continuations of a context than a batch holds."""
    requests = [(rows[3], row) for row in rows] + [(rows[2], rows[1])]
    together, apart = score_requests(small, requests), score_requests(small, requests, batch_size=2)
    for one, other in zip(together, apart, strict=True):
        np.testing.assert_allclose(one.logprob, other.logprob, atol=1e-5)


def test_several_batches_in_flight(small, rows, monkeypatch):
    monkeypatch.setattr(scoring, "STEP_TOKENS", (64, 128))
    for scored, expected in zip(score(small, rows * 4, batch_size=3), score(small, rows) * 4, strict=True):
        np.testing.assert_allclose(scored.logprob, expected.logprob, atol=1e-5)


def test_batches_hold_every_request_once_and_equal_contexts_together():
    requests = [([1, number // 4], [2] * (number % 5 + 1)) for number in range(50)]
    batches = plan_batches(requests, 9)
    assert sorted(number for batch in batches for group in batch for number in group) == list(range(50))
    assert all(sum(map(len, batch)) <= 9 for batch in batches)
    groups = [group for batch in batches for group in batch]
    assert len(groups) == 13 and all(len({number // 4 for number in group}) == 1 for group in groups)


def test_routers_of_every_layer(small, small_reference):
    """Of the tokens that were read: those before the scored ones, in a shared context and in a text."""
    text, context = random_rows([12, 6])
    requests = [(text[:1], text[1:]), (context, [5, 6]), (context, [7])]
    for (before, after), scored in zip(requests, score_requests(small, requests, routers=True), strict=True):
        with torch.no_grad():
            logits = small_reference(torch.tensor([before + after]), output_router_logits=True).router_logits
        assert len(logits) == len(scored.experts) == len(scored.router_weights)
        for layer, experts, weights in zip(logits, scored.experts, scored.router_weights, strict=True):
            best = layer[len(before) - 1 : -1].float().softmax(-1).topk(3)
            np.testing.assert_array_equal(experts, best.indices)
            np.testing.assert_allclose(weights, best.values / best.values.sum(-1, keepdim=True), atol=1e-5)


def test_greedy_tokens_rank_first(small, rows):
    prompt = torch.tensor([rows[3]])
    output = small.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)[0].tolist()
    (scored,) = score_requests(small, [(rows[3], output[len(rows[3]) :])])
    assert scored.is_greedy


def test_longer_than_a_step(small_folder, small, rows):
    """A request that takes several steps of `prefill_chunk` tokens."""
    import torchqwen_tpu

    runtime = torchqwen_tpu.RuntimeConfig(prefill_chunk=32)
    chunked = torchqwen_tpu.AutoModelForCausalLM.from_pretrained(small_folder, dtype="float32", runtime=runtime)
    for scored, expected in zip(score(chunked, rows), score(small, rows), strict=True):
        np.testing.assert_allclose(scored.logprob, expected.logprob, atol=1e-4)


def test_nothing_compiles_after_warm_up(small, rows):
    score(small, rows, batch_size=4)
    before = compilations()
    score(small, [row[::-1] for row in rows] + rows, batch_size=4)
    assert compilations() == before


def test_texts_go_through_the_tokenizer(tiny, tokenizer):
    text = "import os\nimport sys\n"
    (by_text,), (by_ids,) = score(tiny, [text], tokenizer=tokenizer), score(tiny, [tokenizer(text).input_ids])
    np.testing.assert_array_equal(by_text.logprob, by_ids.logprob)


@pytest.mark.parametrize(
    "entries, kwargs, message",
    [
        (["text"], {}, "tokenizer"),
        ([[]], {}, "empty"),
        ([[1, 10**6]], {}, "vocabulary"),
        ([[1, 2]], {"batch_size": 0}, "batch_size"),
    ],
)
def test_bad_input(small, entries, kwargs, message):
    with pytest.raises(ValueError, match=message):
        score(small, entries, **kwargs)


def test_nothing_to_score(small):
    assert score(small, []) == []
