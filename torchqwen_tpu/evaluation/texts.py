"""What evaluation harnesses ask of a model in terms of text: log-likelihoods of continuations, and answers."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from torchqwen_tpu.evaluation.scoring import TokenScores
from torchqwen_tpu.models.causal_lm import CausalLM


def total(scored: TokenScores) -> float:
    """Log-likelihood of all tokens in nats."""
    return float(scored.logprob.sum(dtype="float64"))


def first_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that begins a text, or else the one that ends one."""
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return token
    raise ValueError("the tokenizer has no token that begins or ends a text, and nothing precedes this one")


def cut_left(context: Sequence[int], continuation: Sequence[int], length: int) -> list[int]:
    """The end of a context that fits before a continuation whose last token is scored and not read."""
    return list(context[max(len(context) + len(continuation) - 1 - length, 0) :])


def answer(
    model: CausalLM, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], max_new_tokens: int,
    stop: Sequence[str] = (), **options,
) -> list[tuple[list[int], str]]:
    """Tokens and text that follow each prompt, the text up to the first of the stop strings.

    Args:
        options: of `generate`, for all prompts.
    """
    stopping = {"stop_strings": list(stop), "tokenizer": tokenizer} if stop else {}
    inputs = tokenizer(list(prompts), return_tensors="pt", padding=True, padding_side="left")
    output = model.generate(**inputs, max_new_tokens=max_new_tokens, **stopping, **options)
    results = []
    for row in output[:, inputs.input_ids.shape[1] :].tolist():
        text = tokenizer.decode(row, skip_special_tokens=True)
        results.append((row, text[: min((text.find(end) for end in stop if end in text), default=len(text))]))
    return results
