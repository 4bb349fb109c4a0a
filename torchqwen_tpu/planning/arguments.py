"""What a step reads: weights by their names and states by their kinds, as placeholders or as sizes alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jax.sharding import PartitionSpec
from transformers import PretrainedConfig

from torchqwen_tpu.auto import class_of
from torchqwen_tpu.cache import CacheLayout, CacheShape
from torchqwen_tpu.checkpoint.forms import EXPERTS, KEEP_FP32, MATRICES, Filling, give_form, set_parameter
from torchqwen_tpu.checkpoint.fp8 import FP8
from torchqwen_tpu.config import RuntimeConfig
from torchqwen_tpu.models.causal_lm import CausalLM, check_divisible
from torchqwen_tpu.models.stacking import layers_of
from torchqwen_tpu.ops import CONV_STATE, PAGE_SCALE, PAGES, RECURRENT_STATE
from torchqwen_tpu.parallel.mesh import Axes, DeviceMesh
from torchqwen_tpu.parallel.rules import parameter_axes
from torchqwen_tpu.planning.request import KV_DTYPES, PlanRequest

STATES = {
    CONV_STATE: "convolution windows", RECURRENT_STATE: "recurrent states", PAGES: "KV pages", PAGE_SCALE: "KV pages",
}  # fmt: skip
"""What states are called, by their logical axes."""
DTYPE = torch.bfloat16
"""Of activations, and of weights that are not FP8."""
Create = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


@dataclass
class Input:
    """An argument of a graph: `part` is the parameter's name, a kind of state, or 'header'."""

    part: str
    tensor: torch.Tensor
    spec: PartitionSpec


@dataclass(frozen=True)
class Argument:
    """An argument as one device sees it: `bytes` without the padding of tiles."""

    part: str
    bytes: int
    shape: tuple[int, ...]


class Inputs:
    """The arguments of a graph, in the order in which they are made; `create` makes their tensors."""

    def __init__(self, mesh: DeviceMesh, create: Create):
        self.mesh, self.create, self.made = mesh, create, []

    def make(self, part: str, shape, dtype: torch.dtype, axes: Axes) -> torch.Tensor:
        tensor = self.create(tuple(shape), dtype)
        self.made.append(Input(part, tensor, self.mesh.spec(axes)))
        return tensor

    def of_a_device(self) -> list[Argument]:
        sizes = {"chip": self.mesh.chips, "core": self.mesh.cores}
        arguments = []
        for entry in self.made:
            shape = list(entry.tensor.shape)
            for axis, split in enumerate(entry.spec):
                for name in () if split is None else (split,) if isinstance(split, str) else split:
                    shape[axis] //= sizes[name]
            arguments.append(Argument(entry.part, math.prod(shape) * entry.tensor.element_size(), tuple(shape)))
        return arguments


def build_model(config: PretrainedConfig, fp8: bool, inputs: Inputs) -> CausalLM:
    """The model as `from_pretrained` makes it on a TPU, every parameter and buffer one of `inputs`.

    fp8: what published FP8 checkpoints quantise is FP8, with a scale for each output channel.

    Raises:
        ValueError: heads or experts that the layout cannot split.
    """
    config = copy.deepcopy(config)
    check_divisible(config.get_text_config(), inputs.mesh)
    with torch.device("meta"):
        model = class_of(config)(config, scan_layers=True)
    for name, _ in list(model.named_parameters()):
        quantized = fp8 and name.endswith((*EXPERTS, *MATRICES))
        kept = FP8 if quantized else torch.float32 if name.endswith(KEEP_FP32) else DTYPE
        index = 0 if layers_of(name) else None
        give_form(model, Filling(name, name, index, "channel" if quantized else "plain", kept, {}))
    for name, parameter in list(model.named_parameters()):
        axes = parameter_axes(name, parameter.dim())
        set_parameter(model, name, inputs.make(name, parameter.shape, parameter.dtype, axes))
    for name, buffer in list(model.model.rotary_emb.named_buffers()):
        value = inputs.make(f"rotary_emb.{name}", buffer.shape, buffer.dtype, (None,))
        setattr(model.model.rotary_emb, name, value)
    return model.eval()


def make_states(layout: CacheLayout, cache: CacheShape, inputs: Inputs) -> list[torch.Tensor]:
    """The states of all layers (see `CacheLayout.arrays`)."""
    return [inputs.make(STATES[axes], shape, kind, axes) for shape, kind, axes in layout.arrays(cache)]


def sizes_of(config: PretrainedConfig, mesh: DeviceMesh, request: PlanRequest) -> tuple[list[Argument], list[Argument]]:
    """Weights, and the states of one sequence with one page, of a device. Nothing is traced.

    Raises:
        ValueError: heads or experts that the layout cannot split.
    """
    inputs = Inputs(mesh, lambda shape, dtype: torch.empty(shape, dtype=dtype, device="meta"))
    build_model(config, request.dtype == "fp8", inputs)
    count = len(inputs.made)
    runtime = RuntimeConfig(
        page_size=request.page_size, state_dtype=request.state_dtype, kv_dtype=KV_DTYPES[request.kv_dtype]
    )
    make_states(CacheLayout(config.get_text_config(), mesh, runtime, DTYPE), CacheShape(1, 1, request.page_size), inputs)
    arguments = inputs.of_a_device()
    return arguments[:count], arguments[count:]
