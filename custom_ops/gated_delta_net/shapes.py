"""Head counts of a Gated DeltaNet layer and the order of its channels."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp


@dataclass(frozen=True)
class GatedDeltaNetShape:
    """Heads of one device's share of a Gated DeltaNet layer.

    Channels are grouped by key head: [query | key | the values of the value heads it serves], one group after the other.
    (Checkpoints hold all queries, then all keys, then all values.) Any split of the key heads over devices is then a
    split of contiguous channels.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def group(self) -> int:
        """Value heads that one key head serves."""
        return self.value_heads // self.key_heads

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def split(self, mixed):
        """[..., channels] → query, key [..., key heads, key dim] and value [..., value heads, value dim]."""
        grouped = mixed.reshape(*mixed.shape[:-1], self.key_heads, -1)
        query, key, value = jnp.split(grouped, (self.key_dim, 2 * self.key_dim), axis=-1)
        return query, key, value.reshape(*mixed.shape[:-1], self.value_heads, self.value_dim)

    def published_channels(self) -> list[int]:
        """For each channel in the order used here, where checkpoints hold it (all queries, all keys, all values)."""
        keys, values = self.key_heads * self.key_dim, self.group * self.value_dim
        order: list[int] = []
        for head in range(self.key_heads):
            order += range(head * self.key_dim, (head + 1) * self.key_dim)
            order += range(keys + head * self.key_dim, keys + (head + 1) * self.key_dim)
            order += range(2 * keys + head * values, 2 * keys + (head + 1) * values)
        return order
