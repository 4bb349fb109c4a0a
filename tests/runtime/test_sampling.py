"""Sampling: one seed gives one answer wherever a sequence runs, and the parameters mean what transformers means."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import padded, random_rows
from transformers import LogitsProcessor

from torchqwen_tpu.runtime.sampling import choose_on_host

NEW = 12
ROWS = random_rows((3, 9, 6), seed=20)
SAMPLING = {"do_sample": True, "max_new_tokens": NEW, "temperature": 1.3}


class Nothing(LogitsProcessor):
    """Changes nothing, and makes every token pass through the host."""

    def __call__(self, input_ids, scores):
        return scores


@pytest.fixture
def tokens(small):
    """New tokens of a batch of rows, a list a row."""

    def sample(rows=ROWS, **kwargs):
        answer = small.generate(**padded(rows, "left"), **{**SAMPLING, **kwargs})
        return answer[:, max(map(len, rows)) :].tolist()

    return sample


def test_a_seed_decides(tokens):
    assert tokens(seed=1) == tokens(seed=1)
    assert tokens(seed=1) != tokens(seed=2)


def test_alone_or_in_any_row_of_a_batch(tokens):
    together = tokens(seed=5)
    assert tokens(ROWS[::-1], seed=5) == together[::-1]
    for row, expected in zip(ROWS, together, strict=True):
        assert tokens([row], seed=5) == [expected]


PARAMETERS = [
    {},
    {"top_k": 0},
    {"top_k": 5},
    {"top_k": 0, "top_p": 0.6},
    {"top_k": 0, "min_p": 0.1},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.05, "temperature": 0.7},
]


@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
def test_host_and_device_agree(tokens, parameters):
    assert tokens(seed=7, logits_processor=[Nothing()], **parameters) == tokens(seed=7, **parameters)


@pytest.mark.parametrize("parameters", PARAMETERS[-1:], ids=str)
def test_tokens_are_among_those_that_transformers_keeps(small, small_reference, parameters):
    """Every sampled token has a score in transformers' processed scores for the same sequence."""
    ids = torch.tensor(ROWS[1:2])
    own = small.generate(ids, seed=8, **{**SAMPLING, **parameters})
    for column in range(9, own.shape[1]):
        step = small_reference.generate(
            own[:, :column], **{**SAMPLING, **parameters, "max_new_tokens": 1},
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        assert step.scores[0][0, own[0, column]] > -float("inf")


def test_one_candidate_is_greedy(small, tokens):
    greedy = small.generate(**padded(ROWS, "left"), max_new_tokens=NEW, do_sample=False)[:, -NEW:].tolist()
    assert tokens(top_k=1, seed=3) == greedy
    assert tokens(temperature=1e-4, seed=3) == greedy


def test_a_seed_for_every_prompt(tokens):
    together = tokens(seed=[11, 12, 13])
    for number, row in enumerate(ROWS):
        assert tokens([row], seed=11 + number) == [together[number]]
    assert tokens([ROWS[0]] * 3, seed=[1, 2, 1])[0] == tokens([ROWS[0]] * 3, seed=[1, 2, 1])[2]


def test_too_few_seeds(tokens):
    with pytest.raises(ValueError, match="seed"):
        tokens(seed=[1, 2])


def test_returned_sequences_differ(tokens):
    """And a prompt's are the same whatever it is batched with."""
    answers = tokens([ROWS[1]], seed=4, num_return_sequences=3)
    assert len({tuple(answer) for answer in answers}) == 3
    assert tokens([ROWS[1]], seed=4) == answers[:1]
    assert tokens(ROWS[1:], seed=4, num_return_sequences=2)[:2] == answers[:2]


def test_torch_manual_seed(tokens):
    torch.manual_seed(0)
    first = tokens()
    assert tokens() != first
    torch.manual_seed(0)
    assert tokens() == first


def test_rows_without_a_seed_differ(tokens):
    answers = tokens([ROWS[1]] * 3)
    assert len({tuple(answer) for answer in answers}) == 3


def test_sampled_beams(small):
    """Drawn by transformers: reproducible through torch's generator, and `seed` says so."""
    ids = torch.tensor(ROWS[1:2])
    torch.manual_seed(0)
    first = small.generate(ids, num_beams=3, **SAMPLING)
    torch.manual_seed(0)
    assert torch.equal(small.generate(ids, num_beams=3, **SAMPLING), first)
    with pytest.raises(ValueError, match="manual_seed"):
        small.generate(ids, num_beams=3, seed=1, **SAMPLING)


def test_distribution():
    """Frequencies of the noise-and-maximum choice are those of the softmax."""
    scores = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    count = 4096
    chosen = choose_on_host(np.tile(scores, (count, 1)), np.arange(count, dtype=np.int32), np.zeros(count, np.int32))
    frequency = np.bincount(chosen, minlength=4) / count
    np.testing.assert_allclose(frequency, np.exp(scores), atol=4 * np.sqrt(0.25 / count))
