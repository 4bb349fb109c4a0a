"""Sizes of an all-gather over chips × cores."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True)
class AllGatherShape:
    """`chips` × `cores` devices with an array [rows, columns] of `dtype` each."""

    chips: int
    cores: int
    rows: int
    columns: int
    dtype: str

    @classmethod
    def of(cls, rows: jax.Array, axes: tuple[str, ...]) -> AllGatherShape:
        """The sizes of `rows` inside a `jax.shard_map` with these mesh axes, chips first; without an axis of cores a chip
        has one."""
        chips, *cores = (lax.axis_size(axis) for axis in axes)
        return cls(chips, *(cores or [1]), *rows.shape, rows.dtype.name)

    @property
    def devices(self) -> int:
        return self.chips * self.cores

    @property
    def dimensions(self) -> int:
        """Dimensions of the hypercube of chips."""
        return self.chips.bit_length() - 1

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize
