"""The model as lm-eval knows it: registered under the name `torchqwen`.

lm-eval's own transformers model does tokenizing, windows, chat templates and post-processing; scoring is ours.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import has_bos_prefix
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from torchqwen_tpu.auto import AutoModelForCausalLM
from torchqwen_tpu.checkpoint.resolve import resolve_folder
from torchqwen_tpu.config import ParallelConfig
from torchqwen_tpu.evaluation.scoring import score_requests
from torchqwen_tpu.evaluation.texts import cut_left, total
from torchqwen_tpu.models.causal_lm import CausalLM

logger = logging.getLogger(__name__)

GENERATION_BATCH = 64
"""Prompts that are continued together where the batch size is left open."""


@register_model("torchqwen")
class TorchQwenLM(HFLM):
    """Qwen 3.5 in lm-eval: `lm_eval --model torchqwen --model_args pretrained=PATH`, or `simple_evaluate(model=...)`.

    Args:
        pretrained: a folder, a hub id, or a model that `from_pretrained` made.
        tokenizer: by default the checkpoint's.
        dtype: of the weights, as `from_pretrained` takes it.
        batch_size: sequences that are computed together, a data-parallel rank; "auto" takes as many as are fast and fit.
        max_length: longest input in tokens; by default the model's own limit. Longer ones lose tokens on the left.
        chips, cores, layout: as in `ParallelConfig`.
        kwargs: other arguments of lm-eval's `HFLM` that concern prompts: add_bos_token, prefix_token_id, truncation,
            think_end_token, enable_thinking, chat_template_args.
    """

    def __init__(
        self,
        pretrained: str | CausalLM,
        tokenizer: str | PreTrainedTokenizerBase | None = None,
        dtype: str | torch.dtype | None = "auto",
        batch_size: int | str | None = "auto",
        max_length: int | None = None,
        chips: int | None = None,
        cores: int | None = None,
        layout: str = "dp",
        device: str | None = None,
        max_batch_size: int | None = None,
        **kwargs,
    ) -> None:
        del device, max_batch_size  # lm-eval passes them to every model; the mesh and `batch_size` decide here
        name = pretrained if isinstance(pretrained, str) else pretrained.name_or_path
        if isinstance(pretrained, str):
            parallel = ParallelConfig(chips, cores, layout)
            pretrained = AutoModelForCausalLM.from_pretrained(pretrained, dtype=dtype, parallel=parallel)
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            tokenizer = AutoTokenizer.from_pretrained(resolve_folder(tokenizer or name))
        self._scored_together = None if str(batch_size or "auto").startswith("auto") else int(batch_size)
        rows = self._scored_together or GENERATION_BATCH
        super().__init__(
            pretrained, backend="causal", tokenizer=tokenizer, batch_size=rows, max_length=max_length, **kwargs
        )
        self.pretrained = name
        self._device = torch.device("cpu")  # inputs and results stay on the host; the model takes them from there

    def loglikelihood(self, requests, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """As lm-eval's own, with each different text tokenized once and all of them in one call."""
        pairs = [_spaces_moved(*request.args) for request in requests]
        ids = self._encoded(text for pair in pairs if pair[0] for text in (pair[0], "".join(pair)))
        encoded = []
        for request, (context, continuation) in zip(requests, pairs, strict=True):
            if context:
                before, whole = ids[context], ids[context + continuation]
                encoded.append((request.args, before, whole[len(before) :]))
            else:
                tokens = self.tok_encode(continuation, add_special_tokens=False)
                first = [self.prefix_token_id]
                encoded.append((request.args, first, tokens[1:] if tokens[:1] == first else tokens))
        return self._loglikelihood_tokens(encoded, disable_tqdm=disable_tqdm)

    def _encoded(self, texts: Iterable[str]) -> dict[str, list[int]]:
        """What `tok_encode` gives for each text."""
        start = self.tokenizer.decode(self.prefix_token_id)
        groups: dict[bool, list[str]] = {False: [], True: []}
        for text in dict.fromkeys(texts):
            groups[has_bos_prefix(text, start)].append(text)
        special = {} if self.add_bos_token is None else {"add_special_tokens": self.add_bos_token}
        ids = {}
        for started, group in groups.items():
            if group:
                options = {"add_special_tokens": False} if started else special
                ids |= zip(group, self.tokenizer(group, **options).input_ids, strict=True)
        return ids

    def tok_batch_encode(self, strings, *arguments, **options) -> tuple[torch.Tensor, torch.Tensor]:
        """As lm-eval's own, with the token that begins a text in place of an empty prompt."""
        start = self.tokenizer.decode(self.prefix_token_id)
        return super().tok_batch_encode([string or start for string in strings], *arguments, **options)

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """All windows of all requests at once, so that they share batches."""
        windows, owners = [], []
        for number, (text,) in enumerate(request.args for request in requests):
            rolling = get_rolling_token_windows(
                self.tok_encode(text), prefix_token=self.prefix_token_id, max_seq_len=self.max_length, context_len=1
            )
            for window in map(make_disjoint_window, rolling):
                windows.append((None, *window))
                owners.append(number)
        totals = [0.0] * len(requests)
        for number, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[number] += logprob
        for request, whole in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, whole)
        return totals

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, override_bs: int | None = None):
        """lm-eval's hook: (key, context, continuation) → (log-likelihood, whether greedy search gives it)."""
        del override_bs
        kept = [self._cut(list(context), list(continuation)) for _, context, continuation in requests]
        scores = score_requests(self.model, kept, batch_size=self._scored_together, progress=not disable_tqdm)
        results = []
        for (key, _, _), scored in zip(requests, scores, strict=True):
            results.append((total(scored), scored.is_greedy))
            if key is not None:  # rolling windows have none
                self.cache_hook.add_partial("loglikelihood", key, results[-1])
        return results

    def _cut(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """The last max_length + 1 tokens, as lm-eval cuts: the last one is scored and not read."""
        if len(continuation) > self.max_length:
            raise ValueError(
                f"a continuation has {len(continuation)} tokens, and the longest input {self.max_length}; raise max_length"
            )
        kept = cut_left(context, continuation, self.max_length)
        if excess := len(context) - len(kept):
            logger.warning(
                "%d tokens on the left of a request are left out: it exceeds the length of %d", excess, self.max_length
            )
        return kept, continuation


def _spaces_moved(context: str, continuation: str) -> tuple[str, str]:
    """White space at the end of a context belongs to the continuation, as in lm-eval: tokens seldom end there."""
    kept = context.rstrip()
    return kept, context[len(kept) :] + continuation
