"""Loading: every form in which a checkpoint comes gives the same parameters, to the bit."""

from __future__ import annotations

import json

import pytest
import torch
from checkpoints import WHOLE, assert_same, load, published_state, random_checkpoint, unfuse, whole_config
from safetensors.torch import load_file, save_file
from support import dense_config, padded, random_rows, reference_logits, reference_of, save_random

from torchqwen_tpu import ParallelConfig, Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM


@pytest.mark.parametrize("shards", [1, 3])
def test_whole_model(checkpoint, tmp_path, shards):
    model = load(checkpoint.write(tmp_path, shards))
    assert isinstance(model, Qwen3_5MoeForCausalLM)
    assert_same(published_state(model), checkpoint.parameters())


def test_text_model_alone(checkpoint, tmp_path):
    text = checkpoint.text_only()
    assert_same(published_state(load(text.write(tmp_path))), checkpoint.parameters())


def test_text_prefix_under_a_whole_config(checkpoint, tmp_path):
    """Both prefixes occur whatever the configuration says."""

    def rename(tensors):
        for name in [name for name in tensors if name.startswith(WHOLE)]:
            tensors["model." + name.removeprefix(WHOLE)] = tensors.pop(name)

    assert_same(published_state(load(checkpoint.write(tmp_path, change=rename))), checkpoint.parameters())


@pytest.mark.parametrize("layers", [[0, 1], [1]], ids=["all layers", "one layer"])
@pytest.mark.parametrize("shards", [1, 3])
def test_experts_one_by_one(checkpoint, tmp_path, layers, shards):
    """Dealt out to shards, the gate of an expert lies in another file than its up projection."""
    folder = checkpoint.write(tmp_path, shards, lambda tensors: unfuse(tensors, layers))
    assert_same(published_state(load(folder)), checkpoint.parameters())


def test_saved_by_transformers(tmp_path, checkpoint):
    folder = checkpoint.write(tmp_path / "published")
    reference_of(folder, dtype=torch.bfloat16).save_pretrained(tmp_path / "resaved")
    expected = {name: tensor.float() for name, tensor in checkpoint.parameters().items()}
    result = published_state(load(tmp_path / "resaved", dtype="float32"))
    for name in ("linear_attn.A_log", "linear_attn.norm.weight"):  # transformers rounds them to BF16
        expected[f"model.layers.0.{name}"] = expected[f"model.layers.0.{name}"].bfloat16().float()
    assert_same(result, expected)


@pytest.mark.parametrize("dtype", [None, "auto", "bfloat16", "torch.bfloat16", torch.bfloat16], ids=str)
def test_bfloat16_keeps_what_steers_the_state_in_float32(checkpoint, checkpoint_folder, dtype):
    model = load(checkpoint_folder, dtype=dtype)
    assert_same(published_state(model), checkpoint.parameters())
    kept = [name for name, tensor in model.named_parameters() if tensor.dtype == torch.float32]
    assert kept == ["model.layers.0.linear_attn.A_log", "model.layers.0.linear_attn.norm.weight"]
    assert model.dtype == torch.bfloat16 and model.config.dtype == torch.bfloat16


def test_what_steers_the_state_is_float32_even_where_the_file_has_bfloat16(checkpoint, tmp_path):
    name = "layers.0.linear_attn.A_log"
    rounded = checkpoint.tensors[WHOLE + name].bfloat16()
    model = load(checkpoint.write(tmp_path, change=lambda tensors: tensors.update({WHOLE + name: rounded})))
    assert torch.equal(published_state(model)["model." + name], rounded.float())


def test_float32(checkpoint, checkpoint_folder):
    state = published_state(load(checkpoint_folder, dtype="float32"))
    assert_same(state, {name: tensor.float() for name, tensor in checkpoint.parameters().items()})


@pytest.mark.parametrize("dtype", ["float99", "int8", "float8_e4m3fn", "float64", torch.int32, "nn"], ids=str)
def test_unknown_dtype(checkpoint_folder, dtype, reads):
    with pytest.raises(ValueError, match=str(dtype).removeprefix("torch.")):
        load(checkpoint_folder, dtype=dtype)
    assert not reads


@pytest.mark.parametrize(
    "argument",
    [
        {"device_map": "auto"},
        {"load_in_8bit": True},
        {"quantization_config": {"bits": 4}},
        {"attn_implementation": "eager"},
    ],
    ids=lambda argument: next(iter(argument)),
)
def test_argument_that_would_be_ignored(checkpoint_folder, argument, reads):
    with pytest.raises(ValueError, match=next(iter(argument))):
        load(checkpoint_folder, **argument)
    assert not reads


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "fp8", "weight_block_size": [64, 64]},
        {"quant_method": "fp8", "weight_block_size": None},
    ],
    ids=["another method", "other blocks", "a scale a tensor"],
)
def test_quantized_in_another_way(checkpoint, tmp_path, reads, quantization):
    folder = checkpoint.write(tmp_path)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": quantization}))
    with pytest.raises(ValueError, match=f"quantized.*{quantization['quant_method']}"):
        load(folder)
    assert not reads


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", "", None], ids=str)
def test_another_family(checkpoint, tmp_path, model_type, reads):
    folder = checkpoint.write(tmp_path)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ValueError, match=f"config.json.*{model_type}"):
        load(folder)
    assert not reads


@pytest.mark.parametrize("text", ["{", "[]", ""], ids=["cut", "a list", "empty"])
def test_config_that_is_none(checkpoint, tmp_path, text):
    folder = checkpoint.write(tmp_path)
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match="config.json"):
        load(folder)


def test_no_config(checkpoint, tmp_path):
    folder = checkpoint.write(tmp_path)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="config.json"):
        load(folder)


def test_config_in_place_of_the_checkpoints_own(checkpoint, checkpoint_folder):
    config = whole_config(max_position_embeddings=512)
    model = load(checkpoint_folder, config=config)
    assert model.config.max_position_embeddings == 512
    assert model.config is not config.text_config  # the caller's object stays as it is
    assert_same(published_state(model), checkpoint.parameters())


def test_parallel_config_of_one_device(checkpoint, checkpoint_folder):
    model = load(checkpoint_folder, parallel=ParallelConfig(chips=1, cores=1, layout="tp"))
    assert_same(published_state(model), checkpoint.parameters())


@pytest.mark.parametrize(
    ("own", "tokenizer", "expected"),
    [
        ([4, 5], 6, [4, 5, 6]),
        ([4, 5], 5, [4, 5]),
        (4, 6, [4, 6]),
        (None, 6, [6]),
        ([4, 5], None, [4, 5]),
    ],
    ids=str,
)
def test_stop_tokens_are_the_union(checkpoint, tmp_path, own, tokenizer, expected):
    folder = checkpoint.write(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": own, "top_k": 7}))
    added = [{"id": number, "content": f"<{number}>"} for number in range(8)]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    eos = None if tokenizer is None else {"content": f"<{tokenizer}>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    generation = load(folder).generation_config
    assert generation.eos_token_id == expected and generation.top_k == 7
    assert generation.pad_token_id == expected[0]


def test_stop_tokens_of_the_configuration_without_other_files(tmp_path):
    checkpoint = random_checkpoint(whole_config(eos_token_id=9))
    assert load(checkpoint.write(tmp_path)).generation_config.eos_token_id == [9]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_head_of_a_dense_model(tmp_path, tied):
    """An untied head is used as it is; a tied one is the embedding, and neither is there twice."""
    folder = save_random(dense_config(tie_word_embeddings=tied), tmp_path)
    reference, model = reference_of(folder), load(folder, dtype="float32")
    assert isinstance(model, Qwen3_5ForCausalLM)
    embedding, head = reference.model.embed_tokens.weight, reference.lm_head.weight
    assert torch.equal(embedding, head) == tied
    (row,) = random_rows([7])
    logits = model(**padded([row])).logits[0].cpu()
    torch.testing.assert_close(logits, reference_logits(reference, row), atol=1e-4, rtol=0)
    names = [name for name, _ in model.named_parameters()]
    assert ("lm_head.weight" in names) == (not tied) and len(names) == len(set(names))


@pytest.mark.parametrize("same", [True, False], ids=["a copy", "another"])
def test_head_in_the_file_of_a_tied_model(tmp_path, same):
    """A copy of the embedding is not kept twice; another head is used, as in transformers."""
    folder = save_random(dense_config(tie_word_embeddings=True), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * (1 if same else -1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = load(folder, dtype="float32")
    (row,) = random_rows([7])
    logits = model(**padded([row])).logits[0].cpu()
    torch.testing.assert_close(logits, reference_logits(reference_of(folder), row), atol=1e-4, rtol=0)
    assert (model.lm_head is None) == same


def test_untied_head_that_is_missing(checkpoint, tmp_path, reads):
    folder = checkpoint.write(tmp_path, change=lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ValueError, match="lm_head.weight"):
        load(folder)
    assert not reads
