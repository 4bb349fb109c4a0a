"""Sizes of the kernels for a step's shapes: tiles of rows, chunks of weights, pairs in memory at once, by a model of cost."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from custom_ops.ragged_moe.int8_rows import INT8
from custom_ops.ragged_moe.quantized import BLOCK
from custom_ops.ragged_moe.wire import FP8, Digits

LANES = 128
SUBLANES = 8
RING_BYTES = 38 * 2**20
"""VMEM for weights that are at work or on their way; all other buffers are smaller than what is left of 64 MiB."""
CHUNK_BYTES = 7 * 2**20
"""Weights that arrive together, at most. A smaller chunk shows less latency at the start; a larger one needs fewer sums."""
PAIR_BYTES = 64 * 2**20
"""HBM for results of the pairs of a pass, at most. A step of 397B has fewer up to 4,096 tokens when routing is even."""
SCALAR_BYTES = 320 * 2**10
"""SMEM (of 1 MiB) for the scales of blocks; what is known of pairs takes up to 0.6 MiB."""
LARGEST_TILE = 256
TILE_STEP = 16
"""Rows that BF16 packs into a register."""
GROUP = 8
"""Rows whose copies are started together: the loop's own bundles are shared, and one wait does for all."""
MATRIX_TILE = 256
"""Rows and columns of a matrix unit; a core has two."""
TILE_BUNDLES = (15.5, 0.085)
"""Bundles for BF16 rows times 256 x 256 weights in FP8, on both units at once: those that bring in the weights, and more
for each row. From the compiler's schedule of products of 8 to 256 rows with 512 x 4096 weights."""
BFLOAT16_TILE_BUNDLES = (45.0, 0.045)
"""The same for weights in BF16."""
ROW_BUNDLES = 8.0
"""Bundles for each row of a tile besides its products, for 4,096 columns: its layout changed twice, SiLU."""


@dataclasses.dataclass(frozen=True)
class ExpertsShape:
    """Sizes of one device's experts in one step.

    scales: 'none', 'channel' or 'block'.
    """

    rows: int
    top_k: int
    experts: int
    num_experts: int
    hidden: int
    width: int
    weight_dtype: str = "bfloat16"
    scales: str = "none"

    @classmethod
    def of(cls, rows, expert, gate_up, down, gate_up_scale, num_experts: int) -> ExpertsShape:
        """From the arguments of `experts`; all weights and scales may be stacks of several layers."""
        by_channel = gate_up_scale is not None and gate_up_scale.ndim == gate_up.ndim - 1
        scales = "none" if gate_up_scale is None else "channel" if by_channel else "block"
        experts, hidden, width = down.shape[-3:]
        return cls(*rows.shape[:1], expert.shape[1], experts, num_experts, hidden, width, str(gate_up.dtype), scales)

    @classmethod
    def of_layer(
        cls, hidden, router_logits, valid, gate_up, down, gate_up_scale=None, down_scale=None, *, top_k: int, **_
    ) -> ExpertsShape:
        """From the arguments of `ragged_moe`, as if its rows were all that there are."""
        rows = jax.ShapeDtypeStruct((hidden.shape[0], top_k), jnp.int32)
        return cls.of(hidden, rows, gate_up, down, gate_up_scale, router_logits.shape[-1])

    @property
    def most_pairs(self) -> int:
        """(Row, local expert) pairs when all that can be are local."""
        return self.rows * min(self.top_k, self.experts)

    @property
    def mean_pairs(self) -> float:
        """The same when routing is even."""
        return self.rows * self.top_k * self.experts / self.num_experts

    @property
    def weight_bytes(self) -> int:
        """Of one expert."""
        return 3 * self.hidden * self.width * jnp.dtype(self.weight_dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a step's kernels are built with.

    tile: rows of one expert that are multiplied together.
    chunk: columns of an expert's width whose weights arrive together; `chunks` of them are an expert.
    slots: chunks that VMEM has room for; at least an expert's.
    pairs: pairs that one pass takes. A step with more of them makes another pass over the experts that are left.
    """

    shape: ExpertsShape
    tile: int
    chunk: int
    slots: int
    pairs: int

    @property
    def chunks(self) -> int:
        return self.shape.width // self.chunk

    @property
    def words(self) -> int:
        """Sublanes of 32-bit words that hold a row in BF16 (see `pallas_rows`)."""
        return self.shape.hidden // (2 * LANES)

    @property
    def pitch(self) -> int:
        """Sublanes from one row to the next, so that every row begins with a tile of memory."""
        return -(-self.words // SUBLANES) * SUBLANES

    @property
    def items(self) -> int:
        """Bound on the tiles of rows in a pass."""
        return min(self.pairs // self.tile + self.shape.experts, self.pairs)

    @property
    def passes(self) -> int:
        """Bound on the passes of a step."""
        return -(-self.shape.most_pairs // self.pairs)


def supports(shape: ExpertsShape) -> bool:
    """Whether the kernels take these sizes: whole tiles of 128 columns (two for a row, and what travels behind it)
    and an expert that fits into VMEM, weights in BF16 or FP8."""
    return (
        shape.hidden % (2 * LANES) == 0
        and shape.width % LANES == 0
        and all(_columns_behind(shape, wire) <= 2 * LANES for wire in (FP8, INT8))
        and shape.weight_dtype == ("bfloat16" if shape.scales == "none" else "float8_e4m3fn")
        and _chunk(shape) is not None
        and (shape.scales != "block" or shape.experts * shape.weight_bytes // BLOCK**2 * 4 <= SCALAR_BYTES)
    )


def _columns_behind(shape: ExpertsShape, wire) -> int:
    return Digits.of(wire, hidden=shape.hidden, top_k=shape.top_k).columns


@functools.cache
def plan(shape: ExpertsShape) -> Plan:
    """The plan with the least cost by the model.

    Raises:
        ValueError: sizes that `supports` refuses.
    """
    if not supports(shape):
        raise ValueError(
            f"the Pallas kernel takes hidden sizes in multiples of {2 * LANES}, widths in multiples of {LANES}, and BF16 or "
            f"scaled FP8 weights of which one expert fits into {RING_BYTES >> 20} MiB, not {shape}"
        )
    chunk, slots = _chunk(shape)
    room = max(PAIR_BYTES // (2 * shape.hidden), LANES)
    expected = 1.25 * shape.mean_pairs
    # As many passes as are expected anyway, all of one size.
    pairs = min(shape.most_pairs, room if expected <= room else math.ceil(expected / math.ceil(expected / room)))
    tiles = range(TILE_STEP, LARGEST_TILE + 1, TILE_STEP)
    return Plan(shape, min(tiles, key=functools.partial(bundles, shape)), chunk, slots, -(-pairs // LANES) * LANES)


def _chunk(shape: ExpertsShape) -> tuple[int, int] | None:
    """Columns of a chunk and how many chunks fit: an expert's and at least one more, so that weights arrive all the time."""
    unit = shape.weight_bytes // (shape.width // LANES)
    ring = RING_BYTES
    for parts in range(1, shape.width // LANES + 1):
        if shape.width % (parts * LANES):
            continue
        size = shape.weight_bytes // parts
        # Weights with a scale for each block are in VMEM once more, as BF16.
        room = ring - 2 * size if shape.scales == "block" else ring
        slots = min(room // size, 2 * parts + 1)
        if slots > parts and (size <= CHUNK_BYTES or size == unit):
            return shape.width // parts, slots
    return None


def bundles(shape: ExpertsShape, tile: int) -> float:
    """Expected bundles of the experts' products with tiles of `tile` rows, when routing is even and independent; a partial tile
    costs what a whole one does."""
    matrix_tiles = 3 * shape.hidden * shape.width / MATRIX_TILE**2
    weights, row = TILE_BUNDLES if shape.scales == "channel" else BFLOAT16_TILE_BUNDLES
    of_tile = matrix_tiles * (weights + row * tile) + ROW_BUNDLES * shape.hidden / 4096 * tile
    return shape.experts * tiles_of_an_expert(shape, tile) * of_tile


def tiles_of_an_expert(shape: ExpertsShape, tile: int) -> float:
    """Expected tiles of `tile` rows that an expert's rows fill; their count is nearly a Poisson variable."""
    mean = shape.mean_pairs / shape.experts
    most = math.ceil(mean + 6 * math.sqrt(mean) + 6)
    probability = (math.exp(count * math.log(mean) - mean - math.lgamma(count + 1)) for count in range(1, most + 1))
    return sum(part * -(-count // tile) for count, part in enumerate(probability, 1))


assert BLOCK == LANES, "scales of blocks lie along whole tiles"
