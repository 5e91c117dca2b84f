"""Tests of batches across requests: equal results, turns, errors of one request, deadlines, random numbers."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from identity_engine import IdentityEngine, identity_generator
from tiny_generator import SOURCES, tiny_generator

from metaphrase.serving.batcher import Batcher, CancelledRequest, Ticket
from metaphrase.serving.models import QueuedGenerator

MINUTE = 60.0


def ticket(seconds=MINUTE, **fields):
    return Ticket(time.monotonic() + seconds, **fields)


@pytest.fixture(params=[1, 3])
def batcher(request):
    batcher = Batcher(num_threads=request.param)
    yield batcher
    batcher.close()


class Stop:
    """A call that keeps the engine busy until the test lets it go."""

    def __init__(self, batcher):
        self.batcher, self.is_running, self.may_end = batcher, threading.Event(), threading.Event()

    def __enter__(self):
        self.thread = threading.Thread(target=self.batcher.call, args=(ticket(), self._hold))
        self.thread.start()
        self.is_running.wait()
        return self

    def _hold(self):
        self.is_running.set()
        self.may_end.wait()

    def __exit__(self, *exception):
        self.may_end.set()
        self.thread.join()


def wait_for(batcher, count):
    """Wait until this many sentences wait."""
    while batcher.num_waiting < count:
        time.sleep(0.001)


def test_requests_share_a_batch_and_get_their_own_targets(batcher):
    generator, facts = tiny_generator(), []
    expected = {source: generator.generate([source]) for source in SOURCES}
    batcher.observe = facts.append
    with ThreadPoolExecutor(len(SOURCES)) as pool:
        with Stop(batcher):
            requests = {
                source: pool.submit(QueuedGenerator.of(generator, batcher, ticket()).generate, [source])
                for source in SOURCES
            }
            wait_for(batcher, len(SOURCES))
        assert {source: request.result() for source, request in requests.items()} == expected
    assert [fact.num_sentences for fact in facts] == [len(SOURCES)]


@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}, {"max_new_tokens": 3}]
)
def test_queued_generator_equals_a_generator(batcher, options):
    generator = tiny_generator()
    texts = [*SOURCES, "", "  "]
    queued = QueuedGenerator.of(generator, batcher, ticket())
    assert queued.generate_n_best(texts, **options) == generator.generate_n_best(texts, **options)
    assert queued.num_unfinished == generator.num_unfinished


def test_requests_with_other_options_have_batches_of_their_own(batcher):
    generator, facts = tiny_generator(), []
    batcher.observe = facts.append
    with ThreadPoolExecutor(2) as pool:
        with Stop(batcher):
            requests = [
                pool.submit(QueuedGenerator.of(generator, batcher, ticket()).generate, SOURCES[:2], num_beams=beams)
                for beams in (1, 2)
            ]
            wait_for(batcher, 4)
        for beams, request in zip((1, 2), requests, strict=True):
            assert request.result() == generator.generate(SOURCES[:2], num_beams=beams)
    assert [fact.num_sentences for fact in facts] == [2, 2]


def test_a_short_request_does_not_wait_for_a_long_one(batcher):
    short_is_decoded, num_decoded = threading.Event(), itertools.count(1)

    def record(text):
        if text == "a":
            short_is_decoded.set()
        # Threads may overtake each other, so the long request has to wait after a few of its sentences.
        elif next(num_decoded) > 4 and not short_is_decoded.wait(5):
            raise RuntimeError("The short request waits for the long one.")
        return text

    generator = identity_generator(record, batch_size=2)
    # Lengths differ, so that the short one is never the nearest.
    texts = {"a b c d e f g h": 20, "a": 1}
    with ThreadPoolExecutor(2) as pool:
        with Stop(batcher):
            requests = []
            for count, (text, size) in enumerate(texts.items()):
                queued = QueuedGenerator.of(generator, batcher, ticket())
                requests.append(pool.submit(queued.generate, [text] * size))
                wait_for(batcher, 20 + count)
        assert [request.result() for request in requests] == [[text] * size for text, size in texts.items()]


def test_sentences_of_a_batch_have_similar_lengths(batcher):
    generator, facts = identity_generator(batch_size=2), []
    batcher.observe = facts.append
    texts = ["a b c d e f g h", "a", "a b c d e f g", "a b"]
    long, short, other_long, other_short = (len(ids) for ids in generator.encode(texts))
    with ThreadPoolExecutor(2) as pool, Stop(batcher):
        for part in (texts[:2], texts[2:]):
            pool.submit(QueuedGenerator.of(generator, batcher, ticket()).generate, part)
        wait_for(batcher, 4)
    assert sorted(fact.num_source_tokens for fact in facts) == sorted((long + other_long, short + other_short))


def test_only_the_request_that_fails_gets_the_error(batcher):
    def change(text):
        if "bad" in text:
            raise RuntimeError("broken")
        return text.upper()

    generator = identity_generator(change)
    with ThreadPoolExecutor(3) as pool:
        with Stop(batcher):
            requests = [
                pool.submit(QueuedGenerator.of(generator, batcher, ticket()).generate, [text])
                for text in ("a", "bad", "c")
            ]
            wait_for(batcher, 3)
        assert requests[0].result() == ["A"]
        with pytest.raises(RuntimeError, match="broken"):
            requests[1].result()
        assert requests[2].result() == ["C"]
    # The engine still works.
    assert QueuedGenerator.of(generator, batcher, ticket()).generate(["d"]) == ["D"]


def test_a_request_ends_at_its_deadline(batcher):
    generator = identity_generator()
    with Stop(batcher), pytest.raises(TimeoutError):
        QueuedGenerator.of(generator, batcher, ticket(0.05)).generate(["a"])
    # Its sentence is no longer decoded.
    assert QueuedGenerator.of(generator, batcher, ticket()).generate(["b"]) == ["b"]
    assert batcher.num_waiting == 0


def test_a_cancelled_request_leaves_the_queue(batcher):
    generator, facts = identity_generator(), []
    batcher.observe = facts.append
    gone = ticket()
    with ThreadPoolExecutor(1) as pool:
        with Stop(batcher):
            request = pool.submit(QueuedGenerator.of(generator, batcher, gone).generate, ["a"])
            wait_for(batcher, 1)
            gone.is_cancelled = True
        with pytest.raises(CancelledRequest):
            request.result()
    assert facts == []


def test_samples_depend_on_the_seed_alone(batcher):
    generator = tiny_generator()
    options = {"do_sample": True, "max_new_tokens": 8}
    alone = QueuedGenerator.of(generator, batcher, ticket(seed=1)).generate(SOURCES, **options)
    with ThreadPoolExecutor(2) as pool:
        with Stop(batcher):
            others = [
                pool.submit(QueuedGenerator.of(generator, batcher, ticket(seed=seed)).generate, SOURCES, **options)
                for seed in (2, 1)
            ]
            wait_for(batcher, 2 * len(SOURCES))
        assert others[1].result() == alone != others[0].result()


def test_threads_decode_batches_at_once():
    """Each text waits until the other is decoded too."""
    batcher, barrier = Batcher(num_threads=2), threading.Barrier(2, timeout=20)

    def change(text):
        barrier.wait()
        return text.upper()

    generator = identity_generator(change, batch_size=1)
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(QueuedGenerator.of(generator, batcher, ticket()).generate, ["a", "b"])
        assert request.result() == ["A", "B"]
    batcher.close()


def test_no_thread_decodes_while_a_call_runs():
    batcher, events = Batcher(num_threads=3), []

    def change(text):
        events.append("begin")
        time.sleep(0.01)
        events.append("end")
        return text

    def call():
        # All batches before it have ended, and none begins.
        assert events.count("begin") == events.count("end")
        count = len(events)
        time.sleep(0.05)
        assert len(events) == count
        return True

    generator = identity_generator(change, batch_size=1)
    with ThreadPoolExecutor(4) as pool:
        requests = [
            pool.submit(QueuedGenerator.of(generator, batcher, ticket()).generate, ["a", "b", "c"]) for _ in range(3)
        ]
        while not events:
            time.sleep(0.001)
        assert all(batcher.call(ticket(), call) for _ in range(3))
        assert [request.result() for request in requests] == [["a", "b", "c"]] * 3
    batcher.close()


def test_close_decodes_what_waits():
    batcher, generator = Batcher(num_threads=2), identity_generator()
    with ThreadPoolExecutor(1) as pool:
        with Stop(batcher) as stop:
            request = pool.submit(QueuedGenerator.of(generator, batcher, ticket()).generate, ["a"])
            wait_for(batcher, 1)
            closing = threading.Thread(target=batcher.close)
            closing.start()
            stop.may_end.set()
        closing.join()
        assert request.result() == ["a"]
    with pytest.raises(CancelledRequest, match="shutting down"):
        QueuedGenerator.of(generator, batcher, ticket()).generate(["b"])


def test_a_free_engine_waits_for_more_sentences():
    batcher, generator, facts = Batcher(max_wait_seconds=5.0), identity_generator(batch_size=2), []
    batcher.observe = facts.append
    with ThreadPoolExecutor(2) as pool:
        started = time.monotonic()
        requests = [
            pool.submit(QueuedGenerator.of(generator, batcher, ticket()).generate, [text]) for text in ("a", "b")
        ]
        assert [request.result() for request in requests] == [["a"], ["b"]]
    # The second sentence fills the batch, which ends the wait.
    assert [fact.num_sentences for fact in facts] == [2] and time.monotonic() - started < 4
    batcher.close()


def test_expected_time_follows_the_speed(batcher):
    class Slow(IdentityEngine):
        def _target(self, ids):
            time.sleep(0.01)
            return list(ids)

    generator = identity_generator()
    generator.model = Slow()
    QueuedGenerator.of(generator, batcher, ticket()).generate(["a b", "c d"])
    with ThreadPoolExecutor(1) as pool:
        with Stop(batcher):
            request = pool.submit(QueuedGenerator.of(generator, batcher, ticket()).generate, ["a b"] * 50)
            wait_for(batcher, 50)
            assert 0.3 < batcher.expected_seconds() * len(batcher._threads) < 3
        request.result()
    assert batcher.expected_seconds() == 0
