"""Continuing from a cache equals one run over the whole text, and every sequence keeps its own state."""

from __future__ import annotations

import copy

import pytest
import torch
from support import TOLERANCE, padded, random_rows, reference_logits

(LONG,) = random_rows((20,), seed=3)
EXACT = 1e-5


@pytest.fixture(scope="module")
def whole(small):
    return small(torch.tensor([LONG])).logits[0].cpu()


def test_whole_matches_transformers(small_reference, whole):
    torch.testing.assert_close(whole, reference_logits(small_reference, LONG), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("split", range(1, 20))
def test_a_prompt_split_anywhere(small, whole, split):
    first = small(torch.tensor([LONG[:split]]))
    assert first.cache.get_seq_length() == split
    second = small(torch.tensor([LONG[split:]]), cache=first.cache)
    logits = torch.cat([first.logits, second.logits], dim=1)[0].cpu()
    torch.testing.assert_close(logits, whole, atol=EXACT, rtol=0)
    assert second.cache.get_seq_length() == 20


def test_token_by_token(small, whole):
    """The first chunk is one token: it starts from zero because the cache is empty, not because of its shape."""
    cache, logits = None, []
    for token in LONG[:6]:
        output = small(torch.tensor([[token]]), cache=cache)
        cache = output.cache
        logits.append(output.logits[0, 0].cpu())
    torch.testing.assert_close(torch.stack(logits), whole[:6], atol=EXACT, rtol=0)


def test_rows_of_different_age_in_one_step(small, small_reference):
    """One sequence starts where the others continue, with one token and with several."""
    rows = random_rows((6, 3, 9), seed=4)
    cache = small.new_cache(3)
    first = torch.tensor([[1, 1, 1, 1, 1, 0], [0] * 6, [0, 0, 1, 1, 1, 1]])
    ids = torch.zeros(3, 6, dtype=torch.long)
    ids[0, :5], ids[2, 2:] = torch.tensor(rows[0][:5]), torch.tensor(rows[2][:4])
    with pytest.raises(ValueError, match="row 1"):
        small(ids, attention_mask=first, cache=small.new_cache(3))
    ids[1, 3], first[1, 3] = rows[1][0], 1
    small(ids, attention_mask=first, cache=cache)
    rest = padded([rows[0][5:], rows[1][1:], rows[2][4:]], "right")
    logits = small(**rest, cache=cache).logits.cpu()
    for number, row in enumerate(rows):
        expected = reference_logits(small_reference, row)[-1]
        torch.testing.assert_close(logits[number, -1], expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("sides", [("left", "left"), ("right", "right"), ("right", "left")], ids="-".join)
def test_second_turn_with_padding_in_the_middle(small, small_reference, sides):
    """Where transformers lets padding decay the state, the answer of the unpadded text."""
    first, second = random_rows((2, 11, 7), seed=5), random_rows((8, 1, 4), seed=6)
    batch, more = padded(first, sides[0]), padded(second, sides[1])
    output = small(**batch)
    mask = torch.cat([batch["attention_mask"], more["attention_mask"]], dim=1)
    logits = small(more["input_ids"], attention_mask=mask, cache=output.cache).logits.cpu()
    for number, (start, rest) in enumerate(zip(first, second, strict=True)):
        expected = reference_logits(small_reference, start + rest)[len(start) :]
        own = logits[number][more["attention_mask"][number].bool()]
        torch.testing.assert_close(own, expected, atol=TOLERANCE, rtol=0)


def test_mask_of_the_new_part_alone(small):
    first, second = random_rows((3, 6), seed=7), random_rows((2, 5), seed=8)
    batch, more = padded(first, "left"), padded(second, "left")
    whole_mask = torch.cat([batch["attention_mask"], more["attention_mask"]], dim=1)
    one = small(more["input_ids"], attention_mask=whole_mask, cache=small(**batch).cache).logits
    other = small(**more, cache=small(**batch).cache).logits
    assert torch.equal(one.cpu(), other.cpu())


def test_reorder_takes_all_three_states(small, small_reference):
    """As beams do: pages, convolution window and recurrent state follow, and a row may be taken twice or not at all."""
    rows = random_rows((5, 12, 3, 8), seed=9)
    cache = small(**padded(rows, "left")).cache
    order = [2, 0, 0, 3]
    cache.reorder_cache(torch.tensor(order))
    second = random_rows((4, 4, 4, 4), seed=10)
    logits = small(torch.tensor(second), cache=cache).logits.cpu()
    for number, old in enumerate(order):
        expected = reference_logits(small_reference, rows[old] + second[number])[-4:]
        torch.testing.assert_close(logits[number], expected, atol=TOLERANCE, rtol=0)


def test_a_copy_is_independent(small, whole):
    """A copy goes on from where it was made, whatever happens to the original."""
    cache = small(torch.tensor([LONG[:8]])).cache
    kept = copy.deepcopy(cache)
    small(torch.tensor([[5, 6, 7]]), cache=cache)
    assert (cache.get_seq_length(), kept.get_seq_length()) == (11, 8)
    logits = small(torch.tensor([LONG[8:]]), cache=kept).logits[0].cpu()
    torch.testing.assert_close(logits, whole[8:], atol=EXACT, rtol=0)


def test_a_cache_cannot_be_cropped(small):
    with pytest.raises(NotImplementedError, match="copy"):
        small(torch.tensor([LONG[:8]])).cache.crop(4)


def test_across_a_page_boundary(small, small_reference):
    """A chunk that starts in one page of keys and values and ends in the next, in a cache that has to grow for it."""
    (row,) = random_rows((80,), seed=11)
    cache = small(torch.tensor([row[:60]]), logits_to_keep=1).cache
    logits = small(torch.tensor([row[60:]]), cache=cache).logits[0].cpu()
    torch.testing.assert_close(logits, reference_logits(small_reference, row)[60:], atol=TOLERANCE, rtol=0)


def test_prefill_in_chunks(small_folder, small_reference):
    """`prefill_chunk` cuts a batch into steps in the middle of its rows; the answer stays."""
    import torchqwen_tpu

    model = torchqwen_tpu.AutoModelForCausalLM.from_pretrained(
        small_folder, dtype="float32", runtime=torchqwen_tpu.RuntimeConfig(prefill_chunk=16)
    )
    rows = random_rows((20, 5, 9), seed=12)
    batch = padded(rows, "left")
    logits = model(**batch, logits_to_keep=2).logits.cpu()
    for number, row in enumerate(rows):
        torch.testing.assert_close(logits[number], reference_logits(small_reference, row)[-2:], atol=TOLERANCE, rtol=0)
