"""Run by test_steps_for_tpu.py in a process of its own: a step of 397B-A17B in FP8, traced on placeholders that hold no data
and compiled for the eight cores of tpu7x:2x2x1.

Argument: "decode" (64 sequences, 8K context) or "mixed" (1,024 tokens a rank). Prints JSON: arguments of the graph, bytes a
core, how often each Gated DeltaNet kernel is in the compiled HLO, and instructions that copy a whole cache.
"""

from __future__ import annotations

import json
import math
import re
import sys

import torch
import torch_xla.core.xla_builder as xla_builder
from transformers import Qwen3_5MoeTextConfig

from custom_ops.bridge import lowering_for
from custom_ops.tpu_compiler import compile_graph
from torchqwen_tpu import ParallelConfig, Qwen3_5MoeForCausalLM, RuntimeConfig
from torchqwen_tpu.cache import CacheLayout, CacheShape
from torchqwen_tpu.checkpoint.forms import set_parameter
from torchqwen_tpu.ops import Operations
from torchqwen_tpu.parallel import build_mesh
from torchqwen_tpu.parallel.mesh import Axes
from torchqwen_tpu.parallel.rules import parameter_axes
from torchqwen_tpu.runtime.shapes import DecodeShape, ExtendShape
from torchqwen_tpu.runtime.step import Steps

CONFIG = Qwen3_5MoeTextConfig(
    vocab_size=248320, hidden_size=4096, num_hidden_layers=60, num_attention_heads=32, num_key_value_heads=2, head_dim=256,
    linear_num_key_heads=16, linear_num_value_heads=64, linear_key_head_dim=128, linear_value_head_dim=128,
    num_experts=512, num_experts_per_tok=10, moe_intermediate_size=1024, shared_expert_intermediate_size=1024,
    max_position_embeddings=262144,
)  # fmt: skip
PAGES = 36
"""Of a sequence: room for 9K tokens in pages of 256."""
QUANTIZED = ("in_proj_qkvz.weight", "out_proj.weight", "qkv_proj.weight", "o_proj.weight", "up_proj.weight", "down_proj.weight")
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
HLO_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}


class Placeholders:
    """Inputs of a graph, without data, with how each is split."""

    def __init__(self, mesh):
        self.mesh, self.tensors, self.specs = mesh, [], []

    def new(self, shape, dtype: torch.dtype, axes: Axes) -> torch.Tensor:
        self.tensors.append(xla_builder.create_placeholder_tensor(tuple(shape), dtype))
        self.specs.append(self.mesh.spec(axes))
        return self.tensors[-1]


def fill(model, inputs: Placeholders) -> None:
    for name, value in list(model.named_parameters()):
        axes, dtype = parameter_axes(name, value.dim()), torch.bfloat16
        if name.endswith(("A_log", "linear_attn.norm.weight")):
            dtype = torch.float32
        elif name.endswith(EXPERTS):
            dtype, scale = torch.float8_e4m3fn, name.removesuffix("_proj") + "_scale"
            set_parameter(model, scale, inputs.new(value.shape[:-1], torch.float32, axes[:-1]))
        elif name.endswith(QUANTIZED):
            dtype, shape = torch.float8_e4m3fn, (*value.shape[:-2], value.shape[-1])
            set_parameter(model, name + "_scale", inputs.new(shape, torch.float32, (*axes[:-2], axes[-1])))
        set_parameter(model, name, inputs.new(value.shape, dtype, axes))
    for name, value in list(model.model.rotary_emb.named_buffers()):
        setattr(model.model.rotary_emb, name, inputs.new(value.shape, value.dtype, (None,)))


def whole_copies(hlo: str, states: list[tuple[int, torch.dtype]]) -> list[str]:
    """Instructions that copy or turn an array as large as a state, given as elements a core and dtype."""
    found = []
    for name, dtype, shape in re.findall(r"(%[\w.\-]*(?:copy|transpose|data-format)[\w.\-]*) = \(?(\w+)\[([\d,]+)\]", hlo):
        size = math.prod(map(int, shape.split(",")))
        if any(size == elements and dtype == HLO_DTYPES[kind] for elements, kind in states):
            found.append(f"{name} {dtype}[{shape}]")
    return found


@torch.no_grad()
def main(kind: str) -> None:
    mesh = build_mesh(ParallelConfig(chips=4, cores=2))
    runtime = RuntimeConfig(page_size=256, state_dtype="bfloat16")
    inputs = Placeholders(mesh)
    with torch.device("meta"):
        model = Qwen3_5MoeForCausalLM(CONFIG, scan_layers=True)
    with lowering_for("tpu"):
        fill(model, inputs)
        cache = CacheShape(rows=64 // mesh.ranks, pages=PAGES, page_size=256)
        shape = DecodeShape(cache) if kind == "decode" else ExtendShape(1024, cache.rows, cache)
        arguments = [inputs.new((mesh.ranks, shape.header.width), torch.int32, ("tokens", None))]
        if kind == "decode":
            arguments.append(inputs.new((mesh.ranks, 3 * cache.rows), torch.float32, ("tokens", None)))
        first = len(inputs.tensors)
        layout = CacheLayout(CONFIG, mesh, runtime, torch.bfloat16).arrays(cache)
        states = [inputs.new(*array) for array in layout]
        outputs = Steps(model.model, model.lm_head, Operations(mesh, runtime), runtime).trace(shape, [*arguments, *states])
    donated = dict.fromkeys(range(first, first + len(states)))  # as torch_xla donates them: XLA chooses the outputs
    executable = compile_graph(outputs, inputs.tensors, inputs.specs, mesh.abstract, donated=donated)
    memory, hlo = executable.get_compiled_memory_stats(), executable.hlo_modules()[0].to_string()
    local = [(state.numel() // mesh.ranks, state.dtype) for state in states]
    kernels = [name.split(".")[0] for name in re.findall(r"%(\S+) = .*custom_call_target=\"tpu_custom_call\"", hlo)]
    answer = {
        "inputs": len(inputs.tensors),
        "argument bytes": memory.argument_size_in_bytes,
        "temporary bytes": memory.temp_size_in_bytes,
        "aliased bytes": memory.alias_size_in_bytes,
        "state bytes": sum(elements * dtype.itemsize for elements, dtype in local),
        "kernels": {name: kernels.count(name) for name in set(kernels)},
        "copies": whole_copies(hlo, local),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1])
