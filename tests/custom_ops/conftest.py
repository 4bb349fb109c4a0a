"""What the tests of all operations share: every implementation runs them, and is held against `reference`."""

from __future__ import annotations

import comparison
import jax
import pytest

from custom_ops.implementations import IMPLEMENTATIONS

jax.config.update("jax_platforms", "cpu")


def pytest_generate_tests(metafunc):
    """A test that takes `implementation` runs once for every implementation of its module's OP but the reference, unless
    it says itself which run it, or the module names in TAKE_ANY_SHAPE those that take its arguments."""
    given = any("implementation" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "implementation" in metafunc.fixturenames and not given:
        every = [name for name in IMPLEMENTATIONS[metafunc.module.OP] if name != "reference"]
        names = getattr(metafunc.module, "TAKE_ANY_SHAPE", every)
        metafunc.parametrize("implementation", names)


@pytest.fixture(scope="session")
def compiled():
    return comparison.compiled


@pytest.fixture(scope="session")
def relative_error():
    return comparison.relative_error
