"""Chips × cores, as far as every size of a collective has them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hypercube:
    """`chips` with `cores` each."""

    chips: int
    cores: int

    @property
    def devices(self) -> int:
        return self.chips * self.cores

    @property
    def dimensions(self) -> int:
        """Dimensions of the hypercube of chips."""
        return self.chips.bit_length() - 1
