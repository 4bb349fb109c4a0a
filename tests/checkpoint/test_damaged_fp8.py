"""FP8 checkpoints with wrong scales: an error names file and tensor, whatever becomes of the weights."""

from __future__ import annotations

import pytest
import torch
from checkpoints import WHOLE, load, quantized, random_checkpoint, shard_name, wide_config

from torchqwen_tpu import RuntimeConfig
from torchqwen_tpu.checkpoint.header import CheckpointError
from torchqwen_tpu.config import QUANTIZATIONS

QUERY = WHOLE + "layers.1.self_attn.q_proj.weight"
EXPERT = WHOLE + "layers.1.mlp.experts.3.up_proj.weight"
NORM = WHOLE + "layers.1.input_layernorm.weight"
SHARDS = 2
every_weight = pytest.mark.parametrize("name", [QUERY, EXPERT], ids=["matrix", "expert"])


@pytest.fixture(scope="module")
def checkpoint():
    return quantized(random_checkpoint(wide_config()))


@pytest.fixture
def refused(checkpoint, tmp_path):
    """Asserts that the changed checkpoint is refused with an error that names `name` and its file."""

    def check(change, name, policy="dequantize"):
        folder = checkpoint.write(tmp_path, SHARDS, change)
        with pytest.raises(CheckpointError) as error:
            load(folder, runtime=RuntimeConfig(quantization=policy))
        message = str(error.value)
        assert name in message and any(shard_name(number, SHARDS) in message for number in range(SHARDS)), message

    return check


@pytest.mark.parametrize("policy", QUANTIZATIONS)
@pytest.mark.parametrize("value", [float("nan"), 0.0, -1.0, float("inf")])
@every_weight
def test_scale_that_cannot_be(refused, name, value, policy):
    scale = name + "_scale_inv"

    def change(tensors):
        tensors[scale] = tensors[scale].clone()
        tensors[scale][0, 1] = value

    refused(change, scale, policy)


@pytest.mark.parametrize("policy", QUANTIZATIONS)
@pytest.mark.parametrize("bits", [0x7F, 0xFF], ids=hex)
@every_weight
def test_weight_that_is_no_number(refused, name, bits, policy):
    def change(tensors):
        tensors[name] = tensors[name].clone()
        tensors[name].view(torch.uint8)[-1, 3] = bits

    refused(change, name, policy)


@pytest.mark.parametrize("policy", QUANTIZATIONS)
def test_number_that_is_none_in_fused_experts(tmp_path, policy):
    """The error says of which expert it is."""
    name = WHOLE + "layers.1.mlp.experts.down_proj"

    def change(tensors):
        tensors[name] = tensors[name].clone()
        tensors[name].view(torch.uint8)[5, 7, 9] = 0xFF

    folder = quantized(random_checkpoint(wide_config()), fused=True).write(tmp_path, change=change)
    with pytest.raises(CheckpointError, match=rf"{name} in \S*model.safetensors holds nan at \[5, 7, 9\]"):
        load(folder, runtime=RuntimeConfig(quantization=policy))


@every_weight
def test_missing_scale(refused, reads, name):
    refused(lambda tensors: tensors.pop(name + "_scale_inv"), name + "_scale_inv")
    assert not reads


@pytest.mark.parametrize("policy", QUANTIZATIONS)
@every_weight
def test_scale_of_a_weight_that_is_not_fp8(refused, reads, name, policy):
    refused(lambda tensors: tensors.update({name: tensors[name].bfloat16()}), name + "_scale_inv", policy)
    assert not reads


@pytest.mark.parametrize("name", [QUERY.replace("q_proj", "r_proj"), EXPERT.replace("experts.3", "experts.8")])
def test_scale_without_a_weight(refused, reads, name):
    refused(lambda tensors: tensors.update({name + "_scale_inv": torch.ones(1, 2)}), name + "_scale_inv")
    assert not reads


@pytest.mark.parametrize("shape", [(2, 1), (1, 1), (4,), ()], ids=str)
@every_weight
def test_scales_of_a_wrong_shape(refused, reads, name, shape):
    refused(lambda tensors: tensors.update({name + "_scale_inv": torch.ones(shape)}), name + "_scale_inv")
    assert not reads


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32, torch.float64], ids=str)
@every_weight
def test_scales_of_a_wrong_type(refused, reads, name, dtype):
    scale = name + "_scale_inv"
    refused(lambda tensors: tensors.update({scale: torch.ones(tensors[scale].shape).to(dtype)}), scale)
    assert not reads


def test_a_vector_in_fp8(refused, reads):
    def change(tensors):
        tensors[NORM] = tensors[NORM].to(torch.float8_e4m3fn)
        tensors[NORM + "_scale_inv"] = torch.ones(1)

    refused(change, NORM)
    assert not reads


@pytest.mark.parametrize("policy", QUANTIZATIONS)
def test_a_scale_that_nothing_consumed_among_tensors_that_are_not_built(checkpoint, tmp_path, policy):
    """They are kept as they are, and nobody has to understand them."""

    def change(tensors):
        tensors["mtp.layers.0.other_scale_inv"] = torch.ones(3)

    load(checkpoint.write(tmp_path, change=change), runtime=RuntimeConfig(quantization=policy))
