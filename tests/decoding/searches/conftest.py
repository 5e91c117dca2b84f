"""Fixtures of the searches' tests."""

import pytest

from metaphrase.decoding.searches import any_model


@pytest.fixture
def states(monkeypatch):
    """Names of the states that searches open."""
    opened = []
    for name in ("BeamState", "CachedState"):
        kind = getattr(any_model, name)
        monkeypatch.setattr(any_model, name, lambda *a, n=name, k=kind, **o: opened.append(n) or k(*a, **o))
    return opened
