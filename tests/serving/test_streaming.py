"""Tests of streams."""

import asyncio
import time

import pytest
from tiny_generator import tiny_generator

from metaphrase.serving.batcher import Batcher, CancelledRequest, Ticket
from metaphrase.serving.models import ServedModel
from metaphrase.serving.streaming import cut_pieces, write_pieces
from metaphrase.serving.translation import Query


@pytest.mark.parametrize("size", [1, 2, 3, 9])
@pytest.mark.parametrize("stops", [None, ["cd"], ["x", "def"], ["h", "gh"], ["a"]])
def test_pieces_end_before_a_stop(size, stops):
    text = "abcdefgh"

    async def pieces():
        for start in range(0, len(text), size):
            yield text[start : start + size]

    async def collect():
        return [piece async for piece in cut_pieces(pieces(), stops)]

    end = min((text.find(stop) for stop in stops or () if stop in text), default=len(text))
    assert "".join(asyncio.run(collect())) == text[:end]


def test_search_ends_when_the_client_has_gone():
    batcher, pieces, ticket = Batcher(), [], Ticket(time.monotonic() + 60)
    model = ServedModel("model", tiny_generator(), batcher, languages=None, task="summarization")

    def emit(piece):
        pieces.append(piece)
        ticket.is_cancelled = True

    with pytest.raises(CancelledRequest):
        write_pieces(model, Query(["the cat"]), ticket, emit)
    assert len(pieces) == 1
    batcher.close()
