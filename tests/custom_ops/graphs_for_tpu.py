"""torch_xla graphs on placeholder tensors, compiled for eight cores by `compiled_graph`, in a process of their own.

The process: argument, which graph. Prints JSON: names of the kernels in the compiled HLO and of the operations in its metadata,
aliased bytes, what the states take, how often each is copied, and what is gathered from all devices.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import torch
import torch_xla.core.xla_builder as xla_builder
import torch_xla.runtime as xr
from jax.experimental import pallas as pl
from jax.sharding import AbstractMesh, PartitionSpec

from custom_ops.bridge import JaxOp, lowering_for
from custom_ops.gated_delta_net import GatedDeltaNetShape
from custom_ops.tpu_compiler import compile_graph

ROOT = Path(__file__).parents[2]
MESH = AbstractMesh((4, 2), ("chip", "core"))
SPLIT, WHOLE = PartitionSpec(("chip", "core")), PartitionSpec()
SHAPE = GatedDeltaNetShape(16, 64, 128, 128)
HLO_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float8_e4m3fn: "f8e4m3fn"}


def compiled_graph(name: str) -> dict:
    """What the process prints of a graph."""
    settings = {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": "8",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, __file__, name]
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def state_update(rows, state):
    """rows [n, width], state [n, 16, width] in place: a kernel that needs no operation of ours."""

    def kernel(rows_ref, state_ref, sum_ref, out_ref):
        out_ref[...] = state_ref[...] * 0.5 + rows_ref[...][:, None]
        sum_ref[...] = out_ref[...].sum(1)

    blocks = [pl.BlockSpec((8, 128), lambda i: (i, 0)), pl.BlockSpec((8, 16, 128), lambda i: (i, 0, 0))]
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (rows, state)]
    call = pl.pallas_call(
        kernel, name="state_update", grid=(rows.shape[0] // 8,), in_specs=blocks, out_specs=blocks, out_shape=shapes,
        input_output_aliases={1: 1},
    )  # fmt: skip
    return call(rows, state)


def placeholder(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return xla_builder.create_placeholder_tensor(shape, dtype)


def toy():
    """Two updates of one state after another, with PyTorch's work between them."""
    rows, state = placeholder(8 * 64, 128), placeholder(8 * 64, 16, 128)
    op = JaxOp("toy_update", state_update, (), MESH, (SPLIT, SPLIT), (SPLIT, SPLIT), donated=(1,))
    sums, state_between = op(rows * 3, state)
    return op(sums + 1, state_between), [rows, state], [SPLIT, SPLIT], {1: 1}


def gated_delta_net(tokens: int, sequences: int, decode: bool):
    from custom_ops.gated_delta_net.pallas_tpu import gated_delta_net as function

    bfloat16, heads = torch.bfloat16, SHAPE.value_heads
    inputs = [
        placeholder(8 * tokens, SHAPE.channels, dtype=bfloat16),
        *(placeholder(8 * tokens, heads) for _ in range(2)),
        placeholder(4, SHAPE.channels, dtype=bfloat16),
        *(placeholder(heads) for _ in range(2)),
        *(placeholder(8 * sequences, dtype=torch.int32) for _ in range(4)),
        placeholder(8 * sequences, 3, SHAPE.channels, dtype=bfloat16),
        placeholder(8 * sequences, heads, SHAPE.key_dim, SHAPE.value_dim, dtype=bfloat16),
    ]
    specs = [SPLIT] * 3 + [WHOLE] * 3 + [SPLIT] * 6
    static = (("shape", SHAPE), ("decode", decode))
    op = JaxOp("gated_delta_net", function, static, MESH, tuple(specs), (SPLIT,) * 3, donated=(10, 11))
    return op(*inputs), inputs, specs, {10: 1, 11: 2}


def experts(tokens: int):
    """397B's experts, every core with its own tokens, as the model calls them."""
    from torchqwen_tpu import RuntimeConfig
    from torchqwen_tpu.ops import Operations
    from torchqwen_tpu.parallel.mesh import DeviceMesh

    xla_builder._PT_XLA_TYPE_MAP.setdefault(torch.float8_e4m3fn, "f8e4m3fn")  # torch_xla 2.9 forgot it
    count, hidden, width, fp8 = 512, 4096, 1024, torch.float8_e4m3fn
    inputs = [
        placeholder(tokens, hidden, dtype=torch.bfloat16), placeholder(tokens, count), placeholder(tokens, dtype=torch.bool),
        placeholder(count, 2 * width, hidden, dtype=fp8), placeholder(count, hidden, width, dtype=fp8),
        placeholder(count, 2 * width), placeholder(count, hidden),
    ]  # fmt: skip
    operations = Operations(DeviceMesh(4, 2, "dp"), RuntimeConfig(implementations={"ragged_moe": "xla"}))
    output = operations.experts(*inputs[:5], top_k=10, gate_up_scale=inputs[5], down_scale=inputs[6])
    return [output], inputs, [SPLIT] * 7, {}


def attention(tokens: int, decode: bool, fp8: bool = False):
    """397B's attention as the model calls it, on the pages of two layers, of which it takes one."""
    from torchqwen_tpu import RuntimeConfig
    from torchqwen_tpu.batch import RaggedBatch
    from torchqwen_tpu.ops import PAGE_SCALE, PAGES, Operations
    from torchqwen_tpu.parallel.mesh import DeviceMesh

    xla_builder._PT_XLA_TYPE_MAP.setdefault(torch.float8_e4m3fn, "f8e4m3fn")  # torch_xla 2.9 forgot it
    mesh, sequences, width = DeviceMesh(4, 2, "dp"), 8 * 8, 36
    kind = torch.float8_e4m3fn if fp8 else torch.bfloat16
    rows = [placeholder(8 * tokens, heads, 256, dtype=torch.bfloat16) for heads in (32, 2, 2)]
    states = [placeholder(2, sequences * width, 4, 256, 256, dtype=kind)]
    if fp8:
        states.append(placeholder(2, sequences * width, 4, 256))
    integers = [placeholder(sequences, dtype=torch.int32) for _ in range(3)]
    table, layer = placeholder(sequences, width, dtype=torch.int32), placeholder(1, dtype=torch.int32)
    batch = RaggedBatch(None, *integers, None, table, decode=decode)
    outputs = Operations(mesh, RuntimeConfig()).attention(*rows, tuple(states), layer[0], batch, scale=1 / 16)
    inputs = [*rows, *states, *integers, table, layer]
    specs = [SPLIT] * 3 + [mesh.spec(axes) for axes in (PAGES, PAGE_SCALE)[: len(states)]] + [SPLIT] * 4 + [WHOLE]
    return outputs, inputs, specs, {3 + number: 1 + number for number in range(len(states))}


GRAPHS = {
    "attention, decode": lambda: attention(8, True),
    "attention, decode, FP8": lambda: attention(8, True, fp8=True),
    "attention, prefill": lambda: attention(1024, False),
    "attention, prefill, FP8": lambda: attention(1024, False, fp8=True),
    "toy": toy,
    "decode": lambda: gated_delta_net(8, 8, True),
    "experts": lambda: experts(64),
    "experts, prefill": lambda: experts(1024),
    "prefill": lambda: gated_delta_net(1024, 8, False),
}


def main(graph: str) -> None:
    xr.use_spmd()
    with lowering_for("tpu"):
        outputs, inputs, specs, donated = GRAPHS[graph]()
    executable = compile_graph(outputs, inputs, specs, MESH, donated=donated)
    hlo = executable.hlo_modules()[0].to_string()
    copies, state_bytes = [], 0
    for position in donated:
        state = inputs[position]
        size = state.numel() // MESH.size
        state_bytes += size * state.element_size()
        copied = re.findall(rf"= \(?{HLO_DTYPES[state.dtype]}\[([\d,]+)\]\S* copy(?:-start)?\(", hlo)
        shapes = [tuple(map(int, shape.split(","))) for shape in copied]
        # Leading axes may be merged or split; rows of the same size are told from states by the last axes.
        copies.append(sum(math.prod(shape) == size and shape[-2:] == tuple(state.shape[-2:]) for shape in shapes))
    memory = executable.get_compiled_memory_stats()
    answer = {
        "kernels": re.findall(r"%(\S+) = .*custom_call_target=\"tpu_custom_call\"", hlo),
        "operations": sorted(set(re.findall(r"op_name=\"[^\"]*jit\((\w+)\)", hlo))),
        "aliased bytes": memory.alias_size_in_bytes,
        "state bytes": state_bytes,
        "copies": copies,
        "gathered": re.findall(r" = (\S+?)\{\S* all-gather\(", hlo),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1])
