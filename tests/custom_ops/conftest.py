"""What the tests of all operations share: every implementation runs them, and is held against `reference`."""

from __future__ import annotations

import comparison
import jax
import pytest

from custom_ops.implementations import IMPLEMENTATIONS

jax.config.update("jax_platforms", "cpu")


def pytest_generate_tests(metafunc):
    """A test that takes `implementation` runs once for every implementation of its module's OP but the reference, unless
    it says itself which run it."""
    given = any("implementation" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "implementation" in metafunc.fixturenames and not given:
        names = [name for name in IMPLEMENTATIONS[metafunc.module.OP] if name != "reference"]
        metafunc.parametrize("implementation", names)


@pytest.fixture(scope="session")
def compiled():
    return comparison.compiled


@pytest.fixture(scope="session")
def relative_error():
    return comparison.relative_error
