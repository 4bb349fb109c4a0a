"""A small random checkpoint in the published layout, and ways to write it: whole or text model, sharded, changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from support import moe_config
from transformers import PretrainedConfig, Qwen3_5MoeConfig

from torchqwen_tpu import AutoModelForCausalLM
from torchqwen_tpu.checkpoint.files import INDEX

WHOLE, TEXT = "model.language_model.", "model."
Tensors = dict[str, torch.Tensor]


def whole_config(**text) -> Qwen3_5MoeConfig:
    """A layer of Gated DeltaNet and one of attention (unless `layer_types` says others) over 8 experts, and a stub of a vision
    tower."""
    kinds = text.pop("layer_types", ["linear_attention", "full_attention"])
    text = moe_config(layer_types=kinds, num_hidden_layers=len(kinds), **text)
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": text.hidden_size,
        "num_position_embeddings": 16,
    }
    return Qwen3_5MoeConfig(text_config=text.to_dict(), vision_config=vision, dtype="bfloat16")


@dataclass
class Checkpoint:
    """Tensors by their names in the files, and the configuration that goes with them."""

    config: PretrainedConfig
    tensors: Tensors

    def parameters(self) -> Tensors:
        """What a model must hold, under its parameters' names: neither vision nor multi-token prediction."""
        return {
            TEXT + name.removeprefix(WHOLE) if name.startswith(WHOLE) else name: tensor
            for name, tensor in self.tensors.items()
            if not name.startswith(("mtp.", "model.visual."))
        }

    def text_only(self) -> Checkpoint:
        """The text model alone, as it is saved with a text config."""
        return Checkpoint(self.config.get_text_config(), self.parameters())

    def write(self, folder: Path, shards: int = 1, change: Callable[[Tensors], object] = lambda tensors: None) -> Path:
        """Write config and weights, the tensors dealt out to shards in turn; `change` edits a copy of them before."""
        folder.mkdir(parents=True, exist_ok=True)
        self.config.save_pretrained(folder)
        tensors = dict(self.tensors)
        change(tensors)
        names = sorted(tensors)
        files = ["model.safetensors"] if shards == 1 else [shard_name(number, shards) for number in range(shards)]
        for number, file in enumerate(files):
            save_file({name: tensors[name].contiguous() for name in names[number::shards]}, folder / file)
        if shards > 1:
            write_index(folder, {name: files[number % shards] for number, name in enumerate(names)})
        return folder


def shard_name(number: int, shards: int) -> str:
    return f"model-{number + 1:05}-of-{shards:05}.safetensors"


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def random_checkpoint(config: Qwen3_5MoeConfig, seed: int = 0) -> Checkpoint:
    """Random weights of a whole model in BF16, with FP32 where the published ones have it, and an `mtp.*` head."""
    torch.manual_seed(seed)
    state = transformers.Qwen3_5MoeForConditionalGeneration(config).state_dict()
    hidden = config.get_text_config().hidden_size
    state["mtp.fc.weight"] = torch.empty(hidden, 2 * hidden)
    state["mtp.layers.0.mlp.experts.gate_up_proj"] = torch.empty(8, 32, hidden)
    state["mtp.layers.0.mlp.experts.down_proj"] = torch.empty(8, hidden, 16)
    state["mtp.norm.weight"] = torch.empty(hidden)
    tensors = {}
    for name, tensor in state.items():
        steers = name.endswith(("A_log", "linear_attn.norm.weight"))
        tensors[name] = (torch.randn_like(tensor) * 0.2).to(torch.float32 if steers else torch.bfloat16)
    return Checkpoint(config, tensors)


def tensors_of(folder: Path) -> Tensors:
    """All tensors of a folder's safetensors files."""
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def published_state(model) -> Tensors:
    """A model's parameters on the host, in the published form."""
    return {name: tensor.cpu() for name, tensor in model.state_dict().items()}


def assert_same(result: Tensors, expected: Tensors) -> None:
    """The same names, and every tensor the same to the bit."""
    assert sorted(result) == sorted(expected)
    for name, tensor in expected.items():
        assert result[name].dtype == tensor.dtype and torch.equal(result[name], tensor), name


def load(folder, **kwargs):
    return AutoModelForCausalLM.from_pretrained(folder, **kwargs)


def unfuse(tensors: dict, layers=range(2), prefix: str = WHOLE) -> None:
    """Experts of some layers as one tensor an expert and projection, as transformers saves them."""
    for layer in layers:
        stem = f"{prefix}layers.{layer}.mlp.experts."
        gate_up, down = tensors.pop(stem + "gate_up_proj"), tensors.pop(stem + "down_proj")
        for expert in range(len(down)):
            gate, up = gate_up[expert].chunk(2)
            for part, tensor in (("gate", gate), ("up", up), ("down", down[expert])):
                tensors[f"{stem}{expert}.{part}_proj.weight"] = tensor.clone()


def wide_config(**text) -> Qwen3_5MoeConfig:
    """Sizes at which weights have several blocks, whole ones and partial ones, and experts keep theirs."""
    sizes = {"hidden_size": 160, "linear_key_head_dim": 32, "linear_value_head_dim": 48, "moe_intermediate_size": 128}
    return whole_config(**{**sizes, "shared_expert_intermediate_size": 136, **text})


QUANTIZED = (
    "in_proj_qkv.weight", "in_proj_z.weight", "out_proj.weight", "q_proj.weight", "k_proj.weight", "v_proj.weight",
    "o_proj.weight", "gate_proj.weight", "up_proj.weight", "down_proj.weight", "experts.gate_up_proj", "experts.down_proj",
)  # fmt: skip
"""Ends of the names of the weights that published FP8 checkpoints quantise."""
QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.visual"],
}


def blocks_of(weight: torch.Tensor):
    """Index of each block of a matrix, with its place in the matrix of scales."""
    for row in range(0, weight.shape[0], 128):
        for column in range(0, weight.shape[1], 128):
            yield (row // 128, column // 128), (slice(row, row + 128), slice(column, column + 128))


def quantize(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix (or several) in FP8 with its scales in `dtype`, block by block."""
    if weight.dim() == 3:
        return tuple(torch.stack(tensors) for tensors in zip(*(quantize(expert, dtype) for expert in weight), strict=True))
    quantized = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scale = torch.empty(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128), dtype=dtype)
    for place, block in blocks_of(weight):
        scale[place] = weight[block].float().abs().max() / 448
        quantized[block] = (weight[block].float() / scale[place].float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return quantized, scale


def dequantize(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    if weight.dim() == 3:
        return torch.stack([dequantize(*expert) for expert in zip(weight, scale, strict=True)])
    result = weight.float()
    for place, block in blocks_of(weight):
        result[block] *= scale[place].float()
    return result


def quantized(checkpoint: Checkpoint, scales: torch.dtype = torch.bfloat16, fused: bool = False) -> Checkpoint:
    """The checkpoint in FP8; its multi-token-prediction head too. Experts are one tensor each unless `fused`."""
    tensors = dict(checkpoint.tensors)
    if not fused:
        unfuse(tensors, range(checkpoint.config.get_text_config().num_hidden_layers))
        unfuse(tensors, [0], "mtp.")
    for name in list(tensors):
        if name.endswith(QUANTIZED) and "visual" not in name:
            tensors[name], tensors[name + "_scale_inv"] = quantize(tensors[name], scales)
    config = type(checkpoint.config).from_dict({**checkpoint.config.to_dict(), "quantization_config": QUANTIZATION})
    return Checkpoint(config, tensors)


def dequantized(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> Checkpoint:
    """What an FP8 checkpoint stands for, in `dtype`; FP32 stays FP32."""
    tensors = {}
    for name, tensor in checkpoint.tensors.items():
        if tensor.dtype == torch.float8_e4m3fn:
            tensors[name] = dequantize(tensor, checkpoint.tensors[name + "_scale_inv"]).to(dtype)
        elif not name.endswith("_scale_inv"):
            tensors[name] = tensor if tensor.dtype == torch.float32 else tensor.to(dtype)
    return Checkpoint(checkpoint.config, tensors)
