"""Tests of streams."""

import asyncio
import threading
import time

import pytest
import torch
from tiny_generator import tiny_generator, tiny_pair

from metaphrase.inference.whole_texts import TextDecoder
from metaphrase.serving.batcher import Batcher, CancelledRequest, Ticket
from metaphrase.serving.models import ServedModel
from metaphrase.serving.service import Query, _PieceStreamer, answer, cut_pieces, write_pieces


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


@pytest.fixture
def batcher():
    batcher = Batcher()
    yield batcher
    batcher.close()


def test_no_piece_has_half_a_character(batcher):
    generator = tiny_generator(kind="byte")
    model = ServedModel("model", generator, batcher, languages=None, task="summarization")
    queued, _ = model.open(Ticket(time.monotonic() + 60))
    text, pieces = "für 5 €, 日本 \U0001f600", []
    [ids] = tiny_pair(kind="byte").encode_targets([text])
    streamer = _PieceStreamer(queued, pieces.append)
    for index in (0, *ids):
        streamer.put(torch.tensor([index]))
    streamer.finish(text)
    assert "".join(pieces) == text and len(pieces) > 10 and not any("\ufffd" in piece for piece in pieces)


def test_stream_of_samples_depends_on_the_seed(batcher):
    model = ServedModel("model", tiny_generator(), batcher, languages=None, task="summarization")

    def stream(seed):
        pieces = []
        query = Query(["the cat sleeps"], options={"do_sample": True, "max_new_tokens": 20})
        write_pieces(model, query, Ticket(time.monotonic() + 60, seed), pieces.append)
        return "".join(pieces)

    assert stream(1) == stream(1) != stream(2)


def test_alignments_are_computed_in_the_thread_of_the_models(batcher, monkeypatch):
    threads = []
    align = TextDecoder._align

    def record(*arguments):
        threads.append(threading.current_thread().name)
        return align(*arguments)

    monkeypatch.setattr(TextDecoder, "_align", record)
    model = ServedModel("model", tiny_generator(), batcher, languages=("en", "de"), task="translation")
    answer(model, Query(["<b>the cat</b> sleeps"], text_format="html"), Ticket(time.monotonic() + 60))
    assert threads == ["metaphrase-engine-0"]
