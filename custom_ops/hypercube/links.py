"""The model of the links that both hierarchical collectives, and XLA's flat ones beside them, are timed with."""

from __future__ import annotations

from custom_ops.cost_model import HOP, START, TPU7X

ICI = TPU7X.ici_link
"""Bytes a second over one ICI link, one way; the two cores of a chip share it."""
DIE_TO_DIE = TPU7X.die_to_die
"""Bytes a second between the two cores of a chip, one way."""
HBM = TPU7X.hbm_bandwidth

STATEMENT = (
    f"Links: {ICI / 1e9:.0f} GB/s one way over each ICI link, one link for each dimension of the hypercube of chips, shared "
    f"by a chip's two cores; {DIE_TO_DIE / 1e9:.0f} GB/s one way between the two; {HOP * 1e6:.0f} µs for each hop that "
    f"another one waits for and for the barrier, {START * 1e6:.2f} µs more for each remote write (both assumed). XLA's "
    "collectives: what every core takes from other chips crosses ICI for that core alone, spread over all links, in as many "
    "dependent hops. The published times of the all-gather (559 µs in BF16, 283 µs in FP8) are, to 2 %, those of 8,192 tokens "
    "of 4,096 columns that each core of a chip fetches for itself (our inference; the size is not stated)."
)


def flat_time(chips: int, cores: int, bytes_per_device: int) -> float:
    """Seconds of a reduce-scatter or an all-gather without a hierarchy, of so many bytes of each device."""
    dimensions = chips.bit_length() - 1
    swap = (cores - 1) * chips * bytes_per_device / DIE_TO_DIE
    hops = HOP + (dimensions + (cores > 1)) * (HOP + START)
    if not dimensions:
        return swap + hops
    crossing = cores * cores * (chips - 1) * bytes_per_device
    return max(crossing / (dimensions * ICI), swap) + hops


class Link:
    """A link that carries one thing after the other."""

    def __init__(self, bytes_per_second: float):
        self.bytes_per_second, self.free = bytes_per_second, 0.0

    def carry(self, now: float, size: float) -> float:
        """When `size` bytes handed over at `now` have arrived."""
        self.free = max(self.free, now) + START + size / self.bytes_per_second
        return self.free + HOP
