"""The model as inspect-ai knows it: provider `torchqwen`, and a solver that picks the most likely choice.

    eval(task, model=get_model("torchqwen/PATH"))

after this module is imported. PATH is a folder or a hub id; further model arguments are `dtype` and `chat_template`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.to_thread
from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    GenerateConfig,
    Logprob,
    Logprobs,
    ModelAPI,
    ModelOutput,
    ModelUsage,
    TopLogprob,
    get_model,
    modelapi,
)
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.tool import ToolChoice, ToolInfo
from transformers import AutoTokenizer

from torchqwen_tpu.auto import AutoModelForCausalLM
from torchqwen_tpu.checkpoint.resolve import resolve_folder
from torchqwen_tpu.evaluation.scoring import TokenScores, score_requests
from torchqwen_tpu.evaluation.texts import answer, cut_left, first_token, total
from torchqwen_tpu.inputs import limit_of

CONNECTIONS = 64
"""Samples that are answered together where the task does not say."""
GATHERING = 0.02
"""Seconds that a call waits for others to be computed with it."""
NEW_TOKENS = 256
"""Most new tokens where the task does not say."""


@dataclass
class _Call:
    """One call that waits for its result. Calls of one `kind` can be answered together."""

    kind: tuple
    argument: Any
    result: Any = None
    done: bool = False


@dataclass
class _Batcher:
    """Answers calls together that come while others are at work.

    run: takes a kind and the arguments of calls of that kind, returns their results.
    """

    run: Callable[[tuple, list], list]
    _waiting: list[_Call] = field(default_factory=list)
    _busy: anyio.Lock = field(default_factory=anyio.Lock)

    async def __call__(self, kind: tuple, argument: Any) -> Any:
        call = _Call(kind, argument)
        self._waiting.append(call)
        await anyio.sleep(GATHERING)
        async with self._busy:
            if not call.done:
                batch = [waiting for waiting in self._waiting if waiting.kind == kind]
                results = await anyio.to_thread.run_sync(self.run, kind, [member.argument for member in batch])
                for member, result in zip(batch, results, strict=True):
                    member.result, member.done = result, True
                self._waiting = [waiting for waiting in self._waiting if not waiting.done]
        return call.result


class TorchQwenAPI(ModelAPI):
    """Qwen 3.5 in inspect-ai. Tools and images are refused.

    Args:
        dtype: of the weights, as `from_pretrained` takes it.
        chat_template: whether messages go through the tokenizer's chat template; otherwise their texts are joined.
    """

    def __init__(
        self, model_name: str, base_url: str | None = None, api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008, the signature that inspect-ai asks for
        dtype: str = "float32", chat_template: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(model_name, base_url, api_key, [], config)
        self.model = AutoModelForCausalLM.from_pretrained(model_name, dtype=dtype)
        self.tokenizer = AutoTokenizer.from_pretrained(resolve_folder(model_name))
        self._chat_template = chat_template
        self._generate, self._score = _Batcher(self._answers), _Batcher(self._scores)

    def max_connections(self) -> int:
        return CONNECTIONS

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput:
        """An answer, sampled where the temperature is above zero; log-probabilities if asked for."""
        if tools:
            raise ValueError("torchqwen calls no tools; use a task without them")
        prompt = self.prompt(input)
        options = {"seed": config.seed, "do_sample": bool(config.temperature)}
        if config.temperature:
            options |= {"temperature": config.temperature, "top_p": config.top_p, "top_k": config.top_k}
        options = tuple((name, value) for name, value in options.items() if value is not None)
        new_tokens = config.max_tokens or NEW_TOKENS
        tokens, text = await self._generate((new_tokens, tuple(config.stop_seqs or ()), options), prompt)
        context = self.tokenizer(prompt).input_ids or [first_token(self.tokenizer)]
        logprobs = None
        if config.logprobs:
            scored = await self._score((config.top_logprobs or 0,), (context, tokens))
            logprobs = Logprobs(content=self._logprobs(scored))
        usage = ModelUsage(input_tokens=len(context), output_tokens=len(tokens), total_tokens=len(context) + len(tokens))
        message = ChatMessageAssistant(content=text, model=self.model_name, source="generate")
        reason = "max_tokens" if len(tokens) >= new_tokens else "stop"
        choice = ChatCompletionChoice(message=message, stop_reason=reason, logprobs=logprobs)
        return ModelOutput(model=self.model_name, choices=[choice], usage=usage)

    async def loglikelihood(self, prompt: str, continuation: str) -> float:
        """Of a continuation of a text, in nats. White space that ends the text counts with the continuation, as in lm-eval:
        tokens do not end at such a place otherwise."""
        context = self.tokenizer(prompt.rstrip()).input_ids
        tokens = self.tokenizer(prompt + continuation).input_ids[len(context) :]
        context = cut_left(context or [first_token(self.tokenizer)], tokens, limit_of(self.model.config))
        return total(await self._score((0,), (context, tokens)))

    def prompt(self, messages: list[ChatMessage]) -> str:
        """What the model reads for these messages."""
        if not self._chat_template:
            return "".join(message.text for message in messages)
        conversation = [{"role": message.role, "content": message.text} for message in messages]
        return self.tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)

    def _answers(self, kind: tuple, prompts: list[str]) -> list[tuple[list[int], str]]:
        new_tokens, stop, options = kind
        results = answer(self.model, self.tokenizer, prompts, new_tokens, stop, **dict(options))
        padding = self.tokenizer.pad_token_id
        return [([token for token in tokens if token != padding], text) for tokens, text in results]

    def _scores(self, kind: tuple, requests: list) -> list[TokenScores]:
        return score_requests(self.model, requests, top_k=kind[0], progress=False)

    def _logprobs(self, scored: TokenScores) -> list[Logprob]:
        def text(token: int) -> str:
            return self.tokenizer.decode([token])

        return [
            Logprob(
                token=text(token),
                logprob=float(logprob),
                top_logprobs=[TopLogprob(token=text(t), logprob=float(p)) for t, p in zip(ids, best, strict=True)] or None,
            )
            for token, logprob, ids, best in zip(
                scored.token_ids, scored.logprob, scored.top_ids, scored.top_logprobs, strict=True
            )
        ]


@modelapi(name="torchqwen")
def torchqwen():
    """inspect-ai's entry."""
    return TorchQwenAPI


@solver
def most_likely_choice() -> Solver:
    """Marks the choice of a sample that the model finds the most likely after the prompt; for inspect-ai's scorer `choice`."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        api = get_model().api
        prompt, values = api.prompt(state.messages), [choice.value for choice in state.choices]
        totals: dict[int, float] = {}

        async def score(number: int) -> None:
            totals[number] = await api.loglikelihood(prompt, values[number])

        async with anyio.create_task_group() as tasks:
            for number in range(len(values)):
                tasks.start_soon(score, number)
        best = max(totals, key=totals.get)
        for number in range(len(values)):
            state.choices.mark_choice(number, number == best)
        state.output = ModelOutput.from_content(api.model_name, chr(ord("A") + best))
        return state

    return solve
