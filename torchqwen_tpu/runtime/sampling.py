"""Sampling on the host, with the noise that the device would draw."""

from __future__ import annotations

import functools

import numpy as np

from custom_ops import sampling


@functools.lru_cache(maxsize=1)
def _compiled():
    import jax

    return jax.jit(sampling.choose)


def choose_on_host(scores: np.ndarray, seed: np.ndarray, step: np.ndarray) -> np.ndarray:
    """One token a row, as `custom_ops.sampling.choose` on the device. All arguments are numpy arrays."""
    return np.asarray(_compiled()(scores, seed, step))
