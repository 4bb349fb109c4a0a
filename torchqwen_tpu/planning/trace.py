"""A step of the model, traced with placeholders: the modules, kernels and rules of sharding that run, without any data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch_xla.core.xla_builder as xla_builder
from jax.sharding import AbstractMesh
from transformers import PretrainedConfig

from custom_ops.bridge import lowering_for
from torchqwen_tpu.cache import CacheLayout
from torchqwen_tpu.config import RuntimeConfig
from torchqwen_tpu.monitoring.recorder import Statistics
from torchqwen_tpu.ops import Operations
from torchqwen_tpu.parallel.mesh import DeviceMesh
from torchqwen_tpu.planning.arguments import DTYPE, Inputs, build_model, make_states
from torchqwen_tpu.planning.layouts import with_copies
from torchqwen_tpu.planning.request import KV_DTYPES, Graph
from torchqwen_tpu.runtime.penalties import penalty_header
from torchqwen_tpu.runtime.shapes import DecodeShape, ExtendShape
from torchqwen_tpu.runtime.step import Steps

HEADER = "header"


@dataclass
class Traced:
    """A graph without data, and what `custom_ops.tpu_compiler.compile_graph` wants to know of it."""

    outputs: list[torch.Tensor]
    inputs: Inputs
    donated: dict[int, None]
    mesh: AbstractMesh


@torch.no_grad()
def trace(config: PretrainedConfig, graph: Graph, implementations: dict[str, str]) -> Traced:
    """Trace the step that `graph` describes; `implementations` as in `RuntimeConfig`.

    Raises:
        ValueError: heads or experts that the layout cannot split.
    """
    mesh = DeviceMesh(graph.chips, graph.cores, graph.layout)
    inputs = Inputs(mesh, xla_builder.create_placeholder_tensor)
    runtime = RuntimeConfig(
        page_size=graph.page_size, state_dtype=graph.state_dtype, kv_dtype=KV_DTYPES[graph.kv_dtype], scan_layers=True,
        decode_steps=graph.decode_steps, implementations=implementations,
    )  # fmt: skip
    with lowering_for("tpu"):
        model = build_model(with_copies(config, graph.key_value_copies), graph.weights == "fp8", inputs)
        steps = Steps(model.model, model.lm_head, Operations(mesh, runtime), runtime)
        layout = CacheLayout(model.config, mesh, runtime, DTYPE)
        cache = layout.shape(graph.sequences, graph.tokens_per_sequence)
        # As the engine serves them: page tables of a rounded length over a pool of as many pages as the sequences fill.
        pages = -(-graph.sequences // mesh.ranks) * -(-graph.tokens_per_sequence // cache.page_size)
        cache = dataclasses.replace(cache, pool=pages)
        decode, recorders = graph.tokens is None, (Statistics.of(model.config),) if graph.watched else ()
        if decode:
            size = DecodeShape(cache, candidates=graph.candidates, recorders=recorders)
        else:
            size = ExtendShape(graph.tokens, cache.rows, cache, recorders=recorders)
        tensors = [inputs.make(HEADER, (mesh.ranks, size.header.width), torch.int32, ("tokens", None))]
        if decode:
            tensors.append(inputs.make(HEADER, (mesh.ranks, 3 * cache.rows), torch.float32, ("tokens", None)))
            if graph.candidates:
                width = penalty_header(cache.rows, model.vocab_size).width
                tensors.append(inputs.make(HEADER, (mesh.ranks, width), torch.int32, ("tokens", None)))
        first = len(inputs.made)
        states = make_states(layout, cache, inputs)
        outputs = steps.trace(size, [*tensors, *states])
    donated = dict.fromkeys(range(first, first + len(states)))  # as torch_xla donates them: XLA chooses the outputs
    abstract = mesh.abstract or AbstractMesh((1, 1), ("chip", "core"))
    return Traced(outputs, inputs, donated, abstract)
