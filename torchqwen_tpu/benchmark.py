"""Tokens a second of generation and prefill, beside transformers in the same process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedModel

from torchqwen_tpu.models.causal_lm import CausalLM

PEERS = ("transformers",)
OURS = "torchqwen_tpu"


@dataclass(frozen=True)
class Sizes:
    """What is measured; `prefill_tokens` 0 leaves prefill out."""

    batches: tuple[int, ...] = (1, 8, 64)
    prompt_tokens: int = 32
    new_tokens: int = 64
    prefill_tokens: int = 4096


def measure(model: CausalLM, folder: Path, against: str | None, sizes: Sizes, pairs: int) -> dict:
    """Measure `model`, and the model of `folder` in another library, in turn.

    Args:
        against: one of PEERS, or None for none.
        pairs: measurements of each; figures are their medians, ratios the medians of each pair's ratio.

    Returns: what `torchqwen-tpu bench --json` prints.
    """
    models: dict[str, PreTrainedModel] = {OURS: model}
    if against:
        models[against] = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype).eval()
    for each in models.values():
        each.generation_config = GenerationConfig(pad_token_id=0)  # greedy, without stop tokens
    total = (len(sizes.batches) + bool(sizes.prefill_tokens)) * (pairs + 1) * len(models)
    with tqdm(total=total, desc="Measuring") as bar:
        rows = []
        for batch in sizes.batches:
            prompts = _prompts(batch, sizes.prompt_tokens, model.vocab_size)
            runs = {name: _generation(each, prompts, sizes.new_tokens) for name, each in models.items()}
            rows.append({"batch": batch, **_in_turn(runs, batch * sizes.new_tokens, pairs, bar)})
        prefill = None
        if sizes.prefill_tokens:
            prompt = _prompts(1, sizes.prefill_tokens, model.vocab_size)
            runs = {name: _prefill(each, prompt) for name, each in models.items()}
            prefill = {"tokens": sizes.prefill_tokens, **_in_turn(runs, sizes.prefill_tokens, pairs, bar)}
    return {
        "model": str(folder),
        "dtype": str(model.dtype).removeprefix("torch."),
        "devices": model.mesh.devices,
        "layout": model.mesh.layout,
        "peer_threads": torch.get_num_threads(),
        "prompt_tokens": sizes.prompt_tokens,
        "new_tokens": sizes.new_tokens,
        "unit": "tokens/s",
        "generate": rows,
        "prefill": prefill,
    }


def format_table(report: dict) -> str:
    """The report for people."""
    rows = [(f"generate, batch {row['batch']}", row) for row in report["generate"]]
    if report["prefill"]:
        rows.append((f"prefill, {report['prefill']['tokens']} tokens", report["prefill"]))
    names = [name for name in (OURS, *PEERS) if name in rows[0][1]]
    lines = [
        f"{report['model']}, {report['dtype']}, {report['devices']} device(s); "
        f"prompts of {report['prompt_tokens']} tokens, {report['new_tokens']} new ones; {report['unit']}",
        " " * 24 + "".join(f"{name:>16}" for name in names) + (f"{'ratio':>10}" if len(names) > 1 else ""),
    ]
    for label, row in rows:
        line = f"{label:<24}" + "".join(f"{row[name]:>16,.1f}" for name in names)
        lines.append(line + (f"{row['ratio']:>9.2f}x" if "ratio" in row else ""))
    return "\n".join(lines)


def _prompts(batch: int, tokens: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(vocabulary, (batch, tokens), generator=torch.Generator().manual_seed(0))


def _generation(model: PreTrainedModel, prompts: torch.Tensor, new_tokens: int) -> Callable[[], None]:
    def run() -> None:
        output = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=new_tokens)
        if output.shape[1] != prompts.shape[1] + new_tokens:
            raise RuntimeError(f"{output.shape[1] - prompts.shape[1]} tokens came out instead of {new_tokens}")

    return run


def _prefill(model: PreTrainedModel, prompt: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        with torch.no_grad():
            model(prompt, logits_to_keep=1).logits.cpu()  # the copy waits for the device

    return run


def _in_turn(runs: dict[str, Callable[[], None]], tokens: int, pairs: int, bar: tqdm) -> dict[str, float]:
    """Tokens a second of each, and the ratio of the first to the second."""
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(pairs + 1):  # the first compiles and warms caches
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            if number:
                rates[name].append(tokens / (time.perf_counter() - started))
            bar.update()
    result = {name: statistics.median(values) for name, values in rates.items()}
    if len(rates) > 1:
        ours, theirs = rates.values()
        result["ratio"] = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return result
