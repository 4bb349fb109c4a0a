"""What evaluation harnesses ask of a model in terms of text: log-likelihoods of choices and of whole texts, answers."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from torchqwen_tpu.evaluation.batches import Request
from torchqwen_tpu.evaluation.scoring import TokenScores, score_requests
from torchqwen_tpu.models.causal_lm import CausalLM


def rolling_windows(ids: Sequence[int], first: int, length: int) -> list[Request]:
    """A text in windows of at most `length` tokens to read, every token scored once.

    `first` is what precedes the text; a window after the first has as many tokens before it as there is room for.
    """
    windows = [([first], ids[:length])]
    for start in range(length, len(ids), length):
        end = min(start + length, len(ids))
        windows.append((ids[end - length - 1 : start], ids[start:end]))
    return windows


def score_texts(model: CausalLM, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], length: int) -> list[float]:
    """Log-likelihood of each whole text in nats, in windows of `length` tokens."""
    first = first_token(tokenizer)
    windows = [rolling_windows(tokenizer(text).input_ids, first, length) for text in texts]
    scores = iter(score_requests(model, [window for own in windows for window in own]))
    return [sum(total(next(scores)) for _ in own) for own in windows]


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
