"""Padding takes no part in anything, and an answer does not depend on its neighbours."""

from __future__ import annotations

import itertools

import pytest
import torch
from support import (
    TOLERANCE,
    assert_rows_match,
    moe_config,
    padded,
    random_rows,
    reference_logits,
    reference_of,
    save_random,
)

import torchqwen_tpu

ROWS = random_rows((1, 4, 17, 9))


@pytest.fixture(scope="module")
def expected(small_reference):
    return [reference_logits(small_reference, row) for row in ROWS]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("columns", [17, 24])
def test_padded_batch(small, expected, side, columns):
    batch = padded(ROWS, side, columns)
    assert_rows_match(small(**batch).logits, batch["attention_mask"], expected)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_every_batch_size(small, expected, side, batch_size):
    batch = padded(ROWS[1 : 1 + batch_size], side, 24)
    assert_rows_match(small(**batch).logits, batch["attention_mask"], expected[1 : 1 + batch_size])


def test_padding_in_the_middle(small, expected):
    """Columns of padding between the tokens of a row, at another place in every row."""
    ids, mask = torch.zeros(4, 24, dtype=torch.long), torch.zeros(4, 24, dtype=torch.long)
    for number, row in enumerate(ROWS):
        where = torch.randperm(24, generator=torch.Generator().manual_seed(number))[: len(row)].sort().values
        ids[number, where], mask[number, where] = torch.tensor(row), 1
    assert_rows_match(small(input_ids=ids, attention_mask=mask).logits, mask, expected)


def test_padding_repeats_the_last_token_before_it(small):
    batch = padded(ROWS[1:2], "right", 8)
    logits = small(**batch).logits.cpu()
    assert torch.equal(logits[0, 4:], logits[0, 3].expand(4, -1))
    batch = padded(ROWS[1:2], "left", 8)
    assert not small(**batch).logits.cpu()[0, :4].any()


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("columns", [0, 24, 100], ids=["unpadded", "bucket of 64", "right-padded beyond the bucket"])
def test_prompts_shorter_than_the_convolution(small, small_reference, length, columns):
    (row,) = random_rows((length,), seed=length)
    batch = padded([row], "right", columns)
    output, expected = small(**batch), reference_logits(small_reference, [*row, 7])
    assert_rows_match(output.logits, batch["attention_mask"], [expected[:-1]])
    following = small(torch.tensor([[7]]), cache=output.cache).logits[0, 0]
    torch.testing.assert_close(following.cpu(), expected[-1], atol=TOLERANCE, rtol=0)


def test_any_order_of_neighbours(small, expected):
    for order in itertools.islice(itertools.permutations(range(4)), 0, 24, 5):
        batch = padded([ROWS[index] for index in order], "left")
        assert_rows_match(small(**batch).logits, batch["attention_mask"], [expected[index] for index in order])


def test_equal_prompts_give_one_answer(small, expected):
    logits = small(torch.tensor([ROWS[2]] * 3)).logits.cpu()
    assert_rows_match(logits, torch.ones(3, 17), [expected[2]] * 3)
    torch.testing.assert_close(logits, logits[:1].expand(3, -1, -1), atol=1e-6, rtol=0)


def test_all_tokens_to_the_same_experts(tmp_path):
    """No token is dropped, however uneven the load."""
    reference = reference_of(save_random(moe_config(), tmp_path))
    with torch.no_grad():
        reference.model.embed_tokens.weight[:, 0] = 40.0  # positive in every layer, and all that the routers look at
        for layer in reference.model.layers:
            layer.mlp.gate.weight.zero_()
            layer.mlp.gate.weight[:, 0] = torch.arange(8.0)
        reference.save_pretrained(tmp_path)
        routed = reference(torch.tensor(ROWS[2:3]), output_router_logits=True).router_logits
    assert all((logits.topk(3).indices == torch.tensor([7, 6, 5])).all() for logits in routed)
    model = torchqwen_tpu.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32")
    batch, expected = padded(ROWS, "left"), [reference_logits(reference, row) for row in ROWS]
    assert_rows_match(model(**batch).logits, batch["attention_mask"], expected)
