"""Tests of batches across requests: equal results, turns, errors of one request, deadlines, random numbers."""

import contextlib
import functools
import itertools
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from identity_engine import identity_generator
from local_server import upper_service
from tiny_generator import SOURCES, tiny_generator

from metaphrase.inference.batches import Hypothesis
from metaphrase.serving.batcher import Batcher, CancelledRequest, QueuedGenerator, Ticket
from metaphrase.serving.service import Query


def ticket(seconds=60.0, **fields):
    return Ticket(time.monotonic() + seconds, **fields)


@pytest.fixture
def batcher():
    batcher = Batcher(num_threads=2)
    yield batcher
    batcher.close()


@pytest.fixture
def facts(batcher):
    """A list that gets the numbers of each batch: its sentences come first."""
    facts = []
    batcher.observe = lambda *counts: facts.append(counts)
    return facts


@pytest.fixture
def queued(batcher):
    return lambda generator, **fields: QueuedGenerator(generator, batcher, ticket(**fields))


@contextlib.contextmanager
def busy(batcher):
    """Keep the batcher busy. Yields an event that lets it go on, and a function that waits for a number of sentences."""
    is_running, may_end = threading.Event(), threading.Event()

    def wait_for(count):
        while batcher.num_waiting < count:
            time.sleep(0.001)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(batcher.call, ticket(), lambda: is_running.set() or may_end.wait())
        is_running.wait()
        try:
            yield may_end, wait_for
        finally:
            may_end.set()


@pytest.fixture
def submit(batcher):
    """Runs functions while the batcher is busy, each when the sentences of the earlier ones wait. Returns their futures."""
    with ThreadPoolExecutor(8) as pool:

        def run(calls, num_sentences):
            with busy(batcher) as (_, wait_for):
                futures = []
                for call, count in zip(calls, itertools.accumulate(num_sentences), strict=True):
                    futures.append(pool.submit(*call))
                    wait_for(count)
            return futures

        yield run


def test_requests_share_a_batch_and_get_their_own_targets(queued, facts, submit):
    generator = tiny_generator()
    futures = submit([(queued(generator).generate, [source]) for source in SOURCES], [1] * len(SOURCES))
    assert [future.result() for future in futures] == [generator.generate([source]) for source in SOURCES]
    assert [num_sentences for num_sentences, *_ in facts] == [len(SOURCES)]


@pytest.mark.parametrize("options", [{"num_beams": 2, "num_return_sequences": 2}, {"max_new_tokens": 3}])
def test_queued_generator_equals_a_generator(queued, options):
    generator, texts = tiny_generator(), [*SOURCES, "", "  "]
    own = queued(generator)
    assert own.generate_n_best(texts, **options) == generator.generate_n_best(texts, **options)
    assert own.num_unfinished == generator.num_unfinished


def test_requests_with_other_options_have_batches_of_their_own(queued, facts, submit):
    generator, texts = tiny_generator(), SOURCES[:2]
    one_best = functools.partial(queued(generator).generate_n_best, num_return_sequences=1)
    two_beams = functools.partial(queued(generator).generate, num_beams=2)
    calls = [(call, texts) for call in (queued(generator).generate, two_beams, one_best)]
    greedy, beams, candidates = (future.result() for future in submit(calls, [2, 2, 2]))
    assert (greedy, beams) == (generator.generate(texts), generator.generate(texts, num_beams=2))
    assert all(scored.score < 0 for [scored] in candidates)
    assert [num_sentences for num_sentences, *_ in facts] == [2, 2, 2]


def test_a_short_request_does_not_wait_for_a_long_one(queued, submit):
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
    texts = [["a b c d e f g h"] * 20, ["a"]]
    futures = submit([(queued(generator).generate, part) for part in texts], map(len, texts))
    assert [future.result() for future in futures] == texts


def test_sentences_of_a_batch_have_similar_lengths(queued, facts, submit):
    generator = identity_generator(batch_size=2)
    texts = ["a b c d e f g h", "a", "a b c d e f g", "a b"]
    long, short, other_long, other_short = (len(ids) for ids in generator.encode(texts))
    for future in submit([(queued(generator).generate, part) for part in (texts[:2], texts[2:])], [2, 2]):
        future.result()
    assert sorted(num_tokens for _, num_tokens, _ in facts) == sorted((long + other_long, short + other_short))


def test_only_the_request_that_fails_gets_the_error(queued, submit):
    def change(text):
        if "bad" in text:
            raise RuntimeError("broken")
        return text.upper()

    generator = identity_generator(change)
    futures = submit([(queued(generator).generate, [text]) for text in ("a", "bad", "c")], [1] * 3)
    with pytest.raises(RuntimeError, match="broken"):
        futures[1].result()
    assert futures[0].result() + futures[2].result() == ["A", "C"]
    assert queued(generator).generate(["d"]) == ["D"]


def test_ended_and_cancelled_requests_leave_the_queue(batcher, queued, facts):
    generator, gone = identity_generator(), ticket()
    with ThreadPoolExecutor(1) as pool:
        with busy(batcher) as (_, wait_for):
            future = pool.submit(QueuedGenerator(generator, batcher, gone).generate, ["b"])
            wait_for(1)
            gone.is_cancelled = True
            with pytest.raises(TimeoutError):
                queued(generator, seconds=0.05).generate(["a"])
        with pytest.raises(CancelledRequest):
            future.result()
    assert queued(generator).generate(["c"]) == ["c"]
    assert batcher.num_waiting == 0 and [num_sentences for num_sentences, *_ in facts] == [1]


def test_samples_depend_on_the_seed_alone(queued, submit):
    def sample(seed):
        return queued(tiny_generator(), seed=seed).generate(SOURCES, do_sample=True, max_new_tokens=8)

    alone = sample(1)
    futures = submit([(sample, 2), (sample, 1)], [len(SOURCES)] * 2)
    assert futures[1].result() == alone != futures[0].result()


def test_threads_decode_batches_at_once_but_never_beside_a_call():
    batcher, barrier, events = Batcher(num_threads=2), threading.Barrier(2, timeout=20), []

    def change(text):
        events.append("begin")
        # Each text waits until another one is decoded too.
        barrier.wait()
        events.append("end")
        return text

    def call():
        # All batches before it have ended, and none begins.
        assert events.count("begin") == events.count("end")
        count = len(events)
        time.sleep(0.05)
        assert len(events) == count
        return True

    texts, generator = ["a", "b"] * 3, identity_generator(change, batch_size=1)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(QueuedGenerator(generator, batcher, ticket()).generate, texts[:2])
        while events.count("begin") < 2:
            time.sleep(0.001)
        assert batcher.call(ticket(), call)
        assert future.result() == texts[:2] and len(events) == 4
        assert QueuedGenerator(generator, batcher, ticket()).generate(texts) == texts
    batcher.close()


def test_close_decodes_what_waits():
    batcher, generator = Batcher(num_threads=2), identity_generator()
    with ThreadPoolExecutor(1) as pool:
        with busy(batcher) as (may_end, wait_for):
            future = pool.submit(QueuedGenerator(generator, batcher, ticket()).generate, ["a"])
            wait_for(1)
            closing = threading.Thread(target=batcher.close)
            closing.start()
            may_end.set()
        closing.join()
        assert future.result() == ["a"]
    with pytest.raises(CancelledRequest, match="shutting down"):
        QueuedGenerator(generator, batcher, ticket()).generate(["b"])


def slow_generator(seconds):
    def generate(sources):
        time.sleep(seconds)
        return [[Hypothesis(ids, 0, True)] for ids in sources]

    generator = identity_generator()
    generator.model.make_generate = lambda *_: generate
    return generator


def test_slow_models_decode_full_batches(queued, facts):
    generator = slow_generator(0.05)
    # At the speed of this one, the others would take 25 seconds.
    assert queued(generator).generate(["a"]) == ["a"]
    assert queued(generator, seconds=5).generate(["a"] * 500) == ["a"] * 500
    facts.clear()
    # A batch takes longer than a batch should.
    generator = slow_generator(0.6)
    queued(generator).generate(["a"])
    assert queued(generator).generate(["a"] * 64) == ["a"] * 64
    assert [num_sentences for num_sentences, *_ in facts] == [1, 64]


def test_a_long_request_waits_no_longer_than_it_takes(batcher, queued):
    generator, stop = identity_generator(lambda text: time.sleep(0.005) or text, batch_size=4), threading.Event()

    def send():
        while not stop.is_set():
            queued(generator).generate(["a"])

    with ThreadPoolExecutor(9) as pool:
        for _ in range(8):
            pool.submit(send)
        try:
            assert queued(generator, seconds=10).generate(["a b"] * 200) == ["a b"] * 200
        finally:
            stop.set()


def test_one_long_request_at_a_time_works_on_its_texts_while_none_waits():
    service, long, short = upper_service(), Query(["a" * 50_000]), Query(["a"])
    entered = queue.Queue()

    def enter(query, name):
        return pool.submit(service.work_on_texts, query, ticket(), lambda: entered.put(name))

    def work():
        second = enter(long, "long")
        enter(short, "short").result(5)
        assert entered.get_nowait() == "short" and not second.done()
        # While the sentences of the first one are decoded, the second one has its turn.
        decoder = identity_generator(lambda text: second.result(5) or text)
        return QueuedGenerator(decoder, service.batcher, first).generate(["a"])

    first = ticket()
    with ThreadPoolExecutor(2) as pool:
        assert service.work_on_texts(long, first, work) == ["a"]
    service.batcher.close()
