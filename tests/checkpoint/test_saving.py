"""save_pretrained and state_dict: what comes out is the published form, for us and for transformers."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from checkpoints import assert_same, load, published_state, shard_name, tensors_of
from support import padded, random_rows, reference_logits, reference_of

from torchqwen_tpu.checkpoint.files import INDEX


@pytest.fixture(scope="module")
def model(checkpoint_folder):
    return load(checkpoint_folder, dtype="float32")


@pytest.fixture(scope="module")
def row() -> list[int]:
    return random_rows([9])[0]


@pytest.fixture(scope="module")
def logits(model, row) -> torch.Tensor:
    return model(**padded([row])).logits[0].cpu()


def test_transformers_loads_the_whole_model_with_the_same_logits(model, logits, row, tmp_path):
    model.save_pretrained(tmp_path)
    reference, report = transformers.Qwen3_5MoeForConditionalGeneration.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["mismatched_keys"]
    torch.testing.assert_close(reference_logits(reference.eval(), row), logits, atol=1e-4, rtol=0)
    torch.testing.assert_close(reference_logits(reference_of(tmp_path), row), logits, atol=1e-4, rtol=0)


def test_transformers_loads_the_text_model_with_the_same_logits(checkpoint, logits, row, tmp_path):
    load(checkpoint.text_only().write(tmp_path / "text"), dtype="float32").save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["model_type"] == "qwen3_5_moe_text"
    reference = reference_of(tmp_path / "saved")
    torch.testing.assert_close(reference_logits(reference, row), logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("shard_size", ["5GB", 50_000], ids=["one file", "shards"])
def test_nothing_is_lost_or_changed(checkpoint, checkpoint_folder, tmp_path, shard_size):
    """In BF16 what is saved is what was loaded, byte for byte, `mtp.*` and `model.visual.*` included."""
    load(checkpoint_folder).save_pretrained(tmp_path, max_shard_size=shard_size)
    assert_same(tensors_of(tmp_path), checkpoint.tensors)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 3) == (shard_size != "5GB")
    assert (tmp_path / INDEX).exists() == (shard_size != "5GB")
    again = load(tmp_path)
    assert_same(published_state(again), checkpoint.parameters())


def test_multi_token_prediction_is_kept_in_a_text_model(checkpoint, tmp_path):
    text = checkpoint.text_only()
    text.tensors |= {name: tensor for name, tensor in checkpoint.tensors.items() if name.startswith("mtp.")}
    load(text.write(tmp_path / "text")).save_pretrained(tmp_path / "saved")
    assert_same(tensors_of(tmp_path / "saved"), text.tensors)


def test_tensors_that_are_only_carried_may_have_any_dtype(checkpoint, tmp_path):
    counts = {"model.visual.counts": torch.arange(3), "mtp.scale": torch.ones(2).to(torch.float8_e4m3fn)}
    folder = checkpoint.write(tmp_path / "published", change=lambda tensors: tensors.update(counts))
    load(folder).save_pretrained(tmp_path / "saved")
    saved = tensors_of(tmp_path / "saved")
    assert all(torch.equal(saved[name].float(), tensor.float()) for name, tensor in counts.items())
    assert all(saved[name].dtype == tensor.dtype for name, tensor in counts.items())


def test_config_and_generation_config(checkpoint, tmp_path):
    folder = checkpoint.write(tmp_path / "published")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 5], "top_k": 7}))
    load(folder).save_pretrained(tmp_path / "saved")
    saved = load(tmp_path / "saved")
    assert saved.generation_config.eos_token_id == [4, 5] and saved.generation_config.top_k == 7
    assert saved.config.to_dict() == load(folder).config.to_dict()
    assert (tmp_path / "saved" / "config.json").read_text().count('"model_type": "qwen3_5_moe"') == 1


@pytest.mark.parametrize("shard_size", ["5GB", 50_000], ids=["fewer shards", "more shards"])
def test_into_the_folder_it_came_from(checkpoint, tmp_path, shard_size):
    """Old shards go, and tensors that are not built here are still read from them while the new ones are written."""
    folder = checkpoint.write(tmp_path, shards=3)
    model = load(folder)
    for _ in range(2):
        model.save_pretrained(folder, max_shard_size=shard_size)
        assert_same(tensors_of(folder), checkpoint.tensors)
        assert_same(published_state(load(folder)), checkpoint.parameters())
    files = {file.name for file in folder.glob("model*")}
    if shard_size == "5GB":
        assert files == {"model.safetensors"}
    else:
        index = json.loads((folder / INDEX).read_text())
        assert files == {INDEX, *index["weight_map"].values()} and shard_name(0, 3) not in files


def test_a_file_in_place_of_the_folder(model, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file"):
        model.save_pretrained(tmp_path / "file")


def test_state_dict_is_what_the_file_holds(checkpoint, checkpoint_folder):
    assert_same(published_state(load(checkpoint_folder)), checkpoint.parameters())


def test_load_state_dict_takes_what_state_dict_gives(checkpoint, model, logits, row):
    """Other weights give other logits, and the old ones back the old logits: no step holds on to weights."""
    state = published_state(model)
    changed = {name: tensor * 1.5 if name.endswith("in_proj_qkv.weight") else tensor for name, tensor in state.items()}
    model.load_state_dict(changed)
    assert_same(published_state(model), changed)
    assert (model(**padded([row])).logits[0].cpu() - logits).abs().max() > 1e-3
    model.load_state_dict(state)
    assert_same(published_state(model), state)
    torch.testing.assert_close(model(**padded([row])).logits[0].cpu(), logits)


@pytest.mark.parametrize("ending", ["in_proj_qkv.weight", "conv1d.weight", "q_proj.weight", "A_log"])
def test_load_state_dict_of_a_wrong_shape_names_the_parameter(model, ending):
    state = published_state(model)
    name = next(name for name in state if name.endswith(ending))
    with pytest.raises(RuntimeError, match=name):
        model.load_state_dict({**state, name: state[name][1:]})
