"""What a decode call costs the host, by depth: for a model of many small layers, scanned or layer by layer."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import transformers
from transformers import Qwen3_5MoeTextConfig

from torchqwen_tpu.auto import AutoModelForCausalLM
from torchqwen_tpu.batch import place_header
from torchqwen_tpu.cache import HybridCache
from torchqwen_tpu.config import RuntimeConfig
from torchqwen_tpu.models.causal_lm import CausalLM
from torchqwen_tpu.runtime.graph import CompiledGraph
from torchqwen_tpu.runtime.shapes import DecodeShape

_TOKENS = 64
"""Room for a sequence in the cache."""
_WARM_UP = 3


@dataclass(frozen=True)
class HostTime:
    """Figures of one form of a model.

    Attributes:
        arguments: of the decode graph.
        first_call: seconds to trace and compile it, and to run it once.
        call: seconds of a call, the median.
        host: seconds of a call whose graph has the same arguments and results and next to nothing to compute, the median.
        tokens: that a call generates, a sequence.
    """

    arguments: int
    first_call: float
    call: float
    host: float
    tokens: int


def measure_host(layers: int, sequences: int, scan_layers: bool, calls: int) -> HostTime:
    """Measure decode calls of a random model of `layers` layers on the devices at hand, three in four Gated DeltaNet."""
    config = Qwen3_5MoeTextConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", runtime=RuntimeConfig(scan_layers=scan_layers))
        return _measure(model, sequences, calls)


def format_host_time(times: dict[str, HostTime]) -> str:
    """The figures for people, one line a form of the model."""
    lines = [f"{'':12}{'arguments':>10}{'first call':>12}{'call':>12}{'host':>12}{'host a token':>14}"]
    for form, time_ in times.items():
        lines.append(
            f"{form:12}{time_.arguments:>10,}{time_.first_call:>10.1f} s{1000 * time_.call:>9.2f} ms"
            f"{1000 * time_.host:>9.2f} ms{1000 * time_.host / time_.tokens:>11.3f} ms"
        )
    return "\n".join(lines)


def _measure(model: CausalLM, sequences: int, calls: int) -> HostTime:
    cache = model.new_cache(sequences, _TOKENS)
    cache.reserve(_TOKENS)
    shape, steps = DecodeShape(cache.shape), model.steps
    values, sampling = _header_values(shape, cache, model.steps.runtime.decode_steps)

    def decode() -> None:
        steps.decode(shape, cache, shape.header.pack(model.mesh.ranks, **values), sampling)

    started = time.perf_counter()
    decode()
    first_call = time.perf_counter() - started
    stand_in = _stand_in(model, cache, shape, values, sampling)
    arguments = len(steps.graph(shape).arguments)
    if len(stand_in.arguments) < arguments:
        raise RuntimeError(f"the graph that is measured has {len(stand_in.arguments)} arguments, the step's {arguments}")

    def launch() -> None:
        inputs = _inputs(model, shape, values, sampling)
        *cache.states, tokens = stand_in([*inputs, *cache.states])
        model.mesh.get(tokens).numpy()

    return HostTime(arguments, first_call, _median(decode, calls), _median(launch, calls), steps.runtime.decode_steps)


def _header_values(shape: DecodeShape, cache: HybridCache, steps: int) -> tuple[dict[str, np.ndarray], torch.Tensor]:
    ranks = cache.layout.mesh.ranks
    values = {name: np.zeros((ranks, size), np.int32) for name, size in shape.header.fields}
    values["page_table"][:] = cache.page_table.reshape(ranks, -1)
    values["steps"][:], values["eos"][:] = steps, -1
    return values, torch.ones(ranks, 3 * shape.cache.rows)


def _inputs(model: CausalLM, shape: DecodeShape, values: dict[str, np.ndarray], sampling: torch.Tensor) -> list[torch.Tensor]:
    header = shape.header.pack(model.mesh.ranks, **values)
    return [place_header(model.mesh, header), model.mesh.put(sampling, ("tokens", None))]


def _stand_in(model: CausalLM, cache: HybridCache, shape: DecodeShape, values, sampling) -> CompiledGraph:
    """A graph with all arguments and results of a decode step that does not compute one."""
    weights = [*model.parameters(), *model.model.rotary_emb.buffers()]
    rows = model.mesh.ranks * shape.cache.rows

    def function(header: torch.Tensor, sampling: torch.Tensor, *states: torch.Tensor) -> list[torch.Tensor]:
        # One element of every weight, so that none is left out.
        read = torch.stack([weight.flatten()[0].float() for weight in (*weights, sampling)]).sum()
        token = shape.header.unpack(header)["token"].reshape(1, rows) + (read * 0).to(torch.int32)
        return [*(state * 1 for state in states), token.repeat(model.steps.runtime.decode_steps + 1, 1)]

    inputs = [*_inputs(model, shape, values, sampling), *cache.states]
    return CompiledGraph(function, inputs, donated=range(2, len(inputs)))


def _median(call: Callable[[], None], calls: int) -> float:
    seconds = []
    for number in range(calls + _WARM_UP):
        started = time.perf_counter()
        call()
        if number >= _WARM_UP:
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)
