"""The only file that a plan reads: config.json, from a folder, by its path, or from the hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled


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
