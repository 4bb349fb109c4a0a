"""What a step holds, and what follows for loops whose bound is data: tokens, contexts, experts that are hit.

Routing is taken to be even: each token picks its experts independently and uniformly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from custom_ops.gated_delta_net.tiling import CHUNK
from custom_ops.ragged_moe.xla import tile_rows
from custom_ops.ragged_paged_attention.xla import BLOCK, QUERY_TILE
from custom_ops.reduce_scatter.plan import plan as cut_reduce_scatter
from custom_ops.reduce_scatter.shapes import ReduceScatterShape
from custom_ops.schedule.bundles import Loop
from torchqwen_tpu.planning.hlo import Array, Instruction
from torchqwen_tpu.planning.simulate import operation_of

DECODE_TILE = 8
"""Sequences that the Gated DeltaNet decode kernel takes at once."""


@dataclass(frozen=True)
class Load:
    """Of one data-parallel rank in one step.

    Args:
        decoding: sequences that take one token; prefill: tokens of sequences that take more.
        context: tokens that a decoding sequence holds; prefill_context: that a prefilled one holds before the step.
        sequences: that take prefill tokens.
        ranks, devices: in the mesh.
    """

    decoding: int
    context: int
    prefill: int = 0
    prefill_context: int = 0
    sequences: int = 1
    ranks: int = 1
    devices: int = 1
    decode_graph: bool = False

    @property
    def tokens(self) -> int:
        """Of all ranks."""
        return self.ranks * (self.decoding + self.prefill)


class Expectations:
    """Turns and bytes for one graph under a load.

    Args:
        config: the text configuration.
        rows: token rows of the graph, of one rank.
        heads_shards: over how many devices heads are split.
        state_bytes: of an element of the recurrent states.
    """

    def __init__(self, config, load: Load, rows: int, heads_shards: int, page_size: int, state_bytes: int, chips: int):
        self.config, self.load, self.rows, self.page_size = config, load, rows, page_size
        self.chips = chips
        self._value_heads = config.linear_num_value_heads // heads_shards
        self._channels = (
            2 * config.linear_num_key_heads * config.linear_key_head_dim
            + config.linear_num_value_heads * config.linear_value_head_dim
        ) // heads_shards
        self._state_bytes = state_bytes

    def experts_hit(self) -> float:
        """Expected part of the experts that at least one token picks."""
        config = self.config
        return 1 - (1 - config.num_experts_per_tok / config.num_experts) ** self.load.tokens

    def turns(self, loop: Instruction, around: tuple[str, ...]) -> float | None:
        """Turns of a while loop; None for one that nothing is known of."""
        operation = operation_of(loop)
        nested = loop.op_name.count("while") > 1
        if operation == "ragged_moe":
            return self._expert_tiles()
        if operation == "ragged_paged_attention":
            return self._blocks() if nested else self._query_tiles()
        return None

    def _expert_tiles(self) -> float:
        config, load = self.config, self.load
        pairs = load.tokens * config.num_experts_per_tok
        tile = tile_rows(self.rows * load.ranks * config.num_experts_per_tok, config.num_experts)
        if tile == 1:
            return pairs / load.devices
        hit = config.num_experts * self.experts_hit()
        return (pairs / tile + hit / 2) / load.devices

    def _query_tiles(self) -> float:
        load = self.load
        return load.decoding if load.decode_graph else load.decoding + -(-load.prefill // QUERY_TILE)

    def _blocks(self) -> float:
        load = self.load
        if load.decode_graph:
            return -(-load.context // self.page_size)
        block = max(BLOCK, self.page_size)
        tiles = -(-load.prefill // QUERY_TILE)
        each = load.prefill_context + load.prefill / load.sequences / 2
        positions = (tiles * each + load.decoding * load.context) / max(tiles + load.decoding, 1)
        # Two loops, over blocks that are seen whole and over the others: half of the blocks each.
        return max(positions / block, 1) / 2

    def kernel_turns(self, name: str, loop: Loop) -> int | None:
        """Turns of a loop in a Pallas kernel; None leaves what its schedule says."""
        if name.startswith("gated_delta_net_decode"):
            if loop.steps == self._value_heads and not loop.inner:
                return 0  # zeroes the state of a sequence that is new
            return -(-self.load.decoding // DECODE_TILE) if loop.steps is None else None
        if name.startswith("gated_delta_net_chunk") and loop.steps is None:
            return -(-self.load.prefill // CHUNK)
        return None

    def kernel_seconds(self, name: str, operand: Array) -> float | None:
        """Seconds of the hierarchical reduce-scatter, by the model in `custom_ops.reduce_scatter.cost`."""
        if name != "reduce_scatter":
            return None
        hidden, width = self.config.hidden_size, {"bf16": "bfloat16", "f32": "float32"}[operand.dtype]
        rows = math.prod(operand.dims) // hidden
        cut = cut_reduce_scatter(ReduceScatterShape(self.chips, self.load.devices // self.chips, rows, hidden, width))
        return None if cut is None else cut.time

    def kernel_bytes(self, name: str) -> int | None:
        """Bytes that a kernel moves, for those that touch only a part of the pools that they are given."""
        if not name.startswith("gated_delta_net"):
            return None
        config, load = self.config, self.load
        decode = name.startswith("gated_delta_net_decode")
        tokens, sequences = (load.decoding, load.decoding) if decode else (load.prefill, load.sequences)
        values = self._value_heads * config.linear_value_head_dim
        states = 2 * (self._value_heads * config.linear_key_head_dim * config.linear_value_head_dim * self._state_bytes)
        windows = 2 * 2 * (config.linear_conv_kernel_dim - 1) * self._channels
        return sequences * (states + windows) + tokens * (2 * self._channels + 8 * self._value_heads + 2 * values)
