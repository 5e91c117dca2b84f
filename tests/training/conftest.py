"""Fixtures of the tests of training."""

import pytest

from metaphrase.training.planning import estimate


@pytest.fixture(autouse=True)
def few_timed_steps(monkeypatch):
    """Time two steps of each network, since the speed decides nothing here."""
    monkeypatch.setattr(estimate, "TIMED_STEPS", 2)
