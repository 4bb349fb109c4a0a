"""The only file that a plan reads: config.json, from a folder, by its path, or from the hub."""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled
from transformers import AutoConfig, PretrainedConfig

from torchqwen_tpu.checkpoint.resolve import check_family


def find_config(model: str) -> Path:
    """The config.json of a model.

    Args:
        model: a folder that holds one, the file itself, or a model id of the hub.

    Raises:
        FileNotFoundError: none of these.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path.parent} holds no config.json")
    if path.is_file():
        return path
    try:
        return Path(hf_hub_download(model, "config.json"))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise FileNotFoundError(
            f"{model} is neither a folder or config.json here nor a model that the hub gave ({type(error).__name__}: {error})"
        ) from error


def read_config(file: Path) -> PretrainedConfig:
    """A configuration of this family.

    Raises:
        ValueError: not JSON, or another family's.
    """
    try:
        settings = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    check_family(settings.get("model_type") if isinstance(settings, dict) else None, str(file))
    return AutoConfig.from_pretrained(file)
