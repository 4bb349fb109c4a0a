"""Operations of one layer of Qwen 3.5-397B as graphs of their own, for the calibration of the cost model.

`python -m torchqwen_tpu.planning.layer FOLDER` is the process that compiles one (see `compile`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from transformers import Qwen3_5MoeTextConfig

from custom_ops.gated_delta_net.shapes import GatedDeltaNetShape
from custom_ops.implementations import implementation
from custom_ops.ragged_moe.wire import FOR_FP8_WEIGHTS
from custom_ops.tpu_compiler import compile_jax, device_mesh
from torchqwen_tpu.planning.arguments import Argument

CONFIG = Qwen3_5MoeTextConfig(
    hidden_size=4096, num_experts=512, num_experts_per_tok=10, moe_intermediate_size=1024, linear_num_key_heads=16,
    linear_num_value_heads=64, linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
)  # fmt: skip
CHIPS, CORES = 4, 2
DEVICES = CHIPS * CORES
AXES = ("chip", "core")
FP8 = "float8_e4m3fn"


@dataclass(frozen=True)
class Layer:
    """One operation on one machine of four chips.

    Args:
        operation: 'ragged_moe', the whole block of routed experts on all cores, or 'gated_delta_net', decode on one core.
        rows: tokens of all cores, or sequences of the core.
        state_dtype: of the recurrent states.
    """

    operation: str
    rows: int
    state_dtype: str = "float32"

    module = "torchqwen_tpu.planning.layer"
    devices = DEVICES


def main(folder: str) -> None:
    """Writes hlo and result.json into `folder`, as the process of a whole step does."""
    layer = Layer(**json.loads((Path(folder) / "graph.json").read_text()))
    compiled, arguments = {"ragged_moe": _experts, "gated_delta_net": _gated_delta_net}[layer.operation](layer)
    (Path(folder) / "hlo").write_text(compiled.as_text())
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer = {"memory": {}, "arguments": [dataclasses.astuple(each) for each in arguments], "fits": True, "peak": peak}
    (Path(folder) / "result.json").write_text(json.dumps(answer))


def _experts(layer: Layer):
    mesh = AbstractMesh((CHIPS, CORES), AXES)
    hidden, width, experts, top_k = 4096, 1024, CONFIG.num_experts, CONFIG.num_experts_per_tok
    function = functools.partial(
        implementation("ragged_moe", "tpu"), top_k=top_k, token_axes=AXES, expert_axes=AXES,
        wire=FOR_FP8_WEIGHTS, sum_dtype="bfloat16", micro_batches=None, all_gather=implementation("all_gather", "tpu"),
        reduce_scatter=implementation("reduce_scatter", "tpu"),
    )  # fmt: skip

    def ragged_moe(*arrays):
        split = tuple(PartitionSpec(AXES, *(None,) * (array.ndim - 1)) for array in arrays)
        return jax.shard_map(function, mesh=mesh, in_specs=split, out_specs=PartitionSpec(AXES, None), check_vma=False)(*arrays)

    shapes = (
        ((layer.rows, hidden), "bfloat16"), ((layer.rows, experts), "float32"), ((layer.rows,), "bool"),
        ((experts, 2 * width, hidden), FP8), ((experts, hidden, width), FP8), ((experts, 2 * width), "float32"),
        ((experts, hidden), "float32"),
    )  # fmt: skip
    devices = device_mesh(mesh)
    arrays = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(devices, PartitionSpec(AXES, *(None,) * (len(shape) - 1))))
        for shape, dtype in shapes
    ]
    return compile_jax(ragged_moe, *arrays), []


def _gated_delta_net(layer: Layer):
    config, rows = CONFIG, layer.rows
    shape = GatedDeltaNetShape(
        config.linear_num_key_heads, config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    )
    heads = shape.value_heads
    arrays = (
        ((rows, shape.channels), "bfloat16"), ((rows, heads), "float32"), ((rows, heads), "float32"),
        ((config.linear_conv_kernel_dim, shape.channels), "bfloat16"), ((heads,), "float32"), ((heads,), "float32"),
        *[((rows,), "int32")] * 4, ((rows, config.linear_conv_kernel_dim, shape.channels), "bfloat16"),
        ((rows, heads, shape.key_dim, shape.value_dim), layer.state_dtype),
    )  # fmt: skip
    function = implementation("gated_delta_net", "tpu")

    def gated_delta_net(*arrays):
        return function(*arrays, shape=shape, decode=True)

    structs = [jax.ShapeDtypeStruct(size, dtype) for size, dtype in arrays]
    states = Argument("recurrent states", 0, (1, rows))
    return compile_jax(gated_delta_net, *structs, donated=(10, 11)), [states]


if __name__ == "__main__":
    main(*sys.argv[1:])
