"""Progress bars of long work: how much of how much, bytes a second and the time left."""

from __future__ import annotations

import re

import pytest
from checkpoints import load
from transformers.utils import logging


@pytest.fixture
def bars():
    logging.enable_progress_bar()
    yield
    logging.disable_progress_bar()


def shown(what: str, text: str) -> bool:
    """A whole bar such as `what: 100%|███| 1.2M/1.2M [00:01<00:00, 1.1MB/s]`."""
    return re.search(rf"{what}: 100%\S* ?\S*\| [\d.]+\w?/[\d.]+\w? \[[\d:]+<[\d:]+, +[\d.]+\w?B/s\]", text) is not None


def test_loading_and_saving(checkpoint_folder, tmp_path, bars, capfd):
    model = load(checkpoint_folder, save_prepared=tmp_path / "prepared")
    text = capfd.readouterr().err
    assert shown("Loading weights", text) and "Copying other tensors" in text
    load(tmp_path / "prepared")
    assert shown("Loading weights", capfd.readouterr().err)
    model.save_pretrained(tmp_path / "saved")
    assert shown("Saving weights", capfd.readouterr().err)
