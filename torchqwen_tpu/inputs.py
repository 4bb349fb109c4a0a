"""What a user passes to `forward`, checked and turned into rows without padding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from torchqwen_tpu.cache import HybridCache
from torchqwen_tpu.runtime.packing import Row


@dataclass
class Columns:
    """A padded batch on the host.

    Attributes:
        token: [batch, columns] bool, which columns are tokens and not padding.
        rows: one for each sequence, its tokens without padding; `wanted` is filled in by `want_columns` or `want_last`.
        index: [batch, columns] position of a column's token in its row; of the last token before it for padding, and
            -1 where there is none.
    """

    token: np.ndarray
    rows: list[Row]
    index: np.ndarray

    def want_columns(self, columns: np.ndarray) -> None:
        """Ask for the logits of these columns of every sequence."""
        for row, index in zip(self.rows, self.index, strict=True):
            chosen = index[columns]
            row.wanted = np.unique(chosen[chosen >= 0])

    def want_last(self) -> None:
        """Ask for the logits of every sequence's last token."""
        for row in self.rows:
            row.wanted = np.arange(max(len(row.tokens) - 1, 0), len(row.tokens))


def limit_of(config) -> int:
    """The most tokens of a sequence: max_position_embeddings, or what YaRN stretches the original length to."""
    rope = config.rope_parameters
    stretched = rope.get("factor", 1.0) * rope.get("original_max_position_embeddings", 0) if rope["rope_type"] == "yarn" else 0
    return max(config.max_position_embeddings, int(stretched))


def check_ids(input_ids: torch.Tensor, vocab_size: int) -> np.ndarray:
    """Token ids [batch, columns] on the host.

    Raises:
        ValueError: not two dimensions, empty, not integers, or an id outside the vocabulary.
    """
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids must be [batch, sequence], not {list(input_ids.shape)}")
    if input_ids.dtype.is_floating_point or input_ids.dtype == torch.bool:
        raise ValueError(f"input_ids must be integers, not {input_ids.dtype}")
    if input_ids.numel() == 0:
        raise ValueError(f"the prompt is empty: input_ids has shape {list(input_ids.shape)}; pass at least one token")
    ids = input_ids.cpu().numpy()
    if ids.min() < 0 or ids.max() >= vocab_size:
        wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise ValueError(f"token id {wrong} is outside the vocabulary of {vocab_size} tokens (0 to {vocab_size - 1})")
    return ids


def check_embeddings(inputs_embeds: torch.Tensor, hidden_size: int) -> tuple[int, int]:
    """[batch, columns] of embeddings [batch, columns, hidden size].

    Raises:
        ValueError: another shape, or empty.
    """
    if inputs_embeds.dim() != 3 or inputs_embeds.shape[2] != hidden_size or inputs_embeds.numel() == 0:
        raise ValueError(f"inputs_embeds must be [batch, sequence, {hidden_size}], not {list(inputs_embeds.shape)}")
    return tuple(inputs_embeds.shape[:2])


def check_mask(attention_mask: torch.Tensor, shape: tuple[int, int], seen: int) -> None:
    """A mask for [batch, columns] after `seen` columns.

    Raises:
        ValueError: another shape.
    """
    batch, columns = shape
    if attention_mask.dim() != 2 or attention_mask.shape[0] != batch:
        given = list(attention_mask.shape)
        raise ValueError(f"attention_mask must be [batch, sequence] for a batch of {batch}, not {given}")
    if attention_mask.shape[1] not in (columns, seen + columns):
        raise ValueError(
            f"attention_mask has {attention_mask.shape[1]} columns for {columns} tokens after {seen} seen columns; it must "
            f"have {columns} or {seen + columns}"
        )


def columns_of(
    ids: np.ndarray | None,
    shape: tuple[int, int],
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    cache: HybridCache,
    limit: int,
) -> Columns:
    """Rows without padding of a padded batch that continues `cache`.

    Args:
        ids: [batch, columns], or None for embeddings: rows then count through [batch * columns].
        attention_mask: [batch, columns], or [batch, seen columns + columns]; None for no padding.
        position_ids: [batch, columns], [3, batch, columns] or [4, batch, columns]; None counts tokens.

    Raises:
        ValueError: shapes that do not fit, a sequence without tokens, or positions beyond `limit`.
    """
    batch, columns = shape
    token = _token_mask(attention_mask, shape, cache)
    positions = None if position_ids is None else _positions(position_ids, shape)
    if ids is None:
        ids = np.arange(batch * columns).reshape(shape)
    rows = []
    for number in range(batch):
        chosen = np.flatnonzero(token[number])
        seen = int(cache.lengths[number])
        if len(chosen) == 0 and seen == 0:
            raise ValueError(f"row {number} holds no token: its attention_mask is zero everywhere")
        if seen + len(chosen) > limit:
            raise ValueError(
                f"row {number} comes to {seen + len(chosen)} tokens, and the model's limit is {limit} "
                "(max_position_embeddings); shorten the prompt or ask for fewer new tokens"
            )
        if positions is None:
            own = cache.offsets[:, number, None] + seen + np.arange(len(chosen))
        else:
            own = positions[:, number, chosen]
        if own.size and (own.min() < 0 or own.max() >= limit):
            raise ValueError(
                f"position_ids of row {number} go from {own.min()} to {own.max()}; they must lie in 0 to {limit - 1}"
            )
        rows.append(Row(ids[number, chosen], own.astype(np.int32), np.zeros(0, np.int64)))
    return Columns(token, rows, np.cumsum(token, axis=1) - 1)


def _token_mask(attention_mask: torch.Tensor | None, shape: tuple[int, int], cache: HybridCache) -> np.ndarray:
    batch, columns = shape
    if attention_mask is None:
        return np.ones(shape, bool)
    check_mask(attention_mask, shape, cache.columns)
    mask = attention_mask.cpu().numpy() != 0
    past, new = mask[:, : mask.shape[1] - columns], mask[:, mask.shape[1] - columns :]
    if past.size and not past.all():
        held = cache.lengths[:batch]
        for row in np.flatnonzero(past.sum(1) != held):
            raise ValueError(
                f"attention_mask marks {past[row].sum()} tokens among the {cache.columns} seen columns of row {row}, and the "
                f"cache holds {held[row]}; mask the columns that were padding, or pass no mask for the seen part"
            )
    return new


def _positions(position_ids: torch.Tensor, shape: tuple[int, int]) -> np.ndarray:
    """[3, batch, columns] from the three forms that transformers takes; of four rows the first (text) repeats the others'."""
    positions = position_ids.cpu().numpy()
    if positions.ndim == 2:
        positions = np.broadcast_to(positions, (3, *positions.shape))
    if positions.ndim == 3 and positions.shape[0] == 4:
        positions = positions[1:]
    if positions.shape not in ((3, 1, shape[1]), (3, *shape)):
        raise ValueError(
            f"position_ids must be [batch, sequence], [3, batch, sequence] or [4, batch, sequence] for {list(shape)}, "
            f"not {list(position_ids.shape)}"
        )
    return np.broadcast_to(positions, (3, *shape))
