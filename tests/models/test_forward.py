"""The arguments and the outputs of forward(), against transformers on the same checkpoint."""

from __future__ import annotations

import pytest
import torch
from support import TOLERANCE, padded, random_rows
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

close = {"atol": TOLERANCE, "rtol": 0}


@pytest.fixture(scope="module")
def batch():
    return padded(random_rows((5, 9, 16, 12)), "left")


@pytest.fixture(scope="module")
def ids():
    return torch.tensor(random_rows((16, 16, 16)))


@pytest.fixture(scope="module")
def expected(small_reference, ids):
    with torch.no_grad():
        return small_reference(ids, labels=ids, output_hidden_states=True)


def test_output_type_and_device(small, ids, expected):
    output = small(ids)
    assert isinstance(output, MoeCausalLMOutputWithPast)
    assert output.logits.device == small.device
    assert output.logits.shape == expected.logits.shape
    assert output.loss is None and output.hidden_states is None
    torch.testing.assert_close(output.logits.cpu(), expected.logits, **close)


def test_inputs_on_the_device(small, batch):
    there = {name: value.to(small.device) for name, value in batch.items()}
    assert torch.equal(small(**there).logits.cpu(), small(**batch).logits.cpu())


def test_hidden_states(small, ids, expected):
    hidden = small(ids, output_hidden_states=True).hidden_states
    assert len(hidden) == len(expected.hidden_states) == small.config.num_hidden_layers + 1
    for own, other in zip(hidden, expected.hidden_states, strict=True):
        assert own.device == small.device
        torch.testing.assert_close(own.cpu(), other, **close)


def test_hidden_states_do_not_depend_on_logits_to_keep(small, ids, expected):
    output = small(ids, output_hidden_states=True, logits_to_keep=1)
    assert output.logits.shape[1] == 1
    torch.testing.assert_close(output.hidden_states[-1].cpu(), expected.hidden_states[-1], **close)


@pytest.mark.parametrize("keep", [1, 5, 16, torch.tensor([0, 3, 15]), torch.tensor([15, 2])], ids=str)
def test_logits_to_keep(small, small_reference, ids, keep):
    with torch.no_grad():
        expected = small_reference(ids, logits_to_keep=keep).logits
    torch.testing.assert_close(small(ids, logits_to_keep=keep).logits.cpu(), expected, **close)


def test_loss(small, ids, expected):
    torch.testing.assert_close(small(ids, labels=ids).loss.cpu(), expected.loss, **close)


def test_loss_of_a_padded_batch(small, small_reference, batch):
    """That of the sequences alone: padding predicts nothing and is not predicted."""
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    rows = [ids[mask.bool()][None] for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    with torch.no_grad():
        total = sum(small_reference(row, labels=row).loss * (row.numel() - 1) for row in rows)
    expected = total / sum(row.numel() - 1 for row in rows)
    torch.testing.assert_close(small(**batch, labels=labels).loss.cpu(), expected, **close)
    torch.testing.assert_close(small(**batch, labels=labels.to(small.device)).loss.cpu(), expected, **close)


@pytest.mark.parametrize("on_device", [False, True])
def test_inputs_embeds(small, small_reference, ids, expected, on_device):
    embeddings = small_reference.get_input_embeddings()(ids).detach()
    embeddings = embeddings.to(small.device) if on_device else embeddings
    torch.testing.assert_close(small(inputs_embeds=embeddings).logits.cpu(), expected.logits, **close)


def test_own_embeddings_as_inputs_embeds(small, ids, expected):
    embeddings = small.get_input_embeddings()(ids.to(small.device))
    torch.testing.assert_close(small(inputs_embeds=embeddings).logits.cpu(), expected.logits, **close)


def test_return_dict_false(small, ids, expected):
    loss, logits, cache = small(ids, labels=ids, return_dict=False)
    torch.testing.assert_close(loss.cpu(), expected.loss, **close)
    torch.testing.assert_close(logits.cpu(), expected.logits, **close)
    assert cache.get_seq_length() == 16


def test_use_cache(small, ids):
    assert small(ids, use_cache=False).cache is None
    assert small(ids, use_cache=True).cache is not None
    assert small(ids).cache is not None


@pytest.mark.filterwarnings("ignore")
def test_past_key_values_is_another_name_of_cache(small, ids, expected):
    first = small(ids[:, :10])
    assert first.past_key_values is first.cache
    second = small(ids[:, 10:], past_key_values=first.past_key_values)
    assert second.cache is first.cache
    torch.testing.assert_close(second.logits.cpu(), expected.logits[:, 10:], **close)


def negate(model):
    with torch.no_grad():
        model.lm_head.weight.neg_()


def replace_by_negative(model):
    model.lm_head.weight = torch.nn.Parameter(-model.lm_head.weight.detach(), requires_grad=False)


def load_negative(model):
    model.load_state_dict({"lm_head.weight": -model.state_dict()["lm_head.weight"].cpu()}, strict=False)


@pytest.mark.parametrize("change", [negate, replace_by_negative, load_negative])
def test_weights_that_change_are_picked_up(small, ids, change):
    """Written in place, replaced or loaded: by forward and by generate."""
    before, tokens = small(ids).logits.cpu(), small.generate(ids, max_new_tokens=4, do_sample=False)
    try:
        change(small)
        torch.testing.assert_close(small(ids).logits.cpu(), -before)
        assert not torch.equal(small.generate(ids, max_new_tokens=4, do_sample=False), tokens)
    finally:
        change(small)
    torch.testing.assert_close(small(ids).logits.cpu(), before)
