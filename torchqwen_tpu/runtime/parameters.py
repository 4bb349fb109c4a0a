"""What a request asks for: transformers' generation parameters, those that an engine has."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import GenerationConfig

from torchqwen_tpu.runtime.shapes import EOS_SLOTS

_SUPPORTED = (
    "max_new_tokens", "max_length", "do_sample", "temperature", "top_k", "top_p", "min_p", "eos_token_id", "stop_strings",
    "repetition_penalty", "min_new_tokens", "min_length",
)  # fmt: skip
_WITHOUT_EFFECT = (
    "pad_token_id", "bos_token_id", "decoder_start_token_id", "use_cache", "cache_config", "max_cache_len", "early_stopping",
    "length_penalty", "return_dict_in_generate", "compile_config", "disable_compile", "transformers_version",
    "continuous_batching_config", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "assistant_lookbehind", "target_lookbehind", "max_matching_ngram_size", "token_healing", "is_assistant",
)  # fmt: skip
"""Settings of padding, beams and assistants, which mean nothing for one sequence in an engine."""
_OFF = (None, False, "", 0, [], {})
_RANGES = {
    "seed": lambda value: isinstance(value, int) and 0 <= value < 2**31,
    "temperature": lambda value: value > 0,
    "top_k": lambda value: value >= 0 and value == int(value),
    "top_p": lambda value: 0 < value <= 1,
    "min_p": lambda value: 0 <= value <= 1,
    "repetition_penalty": lambda value: 0 < value < float("inf"),
    "min_new_tokens": lambda value: isinstance(value, int) and 0 <= value < 2**31,
    "min_length": lambda value: isinstance(value, int) and 0 <= value < 2**31,
}
SHORTLIST = 64
"""Candidates that sampling sorts where top_k allows; otherwise the whole vocabulary."""


@dataclass(frozen=True)
class Parameters:
    """How one request is continued.

    Attributes:
        max_new_tokens: the most tokens to generate; None for as many as the engine has room for.
        temperature: 0 for greedy search.
        top_k, top_p, min_p: as in transformers; 0, 1 and 0 for all tokens.
        eos: ids that end the text; the one that did is part of it.
        stop_strings: texts that end the text, the one that did included.
        repetition_penalty: as in transformers; 1 for none.
        min_new_tokens: how many come before one of `eos` may.
        seed: of the sampling.
    """

    max_new_tokens: int | None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    eos: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    seed: int = 0

    @property
    def samples(self) -> bool:
        return self.temperature > 0

    @property
    def penalizes(self) -> bool:
        """Whether scores depend on the tokens so far, or on how many there are."""
        return self.repetition_penalty != 1 or (self.min_new_tokens > 0 and bool(self.eos))


def resolve_parameters(
    given: GenerationConfig | Mapping | None, defaults: GenerationConfig, prompt_tokens: int
) -> Parameters:
    """Parameters of a request, checked.

    Args:
        given: transformers' configuration, or a dict of its settings and `seed`; what it leaves open is taken from
            `defaults` (the model's generation_config), then as transformers' `generate` has it. Without a seed one is
            drawn from torch's default generator.

    Raises:
        ValueError: an unknown or unsupported parameter, or a value out of range; it names the parameter.
    """
    own = settings_of(given)
    seed = own.pop("seed", None)
    # transformers fills what is open from the model's configuration, then from its own defaults.
    merged = {**GenerationConfig._get_default_generation_params(), **settings_of(defaults), **own}
    _refuse_unsupported(merged)
    limit = _limit(own, prompt_tokens)
    limit = _limit(settings_of(defaults), prompt_tokens) if limit is None else limit
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise ValueError(f"max_new_tokens must be an integer of at least 1, not {limit!r}")
    eos = merged.get("eos_token_id")
    eos = () if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (int(eos),)
    if len(eos) > EOS_SLOTS:
        raise ValueError(f"eos_token_id names {len(eos)} tokens, and there is room for {EOS_SLOTS}")
    stop = merged.get("stop_strings")
    stop = () if not stop else (stop,) if isinstance(stop, str) else tuple(stop)
    chosen = {name: merged.get(name) for name in ("repetition_penalty", "min_new_tokens", "min_length")}
    if merged["do_sample"]:
        chosen["seed"] = int(torch.randint(0, 2**31 - 1, ())) if seed is None else seed
        chosen |= {name: merged.get(name) for name in ("temperature", "top_k", "top_p", "min_p")}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    for name, value in chosen.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not _RANGES[name](value):
            raise ValueError(f"{name}={value!r} is out of range")
    least = chosen.pop("min_length", 0) - prompt_tokens
    chosen.setdefault("min_new_tokens", max(least, 0))
    return Parameters(limit, eos=eos, stop_strings=stop, **chosen)


def _limit(settings: dict, prompt_tokens: int) -> int | None:
    """The most new tokens; as in transformers max_new_tokens goes before max_length."""
    if "max_new_tokens" in settings:
        return settings["max_new_tokens"]
    return settings["max_length"] - prompt_tokens if "max_length" in settings else None


def settings_of(given: GenerationConfig | Mapping | None) -> dict:
    """Settings that are not open, by name."""
    if given is None:
        return {}
    if isinstance(given, GenerationConfig):
        given = {name: value for name, value in vars(given).items() if not name.startswith("_")}
    elif not isinstance(given, Mapping):
        raise ValueError(f"params must be a GenerationConfig or a dict, not {type(given).__name__}")
    else:
        known = {"seed", *vars(GenerationConfig())}
        for name in given:
            if name not in known:
                close = difflib.get_close_matches(str(name), known, 1)
                raise ValueError(f"unknown sampling parameter {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
    return {name: value for name, value in given.items() if value is not None}


def _refuse_unsupported(settings: dict) -> None:
    defaults = GenerationConfig._get_default_generation_params()
    for name, value in settings.items():
        if name in _SUPPORTED or name in _WITHOUT_EFFECT or value in _OFF or value == defaults.get(name):
            continue
        if name in vars(GenerationConfig()) or name in defaults:
            raise ValueError(f"{name}={value!r} is not supported by the engine; use model.generate()")
        raise ValueError(f"unknown sampling parameter {name!r}")
