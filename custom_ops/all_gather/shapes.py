"""Sizes of an all-gather over chips × cores."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from custom_ops.hypercube.shapes import Hypercube


@dataclass(frozen=True)
class AllGatherShape(Hypercube):
    """`chips` × `cores` devices with an array [rows, columns] of `dtype` each."""

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
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize
