"""A conversation with a model, continued from its cache where that is possible."""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from torchqwen_tpu.cache import HybridCache
from torchqwen_tpu.models.causal_lm import CausalLM

ROOM = 1024
"""Tokens that a conversation's cache has room for at first, so that not every early turn compiles for a larger one."""


class Conversation:
    """Messages so far, and the cache that holds them.

    Args:
        options: of `generate`, the same for every turn. With `seed`, turn n samples with seed + n.
    """

    def __init__(self, model: CausalLM, tokenizer: PreTrainedTokenizerBase, seed: int | None = None, **options):
        if tokenizer.chat_template is None:
            raise ValueError("the model's tokenizer has no chat template; use `generate` with a prompt instead")
        self.model, self.tokenizer, self.seed, self.options = model, tokenizer, seed, options
        self.messages: list[dict[str, str]] = []
        self._seen = torch.zeros((1, 0), dtype=torch.long)
        self._cache: HybridCache | None = None

    def say(self, text: str, streamer: BaseStreamer | None = None) -> str:
        """The model's answer to one more message of the user."""
        self.messages.append({"role": "user", "content": text})
        inputs = self.tokenizer.apply_chat_template(
            self.messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        seed = None if self.seed is None else self.seed + len(self.messages) // 2
        output = self.model.generate(
            inputs.input_ids, cache=self._cache_for(inputs.input_ids), streamer=streamer, seed=seed,
            return_dict_in_generate=True, **self.options,
        )  # fmt: skip
        self._seen, self._cache = output.sequences, output.cache
        answer = self.tokenizer.decode(output.sequences[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": answer})
        return answer

    def _cache_for(self, ids: torch.Tensor) -> HybridCache:
        """The cache of the last turn if `ids` continues it, else (the template may rewrite history) a new one."""
        if self._cache is not None:
            seen = self._cache.get_seq_length()
            if seen < ids.shape[1] and torch.equal(ids[:, :seen], self._seen[:, :seen]):
                return self._cache
        return self.model.new_cache(1, ROOM)
