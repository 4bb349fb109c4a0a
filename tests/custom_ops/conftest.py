"""What the tests of all operations share: every implementation against `reference`, and how far apart results are."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from custom_ops.implementations import IMPLEMENTATIONS

jax.config.update("jax_platforms", "cpu")


def pytest_generate_tests(metafunc):
    """A test that takes `implementation` runs once for every implementation of its module's OP but the reference."""
    if "implementation" in metafunc.fixturenames:
        names = [name for name in IMPLEMENTATIONS[metafunc.module.OP] if name != "reference"]
        metafunc.parametrize("implementation", names)


@functools.lru_cache(maxsize=None)
def compiled(op: str, implementation: str, **static):
    """An implementation of an operation under jit; shapes that were compiled once are not compiled again."""
    return jax.jit(functools.partial(IMPLEMENTATIONS[op][implementation], **static))


def relative_error(result, expected) -> float:
    """Root mean square of the difference over that of `expected`; 0 for equal arrays, NaN if either holds one."""
    result, expected = np.asarray(result, np.float64), np.asarray(expected, np.float64)
    scale = np.sqrt(np.mean(expected**2))
    error = np.sqrt(np.mean((result - expected) ** 2))
    return error if scale == 0 else error / scale


@pytest.fixture(scope="session", name="compiled")
def compiled_fixture():
    return compiled


@pytest.fixture(scope="session", name="relative_error")
def relative_error_fixture():
    return relative_error
