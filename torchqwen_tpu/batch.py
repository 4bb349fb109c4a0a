"""A flat ragged batch: the only form in which tokens reach the model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from torchqwen_tpu.parallel import DeviceMesh


@dataclass(frozen=True)
class RaggedBatch:
    """Tokens of several sequences in a row, with what is needed to tell them apart.

    R ranks hold T tokens and S sequences each; rank r's lie at r * T and r * S. Indices are within a rank.

    Attributes:
        positions: [3, R*T] temporal, height and width positions; -1 for rows that are no token.
        query_start: [R*S] first row of each sequence.
        query_length: [R*S] rows of each sequence, 0 for none.
        context_length: [R*S] tokens that the sequence's states and pages already hold.
        slot: [R*S] where its recurrent states live.
        page_table: [R*S, P] its KV pages.
        decode: every sequence has at most one row, row i belonging to sequence i, and the slots of a rank are a run.
        first: false for all but the first of the steps that run in one go: recorders do there what must be done in each.
    """

    positions: torch.Tensor
    query_start: torch.Tensor
    query_length: torch.Tensor
    context_length: torch.Tensor
    slot: torch.Tensor
    page_table: torch.Tensor
    decode: bool = False
    first: bool = True

    @property
    def valid(self) -> torch.Tensor:
        """[R*T] which rows are tokens."""
        return self.positions[0] >= 0


@dataclass(frozen=True)
class Header:
    """Layout of the integers that a step needs, so that they travel to the device as one array [R, width]."""

    fields: tuple[tuple[str, int], ...]
    """Name and number of integers a rank."""

    @property
    def width(self) -> int:
        return sum(size for _, size in self.fields)

    def pack(self, ranks: int, **values: np.ndarray) -> torch.Tensor:
        """Values [R, size] (or what reshapes to it) → [R, width]."""
        columns = [np.asarray(values[name], np.int32).reshape(ranks, size) for name, size in self.fields]
        return torch.from_numpy(np.concatenate(columns, axis=1))

    def unpack(self, header: torch.Tensor) -> dict[str, torch.Tensor]:
        """[R, width] → tensors [R, size] by name."""
        parts = torch.split(header, [size for _, size in self.fields], dim=1)
        return {name: part for (name, _), part in zip(self.fields, parts, strict=True)}


def place_header(mesh: DeviceMesh, header: torch.Tensor) -> torch.Tensor:
    """A packed header on the device, each rank holding its row."""
    return mesh.put(header, ("tokens", None))


def bucket(count: int, minimum: int = 1) -> int:
    """The next power of two: shapes are rounded up to it so that few graphs serve all sizes."""
    return max(minimum, 1 << max(count - 1, 0).bit_length())
