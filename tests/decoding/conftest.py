"""Fixtures of the decoder's tests."""

import logging

import pytest
from transformers.utils import logging as transformers_logging

from metaphrase.decoding import fast_generation
from metaphrase.decoding.decoder_state import DecoderState


@pytest.fixture
def fast_loops(monkeypatch):
    """The names of the fast loops that were called."""
    called = []
    for name in ("sample", "beam_search"):
        loop = getattr(fast_generation, name)
        monkeypatch.setattr(fast_generation, name, lambda *a, n=name, f=loop: called.append(n) or f(*a))
    return called


@pytest.fixture
def step_rows(monkeypatch):
    """The number of rows of each decoding step."""
    rows, step = [], DecoderState.step
    monkeypatch.setattr(DecoderState, "step", lambda state, tokens: rows.append(len(tokens)) or step(state, tokens))
    return rows


@pytest.fixture
def warned():
    """The messages that transformers logs."""
    records, handler, logger = [], logging.Handler(), transformers_logging.get_logger("transformers")
    handler.emit = lambda record: records.append(record.getMessage())
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)
