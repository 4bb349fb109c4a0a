"""The small random checkpoint that the tests of this folder share."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import Checkpoint, random_checkpoint, whole_config

from torchqwen_tpu.checkpoint.files import CheckpointFiles


@pytest.fixture(scope="session")
def checkpoint() -> Checkpoint:
    return random_checkpoint(whole_config())


@pytest.fixture(scope="session")
def checkpoint_folder(checkpoint, tmp_path_factory) -> Path:
    """The whole model in three shards."""
    return checkpoint.write(tmp_path_factory.mktemp("whole"), shards=3)


@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """Names of the tensors whose data is read, in order."""
    names: list[str] = []
    read_into = CheckpointFiles.read_into

    def recorded(self, name, *arguments):
        names.append(name)
        return read_into(self, name, *arguments)

    monkeypatch.setattr(CheckpointFiles, "read_into", recorded)
    return names
