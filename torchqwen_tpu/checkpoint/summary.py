"""What a checkpoint holds, what a mesh would hold of it, and whether it would load: from headers and scales alone."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from transformers import PretrainedConfig

from torchqwen_tpu.checkpoint.assemble import check_scales
from torchqwen_tpu.checkpoint.files import CheckpointFiles
from torchqwen_tpu.checkpoint.forms import fillings, give_form, published_parameters
from torchqwen_tpu.checkpoint.header import CheckpointError
from torchqwen_tpu.checkpoint.layout import WeightLayout
from torchqwen_tpu.checkpoint.names import is_vision, parameter_of
from torchqwen_tpu.checkpoint.plan import match
from torchqwen_tpu.checkpoint.resolve import load_generation_config
from torchqwen_tpu.parallel.mesh import DeviceMesh
from torchqwen_tpu.parallel.rules import parameter_axes

PARTS = {
    "mtp.": "multi-token prediction",
    ".mlp.experts.": "experts",
    ".mlp.shared_expert": "shared experts",
    ".mlp.gate.": "routers",
    ".linear_attn.": "Gated DeltaNet",
    ".self_attn.": "attention",
    ".mlp.": "MLP",
    "embed_tokens": "embedding",
    "lm_head": "head",
    "norm": "norms",
}
"""Part of the model by what a tensor's name contains, the first that fits."""


@dataclass
class Size:
    """Tensors of one part and type."""

    part: str
    dtype: str
    tensors: int = 0
    parameters: int = 0
    bytes: int = 0


@dataclass
class Summary:
    """Of a checkpoint folder; `problems` is empty if it would load.

    Attributes:
        device_bytes: the weights that each device of the mesh would hold, by type; empty unless it would load.
    """

    folder: str
    model_type: str
    files: int = 0
    sizes: list[Size] = field(default_factory=list)
    mesh: str = ""
    quantization: str = ""
    device_bytes: dict[str, int] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    eos_token_ids: list[int] = field(default_factory=list)
    chat_template: bool = False

    @property
    def loads(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched or self.damaged)

    def as_dict(self) -> dict:
        return {"loads": self.loads, **asdict(self)}


def summarize(
    folder: Path, config: PretrainedConfig, build, mesh: DeviceMesh, dtype: torch.dtype, quantization: str
) -> Summary:
    """Look at a checkpoint without loading it.

    Args:
        build: makes the model of `config` and `files`, on the meta device.
        mesh: need not be attached.
        dtype: of parameters that are not FP8.
    """
    result = Summary(str(folder), config.model_type, quantization=quantization)
    result.mesh = f"{mesh.chips}x{mesh.cores} {mesh.layout}"
    stops = load_generation_config(folder, config).eos_token_id or []
    result.eos_token_ids = list(stops) if isinstance(stops, (list, tuple)) else [stops]
    result.chat_template = _has_chat_template(folder)
    try:
        files = CheckpointFiles(folder)
    except CheckpointError as error:
        result.damaged.append(str(error))
        return result
    result.files = len({entry.file for entry in files.tensors.values()})
    result.sizes = _sizes(files)
    model = build(config, files)
    layout = WeightLayout(model.config)
    plan = match(files, published_parameters(model, layout))
    result.missing, result.unexpected, result.mismatched = plan.missing, plan.unexpected, plan.mismatched
    if not plan.fits:
        return result
    for filling in fillings(files, model, layout, plan, dtype, quantization):
        give_form(model, filling)
        result.damaged += check_scales(files, filling)
    if result.loads:
        result.device_bytes = device_bytes(model, mesh)
    return result


def device_bytes(model: torch.nn.Module, mesh: DeviceMesh) -> dict[str, int]:
    """Bytes of the parameters on each device of a mesh, by type."""
    result: dict[str, int] = defaultdict(int)
    for name, value in model.named_parameters():
        axes = parameter_axes(name, value.dim())
        shards = [mesh.shards(axis) if axis else 1 for axis in axes]
        local = math.prod(-(-length // count) for length, count in zip(value.shape, shards, strict=True))
        result[str(value.dtype).removeprefix("torch.")] += local * value.element_size()
    return dict(result)


def part_of_model(name: str) -> str:
    if is_vision(name):
        return "vision"
    name, _ = parameter_of(name)
    return next((part for ending, part in PARTS.items() if ending in name), "other")


def _sizes(files: CheckpointFiles) -> list[Size]:
    sizes: dict[tuple[str, str], Size] = {}
    for name, entry in files.tensors.items():
        part = part_of_model(name)
        size = sizes.setdefault((part, entry.dtype), Size(part, entry.dtype))
        size.tensors += 1
        size.parameters += math.prod(entry.shape)
        size.bytes += entry.bytes
    return sorted(sizes.values(), key=lambda size: -size.bytes)


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").exists() or (folder / "chat_template.json").exists():
        return True
    settings = folder / "tokenizer_config.json"
    return settings.exists() and bool(json.loads(settings.read_text()).get("chat_template"))
