"""What our Pallas kernels do under a load where their schedules cannot tell, because it is data: turns, bytes, exchanges.

Routing is taken to be even and independent, so tiles, pairs and experts that are hit are expectations. A count that no
function here knows stays unknown, and XLA's estimate stands for the kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from custom_ops.all_gather.plan import plan as cut_all_gather
from custom_ops.all_gather.shapes import AllGatherShape
from custom_ops.gated_delta_net.pallas_decode import TILE as DECODE_TILE
from custom_ops.gated_delta_net.tiling import CHUNK
from custom_ops.ragged_moe import pallas_plan as experts_plan
from custom_ops.ragged_moe.cost import MoeShape, micro_batches
from custom_ops.ragged_moe.load import ExpertsLoad
from custom_ops.ragged_moe.pallas_plan import ExpertsShape
from custom_ops.ragged_moe.wire import FOR_FP8_WEIGHTS
from custom_ops.ragged_paged_attention.pallas_cost import AttentionWork
from custom_ops.ragged_paged_attention.pallas_layout import AttentionShape
from custom_ops.reduce_scatter.plan import plan as cut_reduce_scatter
from custom_ops.reduce_scatter.shapes import ReduceScatterShape
from custom_ops.schedule.bundles import Loop
from torchqwen_tpu.planning.hlo import Array
from torchqwen_tpu.planning.load import Load

_SHORT = {"bf16": "bfloat16", "f32": "float32", "f8e4m3fn": "float8_e4m3fn", "s8": "int8"}


@dataclass(frozen=True)
class GatedDeltaNet:
    """The kernels of Gated DeltaNet on one core.

    Args:
        rows: token rows of the graph, of one rank.
        value_heads, channels: of one core.
        state_bytes: of an element of the recurrent states.
    """

    load: Load
    rows: int
    value_heads: int
    channels: int
    key_dim: int
    value_dim: int
    window: int
    state_bytes: int

    def turns(self, name: str, loop: Loop) -> float | None:
        if name.startswith("gated_delta_net_decode"):
            if loop.steps == self.value_heads and not loop.inner:
                return 0  # zeroes the state of a sequence that is new
            return max(-(-self.load.decoding // DECODE_TILE), 1) if loop.steps is None else None
        if name.startswith("gated_delta_net_chunk") and loop.steps is None:
            return -(-self.rows // CHUNK) + max(self.load.sequences - 1, 0)
        return None

    def bytes(self, name: str) -> float | None:
        """Both states of each sequence read and written, rows read and written."""
        if not name.startswith("gated_delta_net"):
            return None
        load, decode = self.load, name.startswith("gated_delta_net_decode")
        tokens, sequences = (load.decoding, load.decoding) if decode else (load.prefill, load.sequences)
        values = self.value_heads * self.value_dim
        states = 2 * values * self.key_dim * self.state_bytes
        windows = 2 * 2 * (self.window - 1) * self.channels
        return sequences * (states + windows) + tokens * (2 * self.channels + 8 * self.value_heads + 2 * values)


class Kernels:
    """All of a graph's kernels under a load; every method answers None for what it does not know.

    Args:
        config: the text configuration.
        rows: token rows of the graph, of one rank.
        fp8: whether the experts' weights are.
        head_shards: devices over which heads are split.
        kv_dtype: of the KV pages.
    """

    def __init__(
        self, config, load: Load, rows: int, fp8: bool, head_shards: int, state_bytes: int, chips: int,
        page_size: int = 256, kv_dtype: str = "bfloat16",
    ):  # fmt: skip
        self._chips, self._cores = chips, load.devices // chips
        self._gated_delta_net = GatedDeltaNet(
            load, rows, config.linear_num_value_heads // head_shards, _channels(config) // head_shards,
            config.linear_key_head_dim, config.linear_value_head_dim, config.linear_conv_kernel_dim, state_bytes,
        )  # fmt: skip
        pages = -(-max(load.context, load.prefill_context + load.prefill) // page_size) + 1
        attention = AttentionShape(
            config.num_attention_heads // head_shards, config.num_key_value_heads // head_shards, config.head_dim,
            page_size, load.decoding + load.sequences, int(pages), "bfloat16", kv_dtype,
        )  # fmt: skip
        self._attention = AttentionWork(
            attention, rows, load.decoding, load.context, load.sequences, load.prefill, load.prefill_context
        )
        self.experts = _experts(config, load, rows, fp8, chips) if hasattr(config, "num_experts") else None

    def turns(self, name: str, loop: Loop) -> float | None:
        """Turns of a loop in a kernel."""
        if name.startswith("attention_"):
            return self._attention.turns(name, loop)
        turns = self._gated_delta_net.turns(name, loop)
        return self.experts.turns(name, loop) if turns is None and self.experts else turns

    def bytes(self, name: str) -> float | None:
        """Bytes that a kernel moves, where it touches only a part of what it is given."""
        if name.startswith("attention_"):
            return self._attention.bytes(name)
        size = self._gated_delta_net.bytes(name)
        return self.experts.bytes(name) if size is None and self.experts else size

    def seconds(self, name: str, whole: Array) -> float | None:
        """Seconds of a call of a hierarchical collective, by its own model (`custom_ops.all_gather.cost`,
        `custom_ops.reduce_scatter.cost`); whole: the array of the rows of all devices."""
        if name not in ("all_gather", "reduce_scatter"):
            return None
        *outer, columns = whole.dims
        rows, dtype = math.prod(outer), _SHORT[whole.dtype]
        if name == "all_gather":
            return cut_all_gather(
                AllGatherShape(self._chips, self._cores, rows // (self._chips * self._cores), columns, dtype)
            ).time
        shape = ReduceScatterShape(self._chips, self._cores, rows, columns, dtype)
        cut = cut_reduce_scatter(shape)
        return None if cut is None else cut.time / len(cut.column_blocks)


def _channels(config) -> int:
    keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    return keys + config.linear_num_value_heads * config.linear_value_head_dim


def _experts(config, load: Load, rows: int, fp8: bool, chips: int) -> ExpertsLoad:
    dtype, wire = ("float8_e4m3fn", FOR_FP8_WEIGHTS.name) if fp8 else ("bfloat16", "bfloat16")
    sizes = (config.hidden_size, config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size)
    hidden, experts, top_k, width = sizes
    parts = 1
    if load.ranks > 1 and rows * load.ranks % load.devices == 0:
        layer = MoeShape(chips, load.devices // chips, rows * load.ranks, *sizes, wire, dtype)
        parts = micro_batches(layer)
    taken = -(-rows * load.ranks // parts // experts_plan.SUBLANES) * experts_plan.SUBLANES
    shape = ExpertsShape(
        taken, top_k, experts // load.devices, experts, hidden, width, dtype, "channel" if fp8 else "none"
    )
    own = ExpertsLoad(shape, load.tokens / parts)
    return own.by_pass() if own.pallas else own
