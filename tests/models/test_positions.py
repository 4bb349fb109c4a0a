"""Position ids in their three forms, YaRN, and positions that a model does not have."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from support import TOLERANCE, padded, random_rows, reference_logits, reference_of

import torchqwen_tpu
from torchqwen_tpu.runtime.graph import compilations

close = {"atol": TOLERANCE, "rtol": 0}
IDS = torch.tensor(random_rows((12, 12), seed=1))


def different_axes() -> torch.Tensor:
    """[3, 2, 12]: temporal, height and width positions that differ, as for an image in the text."""
    generator = np.random.default_rng(0)
    steps = generator.integers(0, 3, (3, 2, 12))
    return torch.from_numpy(steps.cumsum(-1))


@pytest.fixture(scope="module")
def plain(small):
    return small(IDS).logits.cpu()


def forms() -> dict[str, torch.Tensor]:
    shifted = torch.arange(12).expand(2, -1) + torch.tensor([[0], [30]])
    axes = different_axes()
    text = torch.arange(12).expand(1, 2, -1)
    return {
        "[B,S]": shifted,
        "[1,S]": torch.arange(40, 52)[None],
        "[3,B,S]": axes,
        "[4,B,S]": torch.cat([text, axes]),
    }


@pytest.mark.parametrize("form", forms())
def test_position_ids(small, small_reference, plain, form):
    positions = forms()[form]
    with torch.no_grad():
        expected = small_reference(IDS, position_ids=positions).logits
    logits = small(IDS, position_ids=positions).logits.cpu()
    torch.testing.assert_close(logits, expected, **close)
    torch.testing.assert_close(small(IDS, position_ids=positions.to(small.device)).logits.cpu(), logits)
    if form[1] in "34":
        assert (logits - plain).abs().max() > 0.01  # the axes matter


def test_equal_axes_are_plain_positions(small, plain):
    positions = torch.arange(12).expand(3, 2, -1)
    torch.testing.assert_close(small(IDS, position_ids=positions).logits.cpu(), plain, **close)


def test_padding_may_have_any_position(small, small_reference):
    rows = random_rows((4, 9), seed=2)
    batch = padded(rows, "left")
    positions = batch["attention_mask"].cumsum(-1) - 1  # -1 in padding
    logits = small(**batch, position_ids=positions).logits.cpu()
    for number, row in enumerate(rows):
        torch.testing.assert_close(logits[number, -1], reference_logits(small_reference, row)[-1], **close)


def test_tokens_count_on_after_given_positions(small, small_reference):
    """A continuation without position_ids goes on from the last position of every axis."""
    positions = different_axes()
    following = positions[..., -1:] + 1 + torch.arange(4)
    more = torch.tensor(random_rows((4, 4), seed=3))
    with torch.no_grad():
        expected = small_reference(
            torch.cat([IDS, more], dim=1), position_ids=torch.cat([positions, following], dim=-1)
        ).logits[:, -4:]
    cache = small(IDS, position_ids=positions).cache
    torch.testing.assert_close(small(more, cache=cache).logits.cpu(), expected, **close)


@pytest.mark.parametrize("beams", [1, 2])
def test_generate_takes_position_ids(small, small_reference, beams):
    positions = torch.arange(12).expand(2, -1) + torch.tensor([[0], [30]])
    arguments = {"max_new_tokens": 8, "do_sample": False, "num_beams": beams, "position_ids": positions}
    assert torch.equal(small.generate(IDS, **arguments), small_reference.generate(IDS, **arguments))


def test_yarn(small_folder, small_reference):
    config = copy.deepcopy(small_reference.config)
    config.rope_parameters = {
        **config.rope_parameters, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
    }  # fmt: skip
    model = torchqwen_tpu.AutoModelForCausalLM.from_pretrained(small_folder, config=config, dtype="float32")
    reference = reference_of(small_folder, config=config)
    assert model.model.rotary_emb.scaling == pytest.approx(1.1386, abs=1e-4)
    (row,) = random_rows((60,), seed=4)
    expected = reference_logits(reference, row)
    assert (expected - reference_logits(small_reference, row)).abs().max() > 0.01
    torch.testing.assert_close(model(torch.tensor([row])).logits[0].cpu(), expected, **close)


@pytest.mark.parametrize(
    "arguments",
    [
        {"input_ids": torch.ones(1, 257, dtype=torch.long)},
        {"input_ids": IDS, "position_ids": torch.arange(245, 257).expand(2, -1)},
        {"input_ids": IDS, "position_ids": torch.arange(-1, 11).expand(2, -1)},
        {"input_ids": IDS, "position_ids": torch.zeros(2, 2, 12, dtype=torch.long)},
        {"input_ids": IDS, "position_ids": torch.arange(11).expand(2, -1)},
    ],
    ids=["too many tokens", "position 256", "negative position", "two axes", "too few positions"],
)
def test_positions_that_do_not_exist(small, arguments):
    """Refused before anything is compiled."""
    before = compilations()
    with pytest.raises(ValueError):
        small(**arguments)
    assert compilations() == before


def test_a_continuation_beyond_the_limit(small):
    cache = small(torch.ones(1, 4, dtype=torch.long), position_ids=torch.arange(250, 254)[None]).cache
    small(torch.ones(1, 2, dtype=torch.long), cache=cache)
    with pytest.raises(ValueError):
        small(torch.ones(1, 1, dtype=torch.long), cache=cache)
