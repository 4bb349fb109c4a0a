"""The model in inspect-ai: the answers of `generate`, and log-likelihoods whatever they are computed with."""

from __future__ import annotations

import anyio
import pytest

pytest.importorskip("inspect_ai")

from inspect_ai.model import ChatMessageUser, GenerateConfig, get_model  # noqa: E402

from torchqwen_tpu.evaluation import inspect_model as _registers  # noqa: E402, F401
from torchqwen_tpu.evaluation import score_requests  # noqa: E402
from torchqwen_tpu.evaluation.texts import answer, total  # noqa: E402

PROMPTS = ["import os\nimport ", "def f(x):\n    return "]  # both end in white space


@pytest.fixture(scope="module")
def model(tiny_folder):
    return get_model(f"torchqwen/{tiny_folder}", chat_template=False)


def together(*calls):
    """Results of calls (function, arguments) that run at the same time."""
    results = [None] * len(calls)

    async def run() -> None:
        async def one(number: int) -> None:
            function, *arguments = calls[number]
            results[number] = await function(*arguments)

        async with anyio.create_task_group() as tasks:
            for number in range(len(calls)):
                tasks.start_soon(one, number)

    anyio.run(run)
    return results


def test_answers_are_those_of_generate(model, tiny, tokenizer):
    config = GenerateConfig(max_tokens=6, logprobs=True, top_logprobs=2)
    calls = [(model.api.generate, [ChatMessageUser(content=prompt)], [], "auto", config) for prompt in PROMPTS]
    expected = answer(tiny, tokenizer, PROMPTS, 6, do_sample=False)
    for output, (tokens, text) in zip(together(*calls), expected, strict=True):
        assert output.completion == text and output.usage.output_tokens == len(tokens) == 6
        assert output.stop_reason == "max_tokens"
        for logprob in output.choices[0].logprobs.content:  # greedy: what was chosen is the most likely
            assert logprob.token == logprob.top_logprobs[0].token
            assert logprob.logprob == pytest.approx(logprob.top_logprobs[0].logprob, abs=1e-5)


def test_loglikelihoods_are_computed_together(model, tiny, tokenizer):
    continuations = ["sys\n", "x + 1\n", "os"]
    pairs = [(prompt, continuation) for prompt in PROMPTS for continuation in continuations]
    results = together(*((model.api.loglikelihood, *pair) for pair in pairs))
    for (prompt, continuation), value in zip(pairs, results, strict=True):
        context = tokenizer(prompt.rstrip()).input_ids
        (alone,) = score_requests(tiny, [(context, tokenizer(prompt + continuation).input_ids[len(context) :])])
        assert value == pytest.approx(total(alone), abs=1e-4)


def test_tools_are_refused(model):
    from inspect_ai.tool import ToolInfo

    tool = ToolInfo(name="clock", description="the time")
    with pytest.raises(BaseExceptionGroup) as error:
        together((model.api.generate, [ChatMessageUser(content="x")], [tool], "auto", GenerateConfig()))
    assert "tools" in str(error.value.exceptions[0])
