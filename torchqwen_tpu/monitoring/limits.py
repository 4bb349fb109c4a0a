"""Limits of a numerical watch, and what lies beyond them in a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

FEWEST_TOKENS = 64
"""Tokens that the load of experts is taken over at least."""
FIRST_POSITION = 64
"""Tokens that a state holds at least before its growth is followed."""


@dataclass(frozen=True)
class Limits:
    """Beyond these a watch warns. None switches one off.

    Args:
        attention_logit: largest absolute logit. With normalized queries and keys of 256 dimensions and weights of one no
            logit passes 16.
        saturated: share of sampled softmaxes that put more than 99.9 % on one key.
        expert_share: share of a layer's tokens that go to one expert.
        device_imbalance: load of the busiest device's experts over the mean of all devices, where there are several.
        router_entropy: mean entropy of a router over that of equal probabilities; below is beyond.
        state_norm: largest Frobenius norm of a head's recurrent state. Keys have norm one and values are of order one, so
            that of 128 by 128 is below 128 unless values grow.
        state_growth: exponent of a state's norm as a power of its position. A state that never forgets grows at most like
            its position (1); a state that forgets stays level (0).
    """

    attention_logit: float | None = 100.0
    saturated: float | None = 0.9
    expert_share: float | None = 0.8
    device_imbalance: float | None = 4.0
    router_entropy: float | None = 0.02
    state_norm: float | None = 1000.0
    state_growth: float | None = 1.5


class Finding(NamedTuple):
    """One thing beyond its limit.

    kind: name of the limit, or "not_finite".
    step: number of the step that showed it, from 0.
    """

    kind: str
    layer: int
    step: int
    message: str


def exceeds(value: float, limit: float | None) -> bool:
    """Whether a value is beyond a limit; NaN is not, it is found on its own."""
    return limit is not None and bool(value > limit)


class Loads:
    """Tokens of every expert by layer, gathered over steps until there are enough to judge.

    Attributes:
        total: [layers, ranks, experts] since the start.
    """

    def __init__(self, layers: int, ranks: int, experts: int):
        self.total = np.zeros((layers, ranks, experts))
        self._recent = np.zeros((layers, experts))
        self._tokens = np.zeros((layers, 1))

    def add(self, tokens: np.ndarray, load: np.ndarray) -> np.ndarray | None:
        """Take one step's tokens [layers] and load [layers, ranks, experts]; the shares [layers, experts] of tokens once there
        are enough."""
        self.total += load
        self._recent += load.sum(1)
        self._tokens += tokens[:, None]
        if self._tokens.max() < FEWEST_TOKENS:
            return None
        shares = self._recent / np.maximum(self._tokens, 1)
        self._recent[:], self._tokens[:] = 0, 0
        return shares


class Growth:
    """Norms of recurrent states as their sequences grow.

    Attributes:
        seen: by layer, (position, norm) of every look.
    """

    MOST = 2048
    """Looks that are kept of a layer: beyond, every second one is dropped."""

    def __init__(self):
        self.seen: dict[int, list[tuple[int, float]]] = {}
        self._before: dict[tuple[int, int], tuple[float, float]] = {}

    def add(self, layer: int, sequence: int, position: int, norm: float) -> float | None:
        """Take one look; the exponent of growth each time that the position has doubled."""
        looks = self.seen.setdefault(layer, [])
        looks.append((position, norm))
        if len(looks) > self.MOST:
            del looks[::2]
        if position < FIRST_POSITION or not norm > 0:
            return None
        before, norm_before = self._before.get((layer, sequence), (np.inf, 0.0))
        if before <= position < 2 * before:
            return None
        self._before[layer, sequence] = (position, norm)
        if position < before:  # another sequence in this place
            return None
        return float(np.log(norm / norm_before) / np.log(position / before))
