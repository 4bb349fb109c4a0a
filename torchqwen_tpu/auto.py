"""Drop-in for transformers' AutoModelForCausalLM."""

from __future__ import annotations

import os

import transformers
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config, Qwen3_5TextConfig
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeConfig, Qwen3_5MoeTextConfig

from torchqwen_tpu.checkpoint.resolve import check_family, load_config, resolve_folder
from torchqwen_tpu.models.causal_lm import CausalLM, Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM

_CLASSES: dict[type, type[CausalLM]] = {
    Qwen3_5MoeConfig: Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig: Qwen3_5MoeForCausalLM,
    Qwen3_5Config: Qwen3_5ForCausalLM,
    Qwen3_5TextConfig: Qwen3_5ForCausalLM,
}
_HUB_ARGUMENTS = ("revision", "cache_dir", "token", "local_files_only", "force_download")


class AutoModelForCausalLM:
    """Picks the class by the checkpoint's configuration."""

    def __init__(self) -> None:
        raise OSError("use AutoModelForCausalLM.from_pretrained(...)")

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs) -> CausalLM:
        """See `CausalLM.from_pretrained`."""
        hub = {name: kwargs[name] for name in _HUB_ARGUMENTS if name in kwargs}
        folder = resolve_folder(pretrained_model_name_or_path, **hub)
        config = kwargs.get("config") or load_config(folder)
        check_family(config.model_type, "the configuration")
        return class_of(config).from_pretrained(folder, **{**kwargs, "config": config})


def class_of(config: PretrainedConfig) -> type[CausalLM]:
    """The class that a checkpoint with this configuration is loaded with."""
    return _CLASSES[type(config)]


def register() -> None:
    """Make `transformers.AutoModelForCausalLM` return this library's classes for Qwen 3.5."""
    for config, model in _CLASSES.items():
        # The Auto class itself refuses a config whose class differs from the model's `config_class`.
        MODEL_FOR_CAUSAL_LM_MAPPING.register(config, model, exist_ok=True)
    assert transformers.AutoModelForCausalLM._model_mapping is MODEL_FOR_CAUSAL_LM_MAPPING
