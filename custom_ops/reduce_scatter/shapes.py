"""Sizes of a reduce-scatter over chips × cores."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from custom_ops.hypercube.shapes import Hypercube


@dataclass(frozen=True)
class ReduceScatterShape(Hypercube):
    """A sum over `chips` × `cores` devices of arrays [rows, hidden] of `dtype`, each device keeping rows / devices rows.

    Raises:
        ValueError: the rows do not divide by the devices.
    """

    rows: int
    hidden: int
    dtype: str

    def __post_init__(self) -> None:
        if self.rows % self.devices:
            raise ValueError(f"{self.rows} rows do not divide by {self.chips} chips × {self.cores} cores")

    @classmethod
    def of(cls, partial: jax.Array, axes: tuple[str, str]) -> ReduceScatterShape:
        """The sizes of `partial` inside a `jax.shard_map` with these mesh axes, chips first."""
        chips, cores = (lax.axis_size(axis) for axis in axes)
        return cls(chips, cores, *partial.shape, partial.dtype.name)

    @property
    def rows_per_device(self) -> int:
        return self.rows // self.devices

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize
