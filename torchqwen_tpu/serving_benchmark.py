"""An engine under load: throughput, latencies and where the time of a step goes, beside transformers' padded batches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from tqdm.auto import tqdm
from transformers import GenerationConfig

from torchqwen_tpu.config import EngineConfig
from torchqwen_tpu.models.causal_lm import CausalLM
from torchqwen_tpu.runtime.engine import Engine
from torchqwen_tpu.runtime.request import RequestOutput

PERCENTILES = (50, 99)


@dataclass(frozen=True)
class Load:
    """Requests of random tokens, `concurrency` of them at a time: as one ends the next comes.

    mixed: lengths are drawn evenly from 1 to the given ones instead of being equal to them.
    """

    input_tokens: int
    output_tokens: int
    concurrency: int
    requests: int
    mixed: bool = False

    def draw(self, vocabulary: int) -> list[tuple[list[int], int]]:
        """(prompt, new tokens) of every request."""
        generator = np.random.default_rng(0)
        sizes = np.array([[self.input_tokens, self.output_tokens]] * self.requests)
        if self.mixed:
            sizes = generator.integers(1, sizes + 1)
        return [(generator.integers(0, vocabulary, size).tolist(), int(new)) for size, new in sizes]


def measure_serving(model: CausalLM, folder: Path, load: Load, against: str | None) -> dict:
    """Run `load` on an engine, and on the model of `folder` in another library.

    Returns: what `torchqwen-tpu bench serve --json` prints.
    """
    model.generation_config = GenerationConfig(pad_token_id=0)  # greedy, without stop tokens
    longest = load.input_tokens + load.output_tokens
    engine = Engine(model, EngineConfig(max_sequences=load.concurrency, max_length=longest))
    if engine.max_length < longest:
        raise ValueError(f"the engine takes {engine.max_length} tokens a request, and the load asks for {longest}")
    requests = load.draw(model.vocab_size)
    started = time.perf_counter()
    outputs = _serve(engine, requests, load.concurrency)
    seconds = time.perf_counter() - started
    report = {
        "model": str(folder),
        "dtype": str(model.dtype).removeprefix("torch."),
        "devices": model.mesh.devices,
        "layout": model.mesh.layout,
        "input_tokens": load.input_tokens,
        "output_tokens": load.output_tokens,
        "mixed": load.mixed,
        "concurrency": load.concurrency,
        "requests": load.requests,
        "seconds": seconds,
        **_rates(requests, seconds),
        **_latencies(outputs),
        **_steps(engine),
    }
    if against:
        seconds = _padded_batches(folder, model.dtype, requests, load.concurrency)
        report[against] = {"seconds": seconds, **_rates(requests, seconds)}
        report["ratio"] = report[against]["seconds"] / report["seconds"]
    return report


def format_serving(report: dict) -> str:
    """The report for people."""
    lengths = f"{report['input_tokens']} tokens in and {report['output_tokens']} out"
    lines = [
        f"{report['model']}, {report['dtype']}, {report['devices']} device(s), layout {report['layout']}",
        f"{report['requests']} requests of {'up to ' if report['mixed'] else ''}{lengths}, {report['concurrency']} at a time",
        f"{'tokens/s':<24}{report['total_tokens_per_second']:>12,.1f}   of them generated "
        f"{report['output_tokens_per_second']:,.1f}",
    ]
    for name, title in (("time_to_first_token", "time to first token"), ("time_per_output_token", "time per output token")):
        figures = ", ".join(f"{key} {1000 * value:,.1f} ms" for key, value in report[name].items())
        lines.append(f"{title:<24}{figures}")
    step = report["step"]
    lines += [
        f"{'step':<24}device {1000 * step['device_seconds']:,.2f} ms, host {1000 * step['host_seconds']:,.2f} ms, "
        f"{report['steps']} steps",
        f"{'in use':<24}pages {report['page_use']:.0%}, slots {report['slot_use']:.0%}; preemptions {report['preemptions']}, "
        f"compilations {report['compilations']}",
    ]
    if "ratio" in report:
        rate = report["transformers"]["output_tokens_per_second"]
        lines.append(f"{'transformers':<24}{rate:,.1f} generated tokens/s in padded batches: {report['ratio']:.1f}x slower")
    return "\n".join(lines)


def _serve(engine: Engine, requests: Sequence[tuple[list[int], int]], concurrency: int) -> list[RequestOutput]:
    waiting, outputs = iter(requests), []
    engine.reset_statistics()
    running = 0
    with tqdm(total=len(requests), desc="Serving", unit="request") as bar:
        while len(outputs) < len(requests):
            while running < concurrency and (request := next(waiting, None)) is not None:
                engine.add(request[0], {"max_new_tokens": request[1]})
                running += 1
            ended = [output for output in engine.step() if output.finished]
            outputs += ended
            running -= len(ended)
            bar.update(len(ended))
    return outputs


def _padded_batches(folder: Path, dtype: torch.dtype, requests, batch: int) -> float:
    """Seconds that transformers takes: batches padded on the left, each as long as its longest answer."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    reference.generation_config = GenerationConfig(pad_token_id=0)
    one = torch.zeros(1, 1, dtype=torch.long)
    reference.generate(one, attention_mask=torch.ones_like(one), max_new_tokens=2)  # whatever it prepares when first called
    started = time.perf_counter()
    for first in tqdm(range(0, len(requests), batch), desc="transformers", unit="batch"):
        part = requests[first : first + batch]
        columns = max(len(prompt) for prompt, _ in part)
        ids = torch.tensor([[0] * (columns - len(prompt)) + prompt for prompt, _ in part])
        mask = torch.tensor([[0] * (columns - len(prompt)) + [1] * len(prompt) for prompt, _ in part])
        reference.generate(ids, attention_mask=mask, max_new_tokens=max(new for _, new in part))
    return time.perf_counter() - started


def _rates(requests, seconds: float) -> dict[str, float]:
    """Tokens a second that were asked for: padding and answers that go on for others' sake do not count."""
    generated = sum(new for _, new in requests)
    total = generated + sum(len(prompt) for prompt, _ in requests)
    return {"total_tokens_per_second": total / seconds, "output_tokens_per_second": generated / seconds}


def _latencies(outputs: Sequence[RequestOutput]) -> dict[str, dict[str, float]]:
    first = [output.first_token - output.arrived for output in outputs]
    each = [
        (output.ended - output.first_token) / (len(output.token_ids) - 1) for output in outputs if len(output.token_ids) > 1
    ]
    return {
        name: {f"p{percent}": float(np.percentile(values, percent)) for percent in PERCENTILES} if values else {}
        for name, values in (("time_to_first_token", first), ("time_per_output_token", each))
    }


def _steps(engine: Engine) -> dict:
    """A step's mean seconds on host and device, and the mean share of pages and slots in use."""
    statistics = engine.statistics
    count = max(statistics.steps, 1)
    host = statistics.step_seconds - statistics.device_seconds
    return {
        "steps": statistics.steps,
        "step": {"device_seconds": statistics.device_seconds / count, "host_seconds": host / count},
        "page_use": statistics.pages / count,
        "slot_use": statistics.slots / count,
        "preemptions": statistics.preemptions,
        "compilations": statistics.compilations,
    }
