"""Steps as short as the tests' requests."""

from __future__ import annotations

import pytest

from torchqwen_tpu.evaluation import scoring


@pytest.fixture(scope="package", autouse=True)
def _short_steps():
    """A step is filled up to its size, which suits a harness's thousands of requests and not the handful of a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "STEP_TOKENS", (128, 256))
        yield
