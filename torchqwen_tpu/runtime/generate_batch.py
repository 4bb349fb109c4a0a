"""transformers' `generate_batch()` on the engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers import GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from torchqwen_tpu.config import EngineConfig
from torchqwen_tpu.inputs import limit_of
from torchqwen_tpu.runtime.engine import Engine
from torchqwen_tpu.runtime.parameters import settings_of
from torchqwen_tpu.runtime.request import RequestOutput


def generate_batch(
    model, inputs: Sequence, generation_config: GenerationConfig | None, seeds: np.ndarray, *, progress_bar: bool, warmup: bool,
    **kwargs,
) -> dict[str, GenerationOutput]:  # fmt: skip
    """Continue every prompt `seeds.shape[1]` times, each on its own.

    Args:
        seeds: [prompts, returned sequences] of the sampling.
        kwargs: settings that take the place of the configuration's.

    Returns: outputs in the order of the inputs, a prompt's further sequences before its first, under transformers' names.
    """
    settings = {**settings_of(generation_config), **kwargs}
    settings.pop("num_return_sequences", None)
    prompts, params, names = [], [], []
    for number, prompt in enumerate(inputs):
        for copy in [*range(1, seeds.shape[1]), 0]:
            prompts.append(prompt)
            params.append({**settings, "seed": int(seeds[number, copy])})
            names.append(f"req_{number}" + (f"__child#{copy - 1}" if copy else ""))
    engine = Engine(model, _sizes_for(model, prompts, settings), warm_up=warmup)
    outputs = engine.generate(prompts, params, progress=progress_bar)
    return {name: _as_transformers(name, output) for name, output in zip(names, outputs, strict=True)}


def _sizes_for(model, prompts: Sequence, settings: dict) -> EngineConfig:
    """Enough for these requests: no more slots, and no longer ones."""
    sequences = min(len(prompts), EngineConfig.max_sequences)
    new = settings.get("max_new_tokens", model.generation_config.max_new_tokens)
    if not isinstance(new, int):
        return EngineConfig(max_sequences=sequences)
    longest = max((len(prompt) for prompt in prompts if hasattr(prompt, "__len__")), default=1)
    return EngineConfig(max_sequences=sequences, max_length=min(max(longest, 1) + max(new, 1), limit_of(model.config)))


def _as_transformers(name: str, output: RequestOutput) -> GenerationOutput:
    failed = output.finish_reason == "error"
    times = {} if failed else {"created_time": output.arrived, "lifespan": (output.arrived, output.ended)}
    return GenerationOutput(
        request_id=name,
        prompt_ids=output.prompt_token_ids,
        generated_tokens=output.token_ids,
        error=output.error,
        status=RequestStatus.FAILED if failed else RequestStatus.FINISHED,
        **times,
    )
