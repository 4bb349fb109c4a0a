"""Where a checkpoint comes from: a folder, or the hub's cache when offline."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from checkpoints import assert_same, load, published_state

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub_cache(checkpoint_folder, tmp_path) -> Path:
    """A hub cache that holds the checkpoint as someone/tiny."""
    repository = tmp_path / "hub" / "models--someone--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    shutil.copytree(checkpoint_folder, repository / "snapshots" / COMMIT)
    return tmp_path / "hub"


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_hub_id_from_the_cache(checkpoint, hub_cache, revision):
    model = load("someone/tiny", cache_dir=hub_cache, revision=revision)
    assert_same(published_state(model), checkpoint.parameters())


@pytest.mark.parametrize("name", ["someone/other", "other", "not//valid", "someone/tiny/extra", "some one/tiny"])
def test_unknown_hub_id(hub_cache, name):
    with pytest.raises(FileNotFoundError, match=name):
        load(name, cache_dir=hub_cache)


def test_unknown_revision(hub_cache):
    with pytest.raises(FileNotFoundError, match="someone/tiny"):
        load("someone/tiny", cache_dir=hub_cache, revision="other")


@pytest.mark.parametrize("path", ["/nowhere/at/all", "./nowhere", "~/nowhere-at-all", "a/b/c"])
def test_no_such_folder(path):
    with pytest.raises(FileNotFoundError, match="nowhere|a/b/c"):
        load(path)


def test_file_in_place_of_a_folder(checkpoint_folder):
    with pytest.raises(FileNotFoundError, match="config.json"):
        load(checkpoint_folder / "config.json")


def test_empty_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json"):
        load(tmp_path)


def test_folder_as_a_string(checkpoint, checkpoint_folder):
    assert_same(published_state(load(str(checkpoint_folder))), checkpoint.parameters())
