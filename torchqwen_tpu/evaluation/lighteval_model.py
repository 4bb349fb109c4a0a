"""The model as lighteval knows it: `lighteval custom MODEL PATH_OF_THIS_FILE TASKS`, or `CustomModelConfig` in Python.

MODEL is a folder or a hub id. lighteval takes the one class of this file.
"""

from __future__ import annotations

from lighteval.models.abstract_model import LightevalModel, ModelConfig
from lighteval.models.model_output import ModelResponse
from lighteval.tasks.prompt_manager import PromptManager
from lighteval.tasks.requests import Doc
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from torchqwen_tpu.auto import AutoModelForCausalLM
from torchqwen_tpu.checkpoint.resolve import resolve_folder
from torchqwen_tpu.evaluation.scoring import score_requests
from torchqwen_tpu.evaluation.texts import answer, cut_left, first_token, score_texts, total
from torchqwen_tpu.inputs import limit_of

GENERATION_BATCH = 64
"""Prompts that are continued together."""
NEW_TOKENS = 256
"""Most new tokens where neither task nor configuration says."""


class TorchQwenLighteval(LightevalModel):
    """Qwen 3.5 in lighteval, weights in float32: every score is what one request at a time gives."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.model = AutoModelForCausalLM.from_pretrained(config.model_name, dtype="float32")
        self._tokenizer = AutoTokenizer.from_pretrained(resolve_folder(config.model_name))
        self._prompts = PromptManager(
            use_chat_template=False, tokenizer=self._tokenizer, system_prompt=config.system_prompt
        )

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._tokenizer

    @property
    def add_special_tokens(self) -> bool:
        return False

    @property
    def max_length(self) -> int:
        return limit_of(self.model.config)

    def loglikelihood(self, docs: list[Doc]) -> list[ModelResponse]:
        """Log-likelihood of every choice; contexts that are too long lose tokens on the left."""
        contexts, requests = [], []
        for doc in docs:
            context, continuations = self.tok_encode_pair(self._prompts.prepare_prompt(doc), doc.choices, pairwise=True)
            contexts.append(context[0] or [first_token(self._tokenizer)])
            requests += [(cut_left(contexts[-1], tokens, self.max_length), tokens) for tokens in continuations]
        scores = iter(score_requests(self.model, requests))
        responses = []
        for doc, context in zip(docs, contexts, strict=True):
            scored = [next(scores) for _ in doc.choices]
            responses.append(
                ModelResponse(
                    input_tokens=context,
                    output_tokens=[choice.token_ids.tolist() for choice in scored],
                    logprobs=[total(choice) for choice in scored],
                    argmax_logits_eq_gold=[choice.is_greedy for choice in scored],
                )
            )
        return responses

    def loglikelihood_rolling(self, docs: list[Doc]) -> list[ModelResponse]:
        """Log-likelihood of every whole text."""
        texts = [self._prompts.prepare_prompt(doc) for doc in docs]
        totals = score_texts(self.model, self._tokenizer, texts, self.max_length)
        return [ModelResponse(input=text, logprobs=[value]) for text, value in zip(texts, totals, strict=True)]

    def greedy_until(self, docs: list[Doc]) -> list[ModelResponse]:
        """Greedy answers up to the stop sequences of each document; those that end alike are generated together."""
        responses: dict[int, ModelResponse] = {}
        groups: dict[tuple, list[int]] = {}
        for number, doc in enumerate(docs):
            new_tokens = doc.generation_size or self.config.generation_parameters.max_new_tokens or NEW_TOKENS
            groups.setdefault((new_tokens, tuple(doc.stop_sequences or ())), []).append(number)
        for (new_tokens, stop), numbers in groups.items():
            for first in range(0, len(numbers), GENERATION_BATCH):
                part = numbers[first : first + GENERATION_BATCH]
                prompts = [self._prompts.prepare_prompt(docs[number]) for number in part]
                answers = answer(self.model, self._tokenizer, prompts, new_tokens, stop, do_sample=False)
                for number, prompt, (tokens, text) in zip(part, prompts, answers, strict=True):
                    responses[number] = ModelResponse(input=prompt, output_tokens=[tokens], text=[text])
        return [responses[number] for number in range(len(docs))]
