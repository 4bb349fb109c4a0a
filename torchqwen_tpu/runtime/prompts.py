"""Text at the engine's edges: prompts become token ids, generated ids are searched for stop strings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from torchqwen_tpu.inputs import check_ids


def prompt_tokens(prompt, tokenizer, vocabulary: int) -> list[int]:
    """Token ids of a prompt: a list of them, or a text where there is a tokenizer.

    Raises:
        ValueError: anything else, an empty prompt, or an id outside the vocabulary.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("a prompt is a list of token ids; for texts make the engine with a tokenizer")
        prompt = tokenizer(prompt).input_ids
    try:
        ids = torch.as_tensor(np.asarray(prompt))
    except (TypeError, ValueError):
        ids = None
    if ids is None or ids.dim() != 1 or (ids.numel() and ids.dtype not in (torch.int64, torch.int32)):
        raise ValueError(f"a prompt is a list of token ids, not {str(prompt)[:80]!r}")
    return check_ids(ids[None].long(), vocabulary)[0].tolist()


def end_at_stop_string(tokens: Sequence[int], before: int, stops: Sequence[str], tokenizer) -> int | None:
    """How many tokens there are when a stop string is first complete, if those after the first `before` complete one."""
    window = 1 + max(len(stop.encode()) for stop in stops)  # a token is a byte at least
    for end in range(before + 1, len(tokens) + 1):
        text = tokenizer.decode(tokens[max(0, end - window) : end])
        if any(stop in text for stop in stops):
            return end
    return None
