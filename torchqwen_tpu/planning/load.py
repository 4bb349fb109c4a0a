"""What a step holds, and what follows for XLA's loops whose bound is data: contexts, experts that are hit.

Routing is taken to be even: each token picks its experts independently and uniformly.
"""

from __future__ import annotations

from dataclasses import dataclass

from custom_ops.ragged_moe.xla import tile_rows as rows_of_expert_tile
from custom_ops.ragged_paged_attention.xla import BLOCK, QUERY_TILE
from custom_ops.ragged_paged_attention.xla import tile_rows as rows_of_query_tile
from torchqwen_tpu.planning.hlo import Instruction


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
    """Turns of loops for one graph under a load.

    Args:
        config: the text configuration.
        rows: token rows of the graph, and slots: sequences that it has room for, of one rank.
        passes: over the experts in a layer by the Pallas kernels; None where XLA's loop over tiles computes them.
    """

    def __init__(self, config, load: Load, rows: int, slots: int, page_size: int, passes: int | None = None):
        self.config, self.load, self.rows, self.page_size, self.passes = config, load, rows, page_size, passes
        self._tile = 1 if load.decode_graph else rows_of_query_tile(rows, slots)

    def experts_hit(self) -> float:
        """Expected part of the experts that at least one token picks."""
        config = self.config
        return 1 - (1 - config.num_experts_per_tok / config.num_experts) ** self.load.tokens

    def turns(self, loop: Instruction, around: tuple[str, ...]) -> float | None:
        """Turns of a while loop; None for one that nothing is known of."""
        operation = loop.operation
        nested = loop.op_name.count("while") > 1
        if operation == "ragged_moe":
            return self._expert_tiles() if self.passes is None else self.passes - 1
        if operation == "ragged_paged_attention":
            return self._blocks() if nested else self._query_tiles()
        if operation == "routing_statistics":
            return 0  # experts of equal probability, at the last place of a token's choice
        return None

    def _expert_tiles(self) -> float:
        config, load = self.config, self.load
        pairs = load.tokens * config.num_experts_per_tok
        tile = rows_of_expert_tile(self.rows * load.ranks * config.num_experts_per_tok, config.num_experts)
        if tile == 1:
            return pairs / load.devices
        hit = config.num_experts * self.experts_hit()
        return (pairs / tile + hit / 2) / load.devices

    def _prefill_tiles(self) -> int:
        load = self.load
        return load.sequences * -(-load.prefill // (load.sequences * self._tile)) if load.prefill else 0

    def _query_tiles(self) -> float:
        return self.load.decoding + self._prefill_tiles()

    def _blocks(self) -> float:
        """Of a tile of queries: pages in decode, blocks of pages else, on average."""
        load = self.load
        if load.decode_graph:
            return -(-load.context // self.page_size)
        positions = BLOCK if self._tile == QUERY_TILE else BLOCK // 2
        block = max(positions // self.page_size, 1) * self.page_size
        tiles = self._prefill_tiles()
        each = load.prefill_context + load.prefill / load.sequences / 2
        seen = (tiles * each + load.decoding * load.context) / max(tiles + load.decoding, 1)
        # Two loops, over blocks that are seen whole and over the others: half of the blocks each.
        return max(seen / block + 0.5, 1) / 2
