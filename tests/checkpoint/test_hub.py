"""Where a checkpoint comes from: a folder, or the hub's cache when offline."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from checkpoints import assert_same, load, published_state
from hub_server import COMMIT, served
from huggingface_hub.utils import close_session


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


@pytest.fixture
def hub(checkpoint_folder, monkeypatch):
    with served(checkpoint_folder) as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.address)
        files = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("time.sleep", lambda seconds: None)  # between attempts
        yield hub
    close_session()


def test_a_download_that_breaks_off_says_so_and_keeps_what_is_complete(checkpoint, hub, tmp_path):
    hub.most, hub.dies = 50_000, True
    with pytest.raises(ConnectionError, match="someone/tiny"):
        load("someone/tiny", cache_dir=tmp_path)
    complete = {path.name for path in tmp_path.glob("**/snapshots/*/*")}
    before = {name: len(hub.sent.get(name, ())) for name in complete}
    hub.most = hub.is_dead = None
    model = load("someone/tiny", cache_dir=tmp_path)
    assert_same(published_state(model), checkpoint.parameters())
    assert {name: len(hub.sent.get(name, ())) for name in complete} == before


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
