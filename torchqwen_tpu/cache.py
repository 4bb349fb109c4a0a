"""HybridCache: KV pages, convolution windows and recurrent states of a batch of sequences, on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch_xla

from torchqwen_tpu.batch import bucket
from torchqwen_tpu.config import RuntimeConfig
from torchqwen_tpu.ops import CONV_STATE, PAGE_SCALE, PAGED, PAGES, RECURRENT_STATE, gated_delta_net_shape
from torchqwen_tpu.parallel import DeviceMesh
from torchqwen_tpu.parallel.mesh import Axes
from torchqwen_tpu.runtime.graph import CompiledGraph

DEFAULT_PAGE_SIZE = {"CPU": 64, "TPU": 256}


@dataclass(frozen=True)
class CacheShape:
    """Sizes of a cache: `rows` sequences a rank, each with a page table of `pages` KV pages.

    `pool` is the number of pages a rank that the tables name; None where every row has pages of its own.
    """

    rows: int
    pages: int
    page_size: int
    pool: int | None = None

    @property
    def pool_pages(self) -> int:
        """KV pages a rank."""
        return self.rows * self.pages if self.pool is None else self.pool


class CacheLayout:
    """How the states of every layer lie on the mesh; makes, grows and reorders them. One for a model."""

    def __init__(self, config, mesh: DeviceMesh, runtime: RuntimeConfig, dtype: torch.dtype):
        self.config, self.mesh, self.dtype = config, mesh, dtype
        self.state_dtype = getattr(torch, runtime.state_dtype)
        self.kv_dtype = dtype if runtime.kv_dtype == "auto" else getattr(torch, runtime.kv_dtype)
        self.page_size = runtime.page_size or DEFAULT_PAGE_SIZE[torch_xla.runtime.device_type()]
        self._graphs: dict[tuple, CompiledGraph] = {}

    def shape(self, sequences: int, tokens: int) -> CacheShape:
        """A cache for that many sequences of that many tokens, rounded up to buckets."""
        # At least two rows: XLA:CPU computes products with a single row element by element, producers and all.
        rows, pages = -(-sequences // self.mesh.ranks), -(-max(tokens, 1) // self.page_size)
        return CacheShape(bucket(rows, 2), bucket(pages), self.page_size)

    def arrays(self, shape: CacheShape) -> list[tuple[tuple[int, ...], torch.dtype, Axes]]:
        """Global shape, dtype and logical axes of the states: windows and recurrent states of all Gated DeltaNet layers,
        pages of all attention layers and the scales of FP8 pages, each [layers of the kind, ...]. A kind without layers has
        none."""
        config, rows = self.config, self.mesh.ranks * shape.rows
        gdn = gated_delta_net_shape(config)
        linear = config.layer_types.count("linear_attention")
        full = len(config.layer_types) - linear
        arrays = []
        if linear:
            # A TPU stores rows in groups of four: another number would have it lay the pool out in another order, and copy it.
            window_rows = -(-(config.linear_conv_kernel_dim - 1) // 4) * 4
            window = (linear, rows, window_rows, gdn.channels)
            state = (linear, rows, gdn.value_heads, gdn.key_dim, gdn.value_dim)
            arrays += [(window, self.dtype, CONV_STATE), (state, self.state_dtype, RECURRENT_STATE)]
        if full:
            tokens = (full, self.mesh.ranks * shape.pool_pages, 2 * config.num_key_value_heads, shape.page_size)
            arrays.append(((*tokens, config.head_dim), self.kv_dtype, PAGES))
            if self.kv_dtype == torch.float8_e4m3fn:
                arrays.append((tokens, torch.float32, PAGE_SCALE))
        return arrays

    def allocate(self, shape: CacheShape) -> list[torch.Tensor]:
        def zeros():
            device = torch_xla.device()
            return [
                self.mesh.shard(torch.zeros(size, dtype=dtype, device=device), axes)
                for size, dtype, axes in self.arrays(shape)
            ]

        return self._graph(("allocate", shape), zeros, [])([])

    def grow(self, states: list[torch.Tensor], old: CacheShape, new: CacheShape) -> list[torch.Tensor]:
        """The same sequences with room for more pages."""

        def grown(*states):
            result = []
            for state, (size, _, axes) in zip(states, self.arrays(new), strict=True):
                if axes in PAGED:
                    state = state.view(size[0], -1, old.pages, *size[2:])
                    more = state.new_zeros(*state.shape[:2], new.pages - old.pages, *size[2:])
                    state = self.mesh.shard(torch.cat([state, more], dim=2).view(size), axes)
                else:
                    state = state.clone()
                result.append(state)
            return result

        return self._graph(("grow", old, new), grown, states)(states)

    def reorder(self, states: list[torch.Tensor], shape: CacheShape, index: np.ndarray) -> list[torch.Tensor]:
        """Row i takes over everything that row index[i] holds; rows are counted over all ranks."""

        def reordered(index, *states):
            result = []
            for state, (size, _, axes) in zip(states, self.arrays(shape), strict=True):
                by_row = state.view(size[0], len(index), -1, *size[2:])
                result.append(self.mesh.shard(by_row.index_select(1, index).view(size), axes))
            return result

        inputs = [torch.from_numpy(index.astype(np.int64)).to(torch_xla.device()), *states]
        return self._graph(("reorder", shape), reordered, inputs)(inputs)

    def _graph(self, key: tuple, function, inputs: list[torch.Tensor]) -> CompiledGraph:
        if key not in self._graphs:
            self._graphs[key] = CompiledGraph(function, inputs)
        return self._graphs[key]


class HybridCache:
    """What a batch of sequences leaves behind for its continuation; goes through `forward` and `generate` as `cache`.

    Sequence i lives in row i % rows of rank i // rows. States are written in place by the model's steps.

    Attributes:
        batch: number of sequences.
        lengths: [ranks * rows] tokens that each sequence's states hold.
        states: of all layers, on the device; None until `reserve` makes them for the first step.
        columns: columns of the batch that were seen, padding included: what `get_seq_length` returns.
        offsets: [3, ranks * rows] what to add to a token's index for its position on each axis.
    """

    is_compileable = False  # as transformers asks: no torch.compile around the model

    def __init__(self, layout: CacheLayout, batch: int, tokens: int):
        self.layout = layout
        self.batch = batch
        self.shape = layout.shape(batch, tokens)
        self.states: list[torch.Tensor] | None = None
        self._expected = tokens
        total = layout.mesh.ranks * self.shape.rows
        self.lengths = np.zeros(total, np.int32)
        self.offsets = np.zeros((3, total), np.int32)
        self.columns = 0

    @property
    def is_linear(self) -> list[bool]:
        """Which layers are recurrent, as transformers asks."""
        return [kind == "linear_attention" for kind in self.layout.config.layer_types]

    @property
    def page_table(self) -> np.ndarray:
        """[ranks, rows, pages] pages of each row: a contiguous run."""
        table = np.arange(self.shape.rows * self.shape.pages, dtype=np.int32).reshape(self.shape.rows, self.shape.pages)
        return np.broadcast_to(table, (self.layout.mesh.ranks, *table.shape))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of the batch that the cache has seen, padding included."""
        return self.columns

    def expect(self, tokens: int) -> None:
        """Let the next `reserve` make room for `tokens` tokens a sequence at once."""
        self._expected = max(self._expected, tokens)

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens a sequence, and for those that are expected."""
        needed = self.layout.shape(self.batch, max(tokens, self._expected))
        if self.states is None:
            self.states, self.shape = self.layout.allocate(needed), needed
        elif needed.pages > self.shape.pages:
            self.states, self.shape = self.layout.grow(self.states, self.shape, needed), needed

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Sequence i continues what sequence beam_idx[i] holds: pages, convolution windows and recurrent states."""
        index = np.arange(len(self.lengths))
        index[: self.batch] = beam_idx.cpu().numpy()
        if self.states is not None:
            self.states = self.layout.reorder(self.states, self.shape, index)
        self.lengths, self.offsets = self.lengths[index], self.offsets[:, index]

    def crop(self, max_length: int) -> None:
        raise NotImplementedError(
            "a recurrent state cannot be cropped; keep a copy of the cache made before the tokens (copy.deepcopy) instead"
        )

    def __deepcopy__(self, memo) -> HybridCache:
        copy = object.__new__(HybridCache)
        copy.__dict__.update(self.__dict__)
        copy.lengths, copy.offsets = self.lengths.copy(), self.offsets.copy()
        if self.states is not None:
            copy.states = self.layout.reorder(self.states, self.shape, np.arange(len(self.lengths)))
        return copy
