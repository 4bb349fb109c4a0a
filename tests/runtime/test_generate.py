"""generate(): stopping, lengths, what transformers' users pass to it, and continuing from a cache."""

from __future__ import annotations

import pytest
import torch
from support import TOLERANCE, padded, random_rows, reference_tokens
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation import MinLengthLogitsProcessor
from transformers.generation.streamers import BaseStreamer

NEW = 12
ROWS = random_rows((3, 9, 6), seed=20)
close = {"atol": TOLERANCE, "rtol": 0}


@pytest.fixture(scope="module")
def batch():
    return padded(ROWS, "left")


@pytest.fixture(scope="module")
def expected(small_reference) -> list[list[int]]:
    """The greedy continuation of every row alone."""
    return [reference_tokens(small_reference, row, NEW) for row in ROWS]


@pytest.fixture
def both(small, small_reference):
    """The answers of ours and of transformers to one call."""

    def answers(*args, **kwargs):
        arguments = {"max_new_tokens": NEW, "do_sample": False, **kwargs}
        return small.generate(*args, **arguments), small_reference.generate(*args, **arguments)

    return answers


def test_greedy(small, batch, expected, both):
    own, reference = both(**batch)
    assert torch.equal(own, reference)
    assert own[:, -NEW:].tolist() == expected
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False)
    assert torch.equal(small.generate(batch["input_ids"], config, attention_mask=batch["attention_mask"]), own)


@pytest.mark.parametrize("side", ["right", "middle"])
def test_padding_elsewhere_gives_the_unpadded_answer(small, expected, side):
    if side == "right":
        batch = padded(ROWS, "right")
    else:
        halves = [padded([row[:2] for row in ROWS]), padded([row[2:] for row in ROWS], "left", 12)]
        batch = {name: torch.cat([half[name] for half in halves], dim=1) for name in halves[0]}
    assert small.generate(**batch, max_new_tokens=NEW, do_sample=False)[:, -NEW:].tolist() == expected


def test_output_lies_where_the_input_lay(small, batch):
    there = {name: value.to(small.device) for name, value in batch.items()}
    own = small.generate(**there, max_new_tokens=NEW, do_sample=False)
    assert own.device == small.device
    assert torch.equal(own.cpu(), small.generate(**batch, max_new_tokens=NEW, do_sample=False))


# Stopping and lengths


def test_any_stop_token_ends_a_row_and_padding_follows(batch, expected, both):
    """Rows stop at different tokens of the list, one of them at once, and the others go on."""
    stops = [expected[0][0], expected[2][5]]
    own, reference = both(**batch, eos_token_id=stops, pad_token_id=0)
    assert torch.equal(own, reference)
    assert own[0, 9:].tolist() == [stops[0]] + [0] * (own.shape[1] - 10)


def test_more_stop_tokens_than_the_device_has_room_for(batch, expected, both):
    stops = sorted({*range(9), expected[0][2]})
    own, reference = both(**batch, eos_token_id=stops, pad_token_id=0)
    assert torch.equal(own, reference)


def test_all_rows_stop_early(batch, expected, both):
    own, reference = both(**batch, eos_token_id=[row[3] for row in expected], pad_token_id=0)
    assert torch.equal(own, reference)
    assert own.shape[1] < 9 + NEW


def test_stop_tokens_of_the_generation_config(tiny, tokenizer):
    """Those of generation_config.json and the tokenizer's own."""
    assert set(tiny.generation_config.eos_token_id) == {4095, 4093}
    assert tokenizer.eos_token_id in tiny.generation_config.eos_token_id


def test_pad_token_is_the_first_stop_token_by_default(batch, expected, both):
    own, reference = both(**batch, eos_token_id=[expected[0][0], expected[2][5]])
    assert torch.equal(own, reference)


@pytest.mark.parametrize(
    "lengths",
    [{"max_new_tokens": 1}, {"max_new_tokens": 9}, {"max_length": 14, "max_new_tokens": None}, {"max_length": 11}],
    ids=str,
)
def test_lengths(batch, both, lengths):
    """max_new_tokens wins over max_length."""
    own, reference = both(**batch, **lengths)
    assert torch.equal(own, reference)


def test_twenty_new_tokens_by_default(batch, both):
    own, reference = both(**batch, max_new_tokens=None)
    assert own.shape[1] == 9 + 20
    assert torch.equal(own, reference)


def test_min_new_tokens(batch, expected, both):
    own, reference = both(**batch, min_new_tokens=6, eos_token_id=[row[1] for row in expected], pad_token_id=0)
    assert torch.equal(own, reference)
    assert own.shape[1] >= 9 + 6


# What looks at every token


class Forbid(LogitsProcessor):
    """Another token than the likeliest, by a rule that looks at the sequence so far."""

    def __call__(self, input_ids, scores):
        assert input_ids.shape[0] == scores.shape[0]
        return scores.scatter(1, input_ids[:, -2:], -float("inf"))


class StopAfter(StoppingCriteria):
    def __init__(self, columns: int):
        self.columns = columns

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.columns)


class Collect(BaseStreamer):
    def __init__(self):
        self.pieces, self.ended = [], False

    def put(self, value):
        self.pieces.append(value.clone())

    def end(self):
        self.ended = True


@pytest.mark.parametrize(
    "arguments",
    [
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 1},
        {"logits_processor": LogitsProcessorList([Forbid()])},
        {"prefix_allowed_tokens_fn": lambda row, ids: list(range(10 + row, 60))},
        {"suppress_tokens": list(range(40))},
        {"stopping_criteria": StoppingCriteriaList([StopAfter(15)])},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_processors_and_criteria(batch, expected, both, arguments):
    own, reference = both(**batch, **arguments)
    assert torch.equal(own, reference)
    assert own.shape[1] < 9 + NEW or own[:, 9:].tolist() != expected


@pytest.mark.parametrize("arguments", [
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.5},
    {"min_new_tokens": 9},
    {"min_length": 17},
    {"min_new_tokens": 6, "repetition_penalty": 1.2},
], ids=str)  # fmt: skip
def test_penalties_on_the_device(batch, expected, both, arguments, monkeypatch):
    """As in transformers; the host is not asked for every token."""
    monkeypatch.setattr("torchqwen_tpu.runtime.generation._DecodeLoop.decode_one", None)
    own, reference = both(**batch, **arguments, eos_token_id=[expected[0][2], expected[2][4]], pad_token_id=0)
    assert torch.equal(own, reference)


def test_other_stop_tokens_than_the_processors(batch, expected, both):
    """A shortest length that forbids other tokens than those that end a text."""
    processors = LogitsProcessorList([MinLengthLogitsProcessor(15, expected[0][1])])
    own, reference = both(**batch, logits_processor=processors, eos_token_id=expected[2][5], pad_token_id=0)
    assert torch.equal(own, reference)


@pytest.mark.parametrize("processors", [[], [Forbid()]], ids=["device", "host"])
def test_streamer(small, processors):
    streamer, ids = Collect(), torch.tensor(ROWS[1:2])
    own = small.generate(ids, max_new_tokens=NEW, do_sample=False, streamer=streamer, logits_processor=processors)
    assert torch.equal(torch.cat([piece.flatten() for piece in streamer.pieces]), own[0])
    assert [piece.numel() for piece in streamer.pieces] == [9] + [1] * NEW
    assert streamer.ended


@pytest.mark.parametrize("processors", [[], [Forbid()]], ids=["plain", "processed"])
def test_scores_and_logits(batch, both, processors):
    own, reference = both(
        **batch, return_dict_in_generate=True, output_scores=True, output_logits=True, logits_processor=processors
    )
    assert torch.equal(own.sequences, reference.sequences)
    assert len(own.scores) == len(own.logits) == NEW
    torch.testing.assert_close(torch.stack(own.scores), torch.stack(reference.scores), **close)
    torch.testing.assert_close(torch.stack(own.logits), torch.stack(reference.logits), **close)


def test_return_dict(batch, both):
    own, reference = both(**batch, return_dict_in_generate=True)
    assert type(own) is type(reference)
    assert torch.equal(own.sequences, reference.sequences)
    assert own.scores is None and own.logits is None
    assert own.cache.get_seq_length() == reference.cache.get_seq_length() == 9 + NEW - 1


@pytest.mark.parametrize("with_ids", [False, True])
def test_inputs_embeds(small_reference, batch, both, with_ids):
    embeddings = small_reference.get_input_embeddings()(batch["input_ids"]).detach()
    arguments = {**batch, "inputs_embeds": embeddings}
    own, reference = both(**(arguments if with_ids else {**arguments, "input_ids": None}))
    assert torch.equal(own, reference)
    assert own.shape[1] == NEW + 9 * with_ids


# Continuing


def second_turn(sequences, mask, seed: int) -> dict[str, torch.Tensor]:
    """The whole text of a second turn: the first one's sequences, then new tokens of other lengths."""
    more = padded(random_rows((5, 2, 4), seed=seed), "left")
    return {
        "input_ids": torch.cat([sequences, more["input_ids"]], dim=1),
        "attention_mask": torch.cat([mask, more["attention_mask"]], dim=1),
    }


def unpadded(batch) -> list[list[int]]:
    return [ids[mask.bool()].tolist() for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]


@pytest.mark.parametrize("stopping", [False, True], ids=["all to the end", "rows stop early"])
@pytest.mark.parametrize("processors", [[], [Forbid()]], ids=["device", "host"])
def test_turns(small, small_reference, batch, expected, stopping, processors):
    """From a returned cache, with padding and what follows a stop token in the middle: as a fresh run."""
    arguments = {"do_sample": False, "pad_token_id": 0, "logits_processor": processors}
    stops = [expected[0][0], expected[2][5]] if stopping else None
    first = small.generate(**batch, max_new_tokens=NEW, eos_token_id=stops, return_dict_in_generate=True, **arguments)
    mask = torch.cat([batch["attention_mask"], (first.sequences[:, 9:] != 0).long()], dim=1)
    turn = second_turn(first.sequences, mask, seed=21)
    second = small.generate(**turn, cache=first.cache, max_new_tokens=NEW, **arguments)
    want = [reference_tokens(small_reference, row, NEW, logits_processor=processors) for row in unpadded(turn)]
    assert second[:, -NEW:].tolist() == want
    mask = torch.cat([turn["attention_mask"], torch.ones(3, NEW, dtype=torch.long)], dim=1)
    third = second_turn(second, mask, seed=22)
    answer = small.generate(**third, cache=first.cache, max_new_tokens=4, **arguments)
    want = [reference_tokens(small_reference, row, 4, logits_processor=processors) for row in unpadded(third)]
    assert answer[:, -4:].tolist() == want


@pytest.mark.parametrize("beams", [1, 3])
def test_prefilled_cache(small, beams):
    """A cache that forward() filled, with the whole text or the new part alone."""
    ids = torch.tensor(ROWS[1:2])
    arguments = {"max_new_tokens": NEW, "do_sample": False, "num_beams": beams}
    fresh = small.generate(ids, **arguments)

    def prefilled():
        return small(ids[:, :6].repeat(beams, 1)).cache

    assert torch.equal(small.generate(ids, cache=prefilled(), **arguments), fresh)
    rest = small.generate(ids[:, 6:], cache=prefilled(), attention_mask=torch.ones_like(ids), **arguments)
    assert torch.equal(rest[:, 3:], fresh[:, 9:])


def test_past_key_values_is_another_name_of_cache(small, batch, expected):
    cache = small(batch["input_ids"][:, :7], attention_mask=batch["attention_mask"][:, :7]).cache
    answer = small.generate(**batch, past_key_values=cache, max_new_tokens=NEW, do_sample=False)
    assert answer[:, -NEW:].tolist() == expected


def test_without_use_cache_the_answer_is_the_same(small, batch, expected):
    answer = small.generate(**batch, use_cache=False, max_new_tokens=NEW, do_sample=False)
    assert answer[:, -NEW:].tolist() == expected


# Several sequences a prompt


BEAMS = [
    {},
    {"num_return_sequences": 3},
    {"length_penalty": -1.0},
    {"length_penalty": 2.0, "early_stopping": True},
    {"repetition_penalty": 1.5},
]


@pytest.mark.parametrize("arguments", BEAMS, ids=str)
def test_beams(batch, expected, both, arguments):
    """Two prompts of three beams, which end at different lengths."""
    two = {name: value[1:] for name, value in batch.items()}
    stops = {"eos_token_id": [expected[1][4], expected[2][6], 11], "pad_token_id": 0}
    own, reference = both(**two, num_beams=3, **stops, **arguments)
    assert torch.equal(own, reference)


def test_beam_scores(batch, both):
    two = {name: value[1:] for name, value in batch.items()}
    own, reference = both(**two, num_beams=3, return_dict_in_generate=True, output_scores=True, output_logits=True)
    assert torch.equal(own.sequences, reference.sequences)
    assert torch.equal(own.beam_indices, reference.beam_indices)
    torch.testing.assert_close(own.sequences_scores, reference.sequences_scores, **close)


def test_beams_without_use_cache(small, batch):
    arguments = {"max_new_tokens": NEW, "do_sample": False, "num_beams": 3}
    two = {name: value[1:] for name, value in batch.items()}
    assert torch.equal(small.generate(**two, use_cache=False, **arguments), small.generate(**two, **arguments))


def test_inputs_embeds_with_beams(small_reference, both):
    ids = torch.tensor([ROWS[1][:6], ROWS[2]])
    own, reference = both(inputs_embeds=small_reference.get_input_embeddings()(ids).detach(), num_beams=3)
    assert torch.equal(own, reference)
