"""The two sides of a comparison: a model under some settings, that takes a text chunk by chunk."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
import transformers

from torchqwen_tpu.auto import AutoModelForCausalLM
from torchqwen_tpu.cache import CacheLayout
from torchqwen_tpu.checkpoint.resolve import load_config, resolve_folder
from torchqwen_tpu.config import ParallelConfig, RuntimeConfig
from torchqwen_tpu.inputs import limit_of
from torchqwen_tpu.models.causal_lm import CausalLM
from torchqwen_tpu.ops import Operations
from torchqwen_tpu.runtime.packing import Row, extend
from torchqwen_tpu.runtime.step import Steps

OURS, TRANSFORMERS = "torchqwen_tpu", "transformers"
_RUNTIME = {entry.name: entry for entry in dataclasses.fields(RuntimeConfig) if entry.name != "implementations"}
_OPERATIONS = ("gated_delta_net", "ragged_moe", "ragged_paged_attention")
_OTHERS = ("model", "dtype", "implementation", *(f"implementations.{name}" for name in _OPERATIONS))


class Side(Protocol):
    """A model in the middle of one text.

    Attributes:
        limit: the most tokens that it takes.
    """

    limit: int

    def take(self, tokens: np.ndarray) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The next tokens [n] → the input of every layer and the output of the last norm, each [n, hidden size], and logits
        [n, vocabulary]; float32, on the host."""


@dataclass(frozen=True)
class Settings:
    """One side's settings.

    Attributes:
        text: as they were given.
        model: checkpoint; None for the one that both sides share.
        dtype: None for the one that both sides share.
        implementation: `OURS` or `TRANSFORMERS`.
        runtime: how our own runs.
    """

    text: str = ""
    model: str | None = None
    dtype: str | None = None
    implementation: str = OURS
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)


def parse_settings(text: str) -> Settings:
    """"name=value,name=value" → `Settings`; an empty text stands for the defaults.

    Raises:
        ValueError: an unknown name, a value that does not fit, or a setting that transformers does not have.
    """
    given: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise ValueError(f"setting '{part}' must have the form name=value")
        if name not in _RUNTIME and name not in _OTHERS:
            raise ValueError(f"unknown setting '{name}'; there are: {', '.join((*_OTHERS, *_RUNTIME))}")
        if name in given:
            raise ValueError(f"setting '{name}' is given twice")
        given[name] = value
    implementation = given.get("implementation", OURS)
    if implementation not in (OURS, TRANSFORMERS):
        raise ValueError(f"implementation must be {OURS} or {TRANSFORMERS}, not '{implementation}'")
    ours = [name for name in given if name not in ("model", "dtype", "implementation")]
    if implementation == TRANSFORMERS and ours:
        raise ValueError(f"setting '{ours[0]}' means nothing with implementation={TRANSFORMERS}; leave it out")
    runtime = {name: _value(name, given[name]) for name in _RUNTIME if name in given}
    chosen = {name: given[f"implementations.{name}"] for name in _OPERATIONS if f"implementations.{name}" in given}
    return Settings(
        text, given.get("model"), given.get("dtype"), implementation, RuntimeConfig(**runtime, implementations=chosen)
    )


def _value(name: str, text: str):
    kind = str(_RUNTIME[name].type)
    if kind.startswith("bool"):
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{name} must be true or false, not '{text}'")
        return text.lower() == "true"
    if kind.startswith("int"):
        if not text.isdecimal():
            raise ValueError(f"{name} must be an integer, not '{text}'")
        return int(text)
    return text


def build_sides(
    settings: tuple[Settings, Settings], model: str, dtype: str, parallel: ParallelConfig, length: int
) -> tuple[Side, Side]:
    """Both sides, loaded. Where only the way of running differs they share the weights."""
    loaded: dict[tuple, CausalLM] = {}

    def side(own: Settings) -> Side:
        name, own_dtype = own.model or model, own.dtype or dtype
        folder = resolve_folder(name)
        load_config(folder)  # refuses what is not a checkpoint of this family
        if own.implementation == TRANSFORMERS:
            return TransformersSide(folder, own_dtype)
        key = (folder, own_dtype, own.runtime.scan_layers, own.runtime.quantization)
        if key not in loaded:
            loaded[key] = AutoModelForCausalLM.from_pretrained(folder, dtype=own_dtype, parallel=parallel, runtime=own.runtime)
        return OurSide(_running(loaded[key], own.runtime), length)

    return side(settings[0]), side(settings[1])


def _running(model: CausalLM, runtime: RuntimeConfig) -> CausalLM:
    """The same weights under another `RuntimeConfig`."""
    if model.steps.runtime == runtime:
        return model
    twin = copy.copy(model)
    twin._cache_layout = CacheLayout(model.config, model.mesh, runtime, model.dtype)
    twin._steps = Steps(model.model, model.lm_head, Operations(model.mesh, runtime), runtime)
    return twin


class OurSide:
    """A model of this library."""

    def __init__(self, model: CausalLM, length: int):
        self.model, self.cache, self.limit = model, model.new_cache(1, length), limit_of(model.config)

    @torch.no_grad()
    def take(self, tokens: np.ndarray) -> tuple[list[torch.Tensor], torch.Tensor]:
        """See `Side`."""
        number = np.arange(len(tokens))
        positions = np.broadcast_to(self.cache.lengths[0] + number.astype(np.int32), (3, len(tokens)))
        selected = extend(self.model.steps, self.cache, [Row(tokens, positions, number)], hidden_states=True)
        place = torch.from_numpy(selected.place[0])
        get: Callable = self.model.mesh.get
        return [get(layer)[place].float() for layer in selected.hidden_states], get(selected.logits)[place].float()


class TransformersSide:
    """The same checkpoint in transformers, on the host."""

    def __init__(self, folder, dtype: str):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self.limit, self.cache = limit_of(self.model.config.get_text_config()), None

    @torch.no_grad()
    def take(self, tokens: np.ndarray) -> tuple[list[torch.Tensor], torch.Tensor]:
        """See `Side`."""
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        output = self.model(ids, cache=self.cache, use_cache=True, output_hidden_states=True)
        self.cache = output.cache
        return [layer[0].float() for layer in output.hidden_states], output.logits[0].float()
