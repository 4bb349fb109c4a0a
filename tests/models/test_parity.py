"""Logits and greedy tokens equal transformers': the trained tiny checkpoint, dense models, and a BF16 load."""

from __future__ import annotations

import pytest
import torch
from support import (
    PROMPT_LENGTHS,
    TOLERANCE,
    assert_rows_match,
    dense_config,
    padded,
    random_rows,
    reference_logits,
    reference_of,
    reference_tokens,
    save_random,
)

import torchqwen_tpu


@pytest.mark.parametrize("length", PROMPT_LENGTHS)
def test_logits_of_the_tiny_checkpoint(tiny, tiny_reference, text, length):
    row = text[:length]
    logits = tiny(torch.tensor([row])).logits
    assert logits.device == tiny.device
    torch.testing.assert_close(logits[0].cpu(), reference_logits(tiny_reference, row), atol=TOLERANCE, rtol=0)


def test_greedy_tokens_alone(tiny, tiny_continuations):
    for row, expected in tiny_continuations:
        answer = tiny.generate(torch.tensor([row]), max_new_tokens=len(expected), do_sample=False, eos_token_id=None)
        assert answer[0].tolist() == row + expected


def test_greedy_tokens_in_a_left_padded_batch(tiny, tiny_continuations):
    rows, expected = zip(*tiny_continuations, tiny_continuations[0], strict=True)
    answer = tiny.generate(**padded(rows, "left"), max_new_tokens=64, do_sample=False, eos_token_id=None)
    assert answer[:, -64:].tolist() == list(expected)


def test_stop_strings(tiny, tiny_reference, tokenizer):
    inputs = tokenizer("Once upon a time", return_tensors="pt")
    arguments = {"max_new_tokens": 30, "do_sample": False, "stop_strings": ["."], "tokenizer": tokenizer}
    own, reference = tiny.generate(**inputs, **arguments), tiny_reference.generate(**inputs, **arguments)
    assert torch.equal(own, reference)
    assert "." in tokenizer.decode(own[0])


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def dense(request, tmp_path_factory):
    """A random dense model, here and in transformers."""
    folder = save_random(dense_config(tie_word_embeddings=request.param), tmp_path_factory.mktemp("dense"))
    return torchqwen_tpu.AutoModelForCausalLM.from_pretrained(folder, dtype="float32"), reference_of(folder)


def test_dense_model(dense):
    model, reference = dense
    assert isinstance(model, torchqwen_tpu.Qwen3_5ForCausalLM)
    rows = random_rows((1, 4, 9, 20))
    batch, expected = padded(rows, "left"), [reference_logits(reference, row) for row in rows]
    assert_rows_match(model(**batch).logits, batch["attention_mask"], expected)
    answer = model.generate(**batch, max_new_tokens=24, do_sample=False)
    assert answer[:, -24:].tolist() == [reference_tokens(reference, row, 24) for row in rows]


def token_error(logits: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Root mean square over the vocabulary, of the median token: rounding sends a few tokens to other experts."""
    return (logits.cpu().float() - exact).pow(2).mean(-1).sqrt().median()


def test_bf16_load(small_folder, small_reference):
    """As close to the FP32 answer as transformers' own BF16 answer, with the decay and the gated norm left in FP32."""
    model = torchqwen_tpu.AutoModelForCausalLM.from_pretrained(small_folder, dtype=torch.bfloat16)
    kept = {name for name, value in model.named_parameters() if value.dtype == torch.float32}
    assert kept == {f"model.layers.{layer}.linear_attn.{name}" for layer in (0, 2) for name in ("A_log", "norm.weight")}
    (row,) = random_rows((40,))
    exact = reference_logits(small_reference, row)
    rounded = reference_logits(reference_of(small_folder, torch.bfloat16), row)
    logits = model(torch.tensor([row])).logits[0]
    assert logits.dtype == torch.bfloat16
    assert token_error(logits, exact) < 1.5 * token_error(rounded, exact)
    assert token_error(logits, exact) < 0.1 * exact.std()
