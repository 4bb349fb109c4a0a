"""Random load on an engine, and what every request gets alone; run by itself it reports on a mesh of its own."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("PJRT_DEVICE", "CPU")
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import numpy as np
from support import random_rows

import torchqwen_tpu
from torchqwen_tpu import Engine, EngineConfig, ParallelConfig, RuntimeConfig
from torchqwen_tpu.runtime.request import RequestOutput

RUNTIME = RuntimeConfig(page_size=16)


def load(count: int, longest: int, most_new: int, seed: int = 0) -> tuple[list[list[int]], list[dict]]:
    """Prompts and parameters: lengths spread evenly on a logarithmic scale, greedy and sampled in turn."""
    generator = np.random.default_rng(seed)
    lengths = np.exp(generator.uniform(0, np.log(longest + 1), count)).astype(int)
    prompts = random_rows(lengths.clip(1, longest), seed=seed)
    params = []
    for number, new in enumerate(generator.integers(1, most_new + 1, count)):
        sampling = {"do_sample": True, "seed": number, "top_k": 0, "top_p": 0.9} if number % 2 else {"do_sample": False}
        params.append({"max_new_tokens": int(new), **sampling})
    return prompts, params


def serve(
    engine: Engine, prompts, params, *, seed: int = 0, arrivals: int = 3, aborted: frozenset[int] = frozenset()
) -> dict[int, RequestOutput]:
    """Last outputs by the request's place: `arrivals` requests a step on average; those in `aborted` are ended somewhere on
    their way."""
    generator = np.random.default_rng(seed)
    waiting = list(range(len(prompts)))
    last: dict[int, RequestOutput] = {}
    tokens: dict[int, list[int]] = {}
    while waiting or engine.has_work:
        for _ in range(min(generator.poisson(arrivals), len(waiting))):
            number = waiting.pop(0)
            engine.add(prompts[number], params[number], request_id=str(number))
        for number in aborted:
            if number not in waiting and number not in last and generator.random() < 0.1:
                engine.abort(str(number))
        for output in engine.step():
            number = int(output.request_id)
            tokens[number] = tokens.get(number, []) + output.new_token_ids
            assert tokens[number] == output.token_ids, "what was streamed is not what came out"
            if output.finished:
                assert number not in last, "a request ended twice"
                last[number] = output
    return last


def alone(engine: Engine, prompts, params) -> list[list[int]]:
    """What every request gets when nothing else runs and nothing is left of earlier ones."""
    answers = []
    for prompt, own in zip(prompts, params, strict=True):
        engine.forget_prefixes()
        answers.append(engine.generate([prompt], own, progress=False)[0].token_ids)
    return answers


def differs(output: RequestOutput, expected: list[int] | None) -> bool:
    """Whether a request got something else than `expected`, or than its beginning if it was aborted."""
    if expected is None:
        return True
    got = output.token_ids
    return got != (expected[: len(got)] if output.finish_reason == "abort" else expected)


def is_empty(engine: Engine) -> bool:
    """Whether every slot, page and checkpoint is free once prefixes are forgotten."""
    engine.forget_prefixes()
    ranks, shape = engine.scheduler.ranks, engine.scheduler
    return all(
        rank.pool.used == 0 and rank.pool.is_clean and sorted(rank.slots) == list(range(shape.slots)) and not rank.running
        for rank in ranks
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--chips", type=int, default=1)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--layout", default="dp")
    parser.add_argument("--load", type=json.loads, required=True, help="arguments of load() as JSON")
    parser.add_argument("--engine", type=json.loads, required=True, help="arguments of EngineConfig as JSON")
    parser.add_argument("--expected", type=Path, help="answers as JSON; only requests with others are run alone here")
    parser.add_argument("--aborts", type=int, default=0, metavar="N", help="end every Nth request on its way")
    options = parser.parse_args()
    model = torchqwen_tpu.AutoModelForCausalLM.from_pretrained(
        options.folder, dtype="float32", runtime=RUNTIME,
        parallel=ParallelConfig(options.chips, options.cores, options.layout),
    )  # fmt: skip
    prompts, params = load(**options.load)
    engine = Engine(model, EngineConfig(**options.engine))
    aborted = frozenset(range(0, len(prompts), options.aborts)) if options.aborts else frozenset()
    outputs = serve(engine, prompts, params, aborted=aborted)
    empty, preemptions = is_empty(engine), engine.scheduler.preemptions
    expected = json.loads(options.expected.read_text()) if options.expected else [None] * len(prompts)
    others = [number for number, want in enumerate(expected) if differs(outputs[number], want)]
    answers = alone(engine, [prompts[number] for number in others], [params[number] for number in others])
    for number, answer in zip(others, answers, strict=True):
        expected[number] = answer
    print(json.dumps({
        "wrong": [number for number, want in enumerate(expected) if differs(outputs[number], want)],
        "alone": expected,
        "run alone": len(others),
        "aborted": sum(output.finish_reason == "abort" for output in outputs.values()),
        "preemptions": preemptions,
        "compilations": engine.statistics.compilations,
        "empty": empty,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
