"""How likely a model finds given tokens: the same, up to rounding, as one request at a time.

Requests are packed into flat ragged steps like everything else, so that neither padding nor neighbours take part.
Log-probabilities are gathered on the device; logits of a whole sequence never exist.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from custom_ops.scoring import SCORES
from torchqwen_tpu.batch import bucket
from torchqwen_tpu.evaluation.batches import Request, RunningBatch, StepOptions, Values, plan_batches
from torchqwen_tpu.inputs import check_ids, limit_of
from torchqwen_tpu.models.causal_lm import CausalLM
from torchqwen_tpu.recording import Routing

LARGEST_BATCH = 128
"""Sequences that are scored together, a data-parallel rank, where memory allows."""
MEMORY = 8 << 30
"""Bytes a rank that caches may take where the batch size is not given."""
STEP_TOKENS = (1024, 2048)
"""Tokens of a step where everything fits into the first, and otherwise: a harness's requests are of all lengths, and
padding costs less than compiling for each."""
IN_FLIGHT = 2
"""Batches on the device at once: while one is at work that a single core of the host does, or the host is, so is the
other."""


@dataclass(frozen=True)
class TokenScores:
    """Scores of n tokens, each given all tokens before it.

    Attributes:
        token_ids: [n]
        logprob: [n] log-probability of each token, in nats.
        rank: [n] how many tokens are more likely: 0 where greedy search would have taken this one.
        entropy: [n] of the distribution that each token is from, in nats.
        top_ids, top_logprobs: [n, k] the most likely tokens at each place, best first.
        experts, router_weights: [layers with experts, n, experts a token] which experts computed the distribution that
            each token is from (those of the token before it), and their weights, largest first; None if not asked for.
    """

    token_ids: np.ndarray
    logprob: np.ndarray
    rank: np.ndarray
    entropy: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    experts: np.ndarray | None = None
    router_weights: np.ndarray | None = None

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
    routers: bool = False,
    batch_size: int | None = None,
    progress: bool = True,
) -> list[TokenScores]:
    """Score every token of each text but its first, which nothing precedes.

    Args:
        texts_or_ids: texts (these need `tokenizer`) or token ids.
        top_k: alternatives to return beside each token.
        routers: also return the experts of every layer and their weights.
        batch_size: sequences that are scored together, a data-parallel rank; by default as many as are fast and fit.

    Raises:
        ValueError: an empty text, a token outside the vocabulary, a text beyond the model's length; `routers` of a dense
            model.
    """
    rows = [_ids(number, entry, tokenizer) for number, entry in enumerate(texts_or_ids)]
    requests = [(row[:1], row[1:]) for row in rows]
    return score_requests(model, requests, top_k=top_k, routers=routers, batch_size=batch_size, progress=progress)


def score_requests(
    model: CausalLM,
    requests: Sequence[Request],
    *,
    top_k: int = 0,
    routers: bool = False,
    batch_size: int | None = None,
    progress: bool = True,
) -> list[TokenScores]:
    """Score the tokens of each request's continuation given its context.

    Args:
        requests: (context, continuation) of token ids; a context holds at least one. Requests with the same context
            compute it once.
        top_k, routers, batch_size: as in `score`.

    Raises:
        ValueError: an empty context, a token outside the vocabulary, a request beyond the model's length; `routers` of a
            dense model.
    """
    if top_k < 0 or (batch_size is not None and batch_size < 1):
        raise ValueError(f"batch_size must be at least 1 and top_k at least 0, not {batch_size} and {top_k}")
    recorders = _recorders(model, routers)
    _check(model, requests)
    results = [_token_scores(continuation, _no_values(model, top_k, routers), top_k) for _, continuation in requests]
    kept = [number for number, (_, continuation) in enumerate(requests) if len(continuation)]
    wanted = [requests[number] for number in kept]
    total = sum(len(continuation) for _, continuation in wanted)
    with tqdm(total=total, desc="Scoring", unit="tok", disable=not progress or not logging.is_progress_bar_enabled()) as bar:
        for number, values in _run(model, wanted, batch_size, top_k, recorders):
            continuation = wanted[number][1]
            results[kept[number]] = _token_scores(continuation, values, top_k)
            bar.update(len(continuation))
    return results


def _run(model: CausalLM, requests: list[Request], batch_size, top_k: int, recorders) -> Iterator[tuple[int, Values]]:
    """(number, values) of all requests, in the order in which they are done."""
    if not requests:
        return
    ranks = model.mesh.ranks
    longest = max(len(context) + len(continuation) - 1 for context, continuation in requests)
    tokens = -(-sum(len(context) + len(continuation) for context, continuation in requests) // ranks)
    small, large = STEP_TOKENS
    step = min(small if tokens <= small else large, model.steps.runtime.prefill_chunk)
    size = (batch_size or _fitting_rows(model, longest)) * ranks
    # On several devices of one process `mesh.get` waits for all that is queued: there is nothing to gain.
    in_flight = IN_FLIGHT if model.mesh.devices == 1 and tokens > step else 1
    batches = plan_batches(requests, max(min(size, -(-len(requests) // in_flight)), 1))
    caches = deque(model.new_cache(max(sum(map(len, batch)) for batch in batches), longest) for _ in range(in_flight))
    options = StepOptions(bucket(step), top_k, recorders)
    running: deque[RunningBatch] = deque()
    for batch in batches:
        if len(running) == in_flight:
            yield from _finished(running.popleft())
        running.append(RunningBatch(model, caches[0], requests, batch, options))
        caches.rotate(-1)
    for batch in running:
        yield from _finished(batch)


def _finished(batch: RunningBatch) -> Iterator[tuple[int, Values]]:
    return zip(batch.numbers, batch.finish(), strict=True)


def _fitting_rows(model: CausalLM, longest: int) -> int:
    """How many sequences of `longest` tokens `MEMORY` holds in caches, and in the copy that is made of one for a moment."""
    layout = model.new_cache(1).layout
    shape = layout.shape(LARGEST_BATCH * model.mesh.ranks, longest)
    size = sum(math.prod(size) * dtype.itemsize for size, dtype, _ in layout.arrays(shape))
    row = size / (shape.rows * model.mesh.ranks)
    return max(min(LARGEST_BATCH, int(MEMORY / (row * (IN_FLIGHT + 1)))), 1)


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


def _recorders(model: CausalLM, routers: bool) -> tuple[Routing, ...]:
    if not routers:
        return ()
    if not getattr(model.config, "num_experts", 0):
        raise ValueError("the model is dense: it has no routers to return")
    return (Routing(model.config.num_experts_per_tok),)


def _no_values(model: CausalLM, top_k: int, routers: bool) -> Values:
    """Of an empty continuation."""
    shape = (model.config.num_hidden_layers, 0, model.config.num_experts_per_tok) if routers else ()
    records = {"experts": np.zeros(shape, np.int32), "weights": np.zeros(shape, np.float32)} if routers else {}
    return Values(np.zeros((0, len(SCORES) + 2 * top_k), np.float32), records)


def _token_scores(token_ids: Sequence[int], values: Values, top_k: int) -> TokenScores:
    columns = dict(zip(SCORES, values.scores.T, strict=False))
    alternatives = values.scores[:, len(SCORES) :]
    return TokenScores(
        token_ids=np.array(token_ids, np.int64),
        logprob=columns["logprob"],
        rank=columns["rank"].astype(np.int64),
        entropy=columns["entropy"],
        top_ids=alternatives[:, :top_k].astype(np.int64),
        top_logprobs=alternatives[:, top_k:],
        experts=values.records.get("experts"),
        router_weights=values.records.get("weights"),
    )
