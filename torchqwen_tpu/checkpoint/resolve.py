"""From a path or a hub id to a folder, its configuration and its stop tokens."""

from __future__ import annotations

import json
import os
from pathlib import Path

import httpx2
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled
from transformers import AutoConfig, GenerationConfig, PretrainedConfig

from torchqwen_tpu.checkpoint.fp8 import BLOCK

MODEL_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_text")
PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt"]
"""Files that belong to a checkpoint."""


def resolve_folder(path_or_id: str | os.PathLike, **hub) -> Path:
    """A local folder as it is; a hub id downloaded (or found in the cache when offline). Files that an earlier download
    completed are not fetched again.

    Args:
        hub: revision, cache_dir, token, local_files_only and force_download, as for `huggingface_hub.snapshot_download`.

    Raises:
        FileNotFoundError: neither a folder nor a model that can be had.
        ConnectionError: the download broke off.
    """
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        return path
    name = os.fspath(path_or_id)
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise FileNotFoundError(f"there is no folder {name}")
    try:
        return Path(snapshot_download(name, allow_patterns=PATTERNS, **hub))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise FileNotFoundError(
            f"{name} is neither a folder here nor a model that the hub gave ({type(error).__name__}: {error})"
        ) from error
    except httpx2.HTTPError as error:
        raise ConnectionError(
            f"the download of {name} broke off ({type(error).__name__}: {error}); start again: files that are complete are "
            "not fetched again"
        ) from error


def load_config(folder: Path) -> PretrainedConfig:
    """The configuration of a checkpoint of this family.

    Raises:
        FileNotFoundError, ValueError: no config.json, or that of another family.
    """
    file = folder / "config.json"
    if not file.exists():
        raise FileNotFoundError(f"{folder} holds no config.json")
    return read_config(file)


def read_config(file: Path) -> PretrainedConfig:
    """A configuration of this family, from a file of any name.

    Raises:
        ValueError: not JSON, or another family's.
    """
    try:
        settings = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    check_family(settings.get("model_type") if isinstance(settings, dict) else None, str(file))
    return AutoConfig.from_pretrained(file)


def check_family(model_type: str | None, where: str) -> None:
    if model_type not in MODEL_TYPES:
        raise ValueError(
            f"{where} has model_type '{model_type}', which is not Qwen 3.5; this library loads {', '.join(MODEL_TYPES)}. "
            "Use transformers for other families."
        )


def check_quantization(config: PretrainedConfig, folder: Path) -> None:
    """Raises ValueError unless the checkpoint is unquantised or in the published FP8 format."""
    settings = getattr(config, "quantization_config", None) or {}
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    if not settings:
        return
    method, block = settings.get("quant_method"), settings.get("weight_block_size")
    if method != "fp8" or list(block or ()) != [BLOCK, BLOCK]:
        raise ValueError(
            f"{folder} is quantized with quant_method '{method}' and weight_block_size {block}; of quantized checkpoints "
            f"only fp8 with blocks of [{BLOCK}, {BLOCK}] can be read. Use that one, or the BF16 one"
        )


def load_generation_config(folder: Path, config: PretrainedConfig) -> GenerationConfig:
    """generation_config.json, with the stop tokens of the tokenizer added to its own."""
    if (folder / "generation_config.json").exists():
        generation = GenerationConfig.from_pretrained(folder)
    else:
        generation = GenerationConfig.from_model_config(config)
    stops = generation.eos_token_id if generation.eos_token_id is not None else []
    stops = list(stops) if isinstance(stops, (list, tuple)) else [stops]
    stop = _tokenizer_eos(folder)
    if stop is not None and stop not in stops:
        stops.append(stop)
    if stops:
        generation.eos_token_id = stops
        if generation.pad_token_id is None:
            generation.pad_token_id = stops[0]
    # transformers refuses to save a changed configuration that it would warn about, and lets an unchanged one pass:
    # the caller has changed nothing.
    generation._original_object_hash = hash(generation)
    return generation


def _tokenizer_eos(folder: Path) -> int | None:
    """Id of the tokenizer's end-of-sequence token, by its files."""
    settings, tokenizer = folder / "tokenizer_config.json", folder / "tokenizer.json"
    if not (settings.exists() and tokenizer.exists()):
        return None
    token = json.loads(settings.read_text()).get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    added = json.loads(tokenizer.read_text()).get("added_tokens", [])
    return next((entry["id"] for entry in added if entry["content"] == token), None)
