"""Which of transformers' logits processors the device takes over."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from transformers.generation import (
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from torchqwen_tpu.batch import bucket
from torchqwen_tpu.runtime.parameters import SHORTLIST

_DEVICE_PENALTIES = (RepetitionPenaltyLogitsProcessor, MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor)
_DEVICE_WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)


@dataclass
class SamplingParameters:
    """How the device chooses a token; the defaults leave the distribution as it is.

    min_new_tokens: how many are generated before a stop token may be.
    ignored: columns of the prompt that the repetition penalty does not look at, for all rows or [rows].
    """

    do_sample: bool
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    ignored: np.ndarray | int = 0

    @classmethod
    def from_processors(
        cls, processors: LogitsProcessorList, do_sample: bool, eos: np.ndarray, columns: int
    ) -> SamplingParameters | None:
        """None where the processors ask for more than the device does.

        Args:
            eos: the stop tokens.
            columns: of the prompt.
        """
        known = _DEVICE_PENALTIES + (_DEVICE_WARPERS if do_sample else ())
        order = [known.index(type(processor)) if type(processor) in known else -1 for processor in processors]
        if -1 in order or order != sorted(set(order)):
            return None
        own = cls(do_sample, temperature=1.0 if do_sample else 0.0)
        for processor in processors:
            if isinstance(processor, RepetitionPenaltyLogitsProcessor):
                own.repetition_penalty = processor.penalty
                if processor.prompt_ignore_length is not None:
                    own.ignored = np.asarray(processor.prompt_ignore_length)
            elif isinstance(processor, (MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor)):
                if set(processor.eos_token_id.tolist()) != set(eos.tolist()):
                    return None
                is_length = isinstance(processor, MinLengthLogitsProcessor)
                length = processor.min_length if is_length else processor.prompt_length_to_skip + processor.min_new_tokens
                own.min_new_tokens = max(own.min_new_tokens, length - columns)
        for name, warper in zip(("temperature", "top_k", "top_p", "min_p"), _DEVICE_WARPERS, strict=True):
            for processor in processors:
                if isinstance(processor, warper):
                    setattr(own, name, getattr(processor, name))
        return own

    @property
    def penalizes(self) -> bool:
        """Whether scores depend on the tokens so far, or on how many there are."""
        return self.repetition_penalty != 1 or self.min_new_tokens > 0

    def candidates(self, vocabulary: int) -> int:
        """How many of the largest scores the device sorts; 0 for greedy search by the scores as they are."""
        if not self.do_sample:
            return min(SHORTLIST, vocabulary) if self.penalizes else 0
        return min(bucket(self.top_k, SHORTLIST), vocabulary) if self.top_k else vocabulary
