"""A step of the model, traced with placeholders: the modules, kernels and rules of sharding that run, without any data."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass

import torch
import torch_xla.core.xla_builder as xla_builder
from jax.sharding import AbstractMesh, PartitionSpec
from transformers import PretrainedConfig

from custom_ops.bridge import lowering_for
from torchqwen_tpu.auto import _CLASSES
from torchqwen_tpu.cache import CacheLayout
from torchqwen_tpu.checkpoint.forms import EXPERTS, KEEP_FP32, MATRICES, Filling, give_form, set_parameter
from torchqwen_tpu.checkpoint.fp8 import FP8
from torchqwen_tpu.config import RuntimeConfig
from torchqwen_tpu.models.causal_lm import CausalLM, check_divisible
from torchqwen_tpu.models.stacking import layers_of
from torchqwen_tpu.ops import CONV_STATE, PAGE_SCALE, PAGES, RECURRENT_STATE, Operations
from torchqwen_tpu.parallel.mesh import Axes, DeviceMesh
from torchqwen_tpu.parallel.rules import parameter_axes
from torchqwen_tpu.planning.request import KV_DTYPES, Graph
from torchqwen_tpu.runtime.step import DecodeShape, ExtendShape, Steps

STATES = {
    CONV_STATE: "convolution windows", RECURRENT_STATE: "recurrent states", PAGES: "KV pages", PAGE_SCALE: "KV pages",
}  # fmt: skip
"""What states are called, by their logical axes."""
HEADER = "header"


@dataclass
class Input:
    """A placeholder argument of a graph: `part` is the parameter's name, a kind of state, or 'header'."""

    part: str
    tensor: torch.Tensor
    spec: PartitionSpec


@dataclass
class Traced:
    """A graph without data, and what `custom_ops.tpu_compiler.compile_graph` wants to know of it."""

    outputs: list[torch.Tensor]
    inputs: list[Input]
    donated: dict[int, None]
    mesh: AbstractMesh


class _Placeholders:
    def __init__(self, mesh: DeviceMesh):
        self.mesh, self.inputs = mesh, []

    def make(self, part: str, shape, dtype: torch.dtype, axes: Axes) -> torch.Tensor:
        tensor = xla_builder.create_placeholder_tensor(tuple(shape), dtype)
        self.inputs.append(Input(part, tensor, self.mesh.spec(axes)))
        return tensor


def build_model(
    config: PretrainedConfig, dtype: torch.dtype, fp8: bool, mesh: DeviceMesh, placeholders: _Placeholders
) -> CausalLM:
    """The model as `from_pretrained` makes it on a TPU, every parameter and buffer a placeholder.

    fp8: what published FP8 checkpoints quantise is FP8, with a scale for each output channel.
    """
    config = copy.deepcopy(config)
    check_divisible(config.get_text_config(), mesh)
    with torch.device("meta"):
        model = _CLASSES[type(config)](config, scan_layers=True)
    for name, _ in list(model.named_parameters()):
        quantized = fp8 and name.endswith((*EXPERTS, *MATRICES))
        kept = FP8 if quantized else torch.float32 if name.endswith(KEEP_FP32) else dtype
        index = 0 if layers_of(name) else None
        give_form(model, Filling(name, name, index, "channel" if quantized else "plain", kept, {}))
    for name, parameter in list(model.named_parameters()):
        axes = parameter_axes(name, parameter.dim())
        set_parameter(model, name, placeholders.make(name, parameter.shape, parameter.dtype, axes))
    for name, buffer in list(model.model.rotary_emb.named_buffers()):
        value = placeholders.make(f"rotary_emb.{name}", buffer.shape, buffer.dtype, (None,))
        setattr(model.model.rotary_emb, name, value)
    return model.eval()


@torch.no_grad()
def trace(config: PretrainedConfig, graph: Graph) -> Traced:
    """Trace the step that `graph` describes.

    Raises:
        ValueError: heads or experts that the layout cannot split.
    """
    mesh = DeviceMesh(graph.chips, graph.cores, graph.layout)
    placeholders = _Placeholders(mesh)
    runtime = RuntimeConfig(
        page_size=graph.page_size, state_dtype=graph.state_dtype, prefill_chunk=graph.prefill_chunk, scan_layers=True,
        decode_steps=graph.decode_steps, kv_dtype=KV_DTYPES[graph.kv_dtype],
    )  # fmt: skip
    dtype = torch.bfloat16
    with lowering_for("tpu"):
        model = build_model(config, dtype, graph.weights == "fp8", mesh, placeholders)
        steps = Steps(model.model, model.lm_head, Operations(mesh, runtime), runtime)
        layout = CacheLayout(model.config, mesh, runtime, dtype)
        cache = layout.shape(graph.sequences, graph.tokens_per_sequence)
        # As the engine serves them: page tables of a rounded length over a pool of as many pages as the sequences fill.
        cache = dataclasses.replace(cache, pool=cache.rows * -(-graph.tokens_per_sequence // cache.page_size))
        decode = graph.tokens is None
        size = DecodeShape(cache, candidates=graph.candidates) if decode else ExtendShape(graph.tokens, cache.rows, cache)
        tensors = [placeholders.make(HEADER, (mesh.ranks, size.header.width), torch.int32, ("tokens", None))]
        if decode:
            tensors.append(placeholders.make(HEADER, (mesh.ranks, 3 * cache.rows), torch.float32, ("tokens", None)))
        first = len(placeholders.inputs)
        states = [placeholders.make(STATES[axes], shape, kind, axes) for shape, kind, axes in layout.arrays(cache)]
        outputs = steps.trace(size, [*tensors, *states])
    donated = dict.fromkeys(range(first, first + len(states)))  # as torch_xla donates them: XLA chooses the outputs
    abstract = mesh.abstract or AbstractMesh((1, 1), ("chip", "core"))
    return Traced(outputs, placeholders.inputs, donated, abstract)
