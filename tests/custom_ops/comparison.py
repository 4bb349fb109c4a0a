"""Implementations under jit, and how far apart results are."""

from __future__ import annotations

import functools

import jax
import numpy as np

from custom_ops.implementations import implementation


@functools.cache
def compiled(op: str, name: str, **static):
    """An implementation of an operation under jit; shapes that were compiled once are not compiled again."""
    return jax.jit(functools.partial(implementation(op, "cpu", name), **static))


def relative_error(result, expected) -> float:
    """Root mean square of the difference over that of `expected`; 0 for equal arrays, NaN if either holds one."""
    result, expected = np.asarray(result, np.float64), np.asarray(expected, np.float64)
    scale = np.sqrt(np.mean(expected**2))
    error = np.sqrt(np.mean((result - expected) ** 2))
    return error if scale == 0 else error / scale
