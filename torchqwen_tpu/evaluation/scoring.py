"""How likely a model finds given tokens: the same, up to rounding, as one request at a time.

Requests are packed into flat ragged steps like everything else, so that neither padding nor neighbours take part.
Log-probabilities are gathered on the device; logits of a whole sequence never exist.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from custom_ops.scoring import SCORES
from torchqwen_tpu.cache import HybridCache
from torchqwen_tpu.inputs import check_ids, limit_of
from torchqwen_tpu.models.causal_lm import CausalLM
from torchqwen_tpu.runtime.packing import Row, extend

DEFAULT_BATCH = 64
"""Sequences that are scored together, a data-parallel rank."""
SMALLEST_BUCKET = 1024
"""Fewest tokens of a step: a harness's requests are of all lengths, and padding costs less than compiling for each."""


@dataclass(frozen=True)
class TokenScores:
    """Scores of n tokens, each given all tokens before it.

    Attributes:
        token_ids: [n]
        logprob: [n] log-probability of each token, in nats.
        rank: [n] how many tokens are more likely: 0 where greedy search would have taken this one.
        entropy: [n] of the distribution that each token is from, in nats.
        top_ids, top_logprobs: [n, k] the most likely tokens at each place, best first.
    """

    token_ids: np.ndarray
    logprob: np.ndarray
    rank: np.ndarray
    entropy: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray

    @property
    def is_greedy(self) -> bool:
        """Whether greedy search would have given exactly these tokens."""
        return not self.rank.any()


def score(
    model: CausalLM,
    texts_or_ids: Sequence[str] | Sequence[Sequence[int]],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    top_k: int = 0,
    batch_size: int = DEFAULT_BATCH,
    progress: bool = True,
) -> list[TokenScores]:
    """Score every token of each text but its first, which nothing precedes.

    Args:
        texts_or_ids: texts (these need `tokenizer`) or token ids.
        top_k: alternatives to return beside each token.
        batch_size: sequences that are scored together, a data-parallel rank.

    Raises:
        ValueError: an empty text, a token outside the vocabulary, a text beyond the model's length.
    """
    rows = [_ids(number, entry, tokenizer) for number, entry in enumerate(texts_or_ids)]
    requests = [(row[:1], row[1:]) for row in rows]
    return score_requests(model, requests, top_k=top_k, batch_size=batch_size, progress=progress)


def score_requests(
    model: CausalLM,
    requests: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    top_k: int = 0,
    batch_size: int = DEFAULT_BATCH,
    progress: bool = True,
) -> list[TokenScores]:
    """Score the tokens of each request's continuation given its context.

    Args:
        requests: (context, continuation) of token ids; a context holds at least one. Requests with the same context
            compute it once.

    Raises:
        ValueError: an empty context, a token outside the vocabulary, a request beyond the model's length.
    """
    if batch_size < 1 or top_k < 0:
        raise ValueError(f"batch_size must be at least 1 and top_k at least 0, not {batch_size} and {top_k}")
    if not requests:
        return []
    _check(model, requests)
    results: list[TokenScores | None] = [None] * len(requests)
    total = sum(len(continuation) for _, continuation in requests)
    longest = max(len(context) + len(continuation) - 1 for context, continuation in requests)
    cache = model.new_cache(min(len(requests), batch_size * model.mesh.ranks), longest)
    with tqdm(total=total, desc="Scoring", unit="tok", disable=not progress or not logging.is_progress_bar_enabled()) as bar:
        for numbers in _batches(requests, cache.batch):
            for number, result in zip(numbers, _score_batch(model, cache, [requests[n] for n in numbers], top_k), strict=True):
                results[number] = result
                bar.update(len(result.token_ids))
    return results


def _ids(number: int, entry, tokenizer) -> list[int]:
    if isinstance(entry, str):
        if tokenizer is None:
            raise ValueError("texts need a tokenizer: pass tokenizer=, or token ids")
        entry = tokenizer(entry).input_ids
    if len(entry) == 0:
        raise ValueError(f"text {number} is empty; there is nothing to score")
    return [int(token) for token in entry]


def _check(model: CausalLM, requests) -> None:
    limit = limit_of(model.config)
    for number, (context, continuation) in enumerate(requests):
        if not len(context):
            raise ValueError(f"request {number} has an empty context; begin it with the token that starts a text")
        check_ids(torch.tensor([[*context, *continuation]]), model.vocab_size)
        length = len(context) + len(continuation) - 1  # the last token is scored, not read
        if length > limit:
            raise ValueError(
                f"request {number} has {length} tokens to read, and the model's limit is {limit} (max_position_embeddings)"
            )


def _batches(requests, size: int) -> Iterator[list[int]]:
    """Numbers of requests that go together: longest first, so that memory is tried at once and lengths are alike within
    a batch; those with one context beside each other."""

    def key(number: int):
        context, continuation = requests[number]
        return -len(context), tuple(context), -len(continuation)

    order = sorted(range(len(requests)), key=key)
    for first in range(0, len(order), size):
        yield order[first : first + size]


def _score_batch(model: CausalLM, cache: HybridCache, requests, top_k: int) -> list[TokenScores]:
    cache.lengths[:], cache.offsets[:] = 0, 0  # every sequence starts afresh, whatever its place in the cache holds
    _read_contexts(model, cache, [tuple(context) for context, _ in requests])
    rows = []
    for number, (context, continuation) in enumerate(requests):
        # The context's last token is read here, where what follows it is known.
        tokens = np.array([context[-1], *continuation[:-1]] if len(continuation) else [], np.int64)
        wanted = np.arange(len(tokens))
        rows.append(Row(tokens, _positions(cache, number, len(tokens)), wanted, np.array(continuation, np.int64)))
    selected = extend(model.steps, cache, rows, alternatives=top_k, smallest_bucket=SMALLEST_BUCKET)
    nothing = torch.zeros(0, len(SCORES) + 2 * top_k)
    scores = torch.cat([nothing, *(model.mesh.get(step) for step in selected.steps)]).numpy()
    return [_token_scores(row.targets, scores[place], top_k) for row, place in zip(rows, selected.place, strict=True)]


def _read_contexts(model: CausalLM, cache: HybridCache, contexts: list[tuple[int, ...]]) -> None:
    """Take all but the last token of every context into the cache; rows with one context are copies of the first."""
    first_with = {context: number for number, context in reversed(list(enumerate(contexts)))}
    source = np.array([first_with[context] for context in contexts])
    nothing = np.zeros(0, np.int64)
    rows = []
    for number, context in enumerate(contexts):
        tokens = np.array(context[:-1] if source[number] == number else (), np.int64)
        rows.append(Row(tokens, _positions(cache, number, len(tokens)), nothing, nothing))
    if any(len(row.tokens) for row in rows):
        extend(model.steps, cache, rows, alternatives=0, smallest_bucket=SMALLEST_BUCKET)
        if (source != np.arange(len(source))).any():
            cache.reorder_cache(torch.from_numpy(np.concatenate([source, np.arange(len(source), cache.batch)])))


def _positions(cache: HybridCache, number: int, count: int) -> np.ndarray:
    """[3, count] positions of a sequence's next tokens."""
    return np.broadcast_to(cache.lengths[number] + np.arange(count, dtype=np.int32), (3, count))


def _token_scores(token_ids: np.ndarray, scores: np.ndarray, top_k: int) -> TokenScores:
    columns = dict(zip(SCORES, scores.T, strict=False))
    alternatives = scores[:, len(SCORES) :]
    return TokenScores(
        token_ids=token_ids,
        logprob=columns["logprob"],
        rank=columns["rank"].astype(np.int64),
        entropy=columns["entropy"],
        top_ids=alternatives[:, :top_k].astype(np.int64),
        top_logprobs=alternatives[:, top_k:],
    )
