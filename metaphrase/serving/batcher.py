"""Batcher: threads that decode the sentences of all requests, in batches of similar length."""

import bisect
import contextlib
import copy
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from metaphrase.inference.batches import Hypothesis
from metaphrase.inference.generator import COUNTERS, EncodedTexts, Generator, Plan
from metaphrase.tokenization.texts import batches_by_length

Result = TypeVar("Result")
_NEWEST = 0.2  # weight of the newest batch in the mean time of a token
# Expected seconds of a batch at most, since a short text waits for the batches that are decoded when it comes.
# A large model may take longer for one sentence. So a batch has at least this part of the usual tokens.
_LONGEST_BATCH, _SMALLEST_PART = 0.5, 0.125
_WAIT_SHARE = 0.1  # part of the time of a batch that a free thread waits for more sentences while other threads decode


class CancelledRequest(Exception):
    """The client of a request has gone."""


@dataclass(eq=False)
class Ticket:
    """One request of a client. Without a seed each request has its own random numbers."""

    deadline: float  # by `time.monotonic()`
    seed: int | None = None
    is_cancelled: bool = False  # True if the client has gone
    num_unknown: int = 0  # sentences with tokens that a tokenizer does not know
    num_unfinished: int = 0  # targets, or their sentences, that met the length limit
    text_lock: "threading.Lock | None" = None  # held by a long request, but not while it waits

    def check(self) -> float:
        """Return the seconds that are left. Raises `CancelledRequest` or `TimeoutError` if the request has ended."""
        if self.is_cancelled:
            raise CancelledRequest("The client closed the connection.")
        if (seconds := self.deadline - time.monotonic()) < 0:
            raise TimeoutError
        return seconds


@dataclass(eq=False)
class _Search:
    ticket: Ticket
    plan: Plan
    key: tuple  # equal for searches whose sentences may share a batch
    ids: list[list[list[int]]]  # for each generator of the plan the token ids of each sentence
    is_random: bool  # sentences of a search that draws random numbers share batches with no others
    lengths: list[int]
    # Indices of the sentences that wait, shortest first, and the number of their tokens; hypotheses of the others.
    waiting: list[int]
    num_tokens: int
    results: dict[int, list[Hypothesis]] = field(default_factory=dict)
    future: Future = field(default_factory=Future)


# The orders of which the turns alternate: by the tokens that are left, and by arrival, as the searches stand in the queue.
_ORDERS = (lambda search: search.num_tokens, lambda search: 0)
_Row = tuple[_Search, int]  # a search, and the index of one of its sentences


class QueuedGenerator(Generator):
    """Generator of one request. It shares batches with others, and the model and its tokenizers with the original."""

    def __init__(self, original: Generator, batcher: "Batcher", ticket: Ticket):
        vars(self).update((name, value) for name, value in vars(original).items() if name not in COUNTERS)
        # A copy, whose counters the batches of several requests may change.
        self.original, self.batcher, self.ticket = copy.copy(original), batcher, ticket

    def generate_encoded(self, plan: Plan, encoded: EncodedTexts, *progress: Any) -> list[list[Hypothesis]]:
        hypotheses = self.batcher.generate(self.ticket, plan, encoded)
        self.count(encoded.counts, hypotheses)
        self.ticket.num_unknown += encoded.counts.get("num_unknown", 0)
        return hypotheses


class Batcher:
    """Decodes the sentences of all requests in threads, each of which decodes a batch of its own.

    Batches are in turn of the request that came first and of the one with the fewest tokens left. So a long document does not
    hold up a short text, nor many short texts a document. The batch has the longest sentence of the request, and those of
    similar length of all requests with equal options. A request that cannot end in time gets a `TimeoutError` at once.
    """

    def __init__(self, num_threads: int = 1):
        # Called after each batch with the numbers of sentences, of source tokens and of target tokens.
        self.observe: Callable[[int, int, int], None] = lambda *counts: None
        self._batch_seconds = 0.0
        # Seconds of a source token, by the id of the model.
        self._seconds_per_token: dict[int, float] = {}
        self._condition = threading.Condition()
        self._random_lock = threading.Lock()  # torch has one stream of random numbers
        self._searches: list[_Search] = []
        self._turns = itertools.cycle(_ORDERS)
        # The numbers of sentences of the batches that are decoded, and the calls, the first of which runs.
        self._running: list[int] = []
        self._calls: list[object] = []
        self._is_closed = False
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Decode everything that waits, and end the threads."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
        for thread in self._threads:
            thread.join()

    @property
    def num_waiting(self) -> int:
        """Sentences that wait."""
        with self._condition:
            return sum(len(search.waiting) for search in self._searches)

    def generate(self, ticket: Ticket, plan: Plan, encoded: EncodedTexts) -> list[list[Hypothesis]]:
        """Wait for the hypotheses of encoded sentences. Other errors are those of `Ticket.check`."""
        generator = plan.generators[0]
        lengths = [max(map(len, rows)) for rows in zip(*encoded.ids, strict=True)]
        if not lengths:
            return []
        is_random = bool(plan.options.get("do_sample", generator.model.generation_config.do_sample))
        key = (id(generator.model), id(generator.tokenizers), repr(sorted(plan.options.items())), plan.return_scores)
        waiting = sorted(range(len(lengths)), key=lengths.__getitem__)
        search = _Search(ticket, plan, key, encoded.ids, is_random, lengths, waiting, sum(lengths))
        with self._condition:
            if self._is_closed:
                raise CancelledRequest("The server is shutting down.")
            self._searches.append(search)
            self._condition.notify_all()
        if ticket.text_lock is not None:
            # Meanwhile another long request may work on its texts.
            ticket.text_lock.release()
        try:
            search.future.result(ticket.check())
        except TimeoutError:
            # Nobody needs the sentences that still wait.
            ticket.is_cancelled = True
            raise
        finally:
            if ticket.text_lock is not None:
                ticket.text_lock.acquire()
        return [search.results[index] for index in range(len(lengths))]

    def call(self, ticket: Ticket, function: Callable[[], Result]) -> Result:
        """Run a function, such as an alignment, while no thread decodes. Errors are those of `generate`."""
        # No other batch begins until the call ends.
        self._calls.append(call := object())
        try:
            with self._condition:
                if not self._condition.wait_for(lambda: not self._running and self._calls[0] is call, ticket.check()):
                    raise TimeoutError
            return function()
        finally:
            with self._condition:
                self._calls.remove(call)
                self._condition.notify_all()

    def _work(self) -> None:
        while rows := self._take():
            self._decode(rows)
            with self._condition:
                self._running.remove(len(rows))
                self._condition.notify_all()
            # A frame that waits for the next request must not hold the last one.
            del rows

    def _take(self) -> list[_Row]:
        """Wait for a turn, and take the next batch out of the queue; an empty one after the end."""
        with self._condition:
            while True:
                self._condition.wait_for(self._has_turn)
                if self._running:
                    # Clients that have just been answered may send more.
                    self._condition.wait_for(self._has_share, _WAIT_SHARE * self._batch_seconds)
                    if not self._has_turn():
                        continue
                self._fail_late()
                if self._searches:
                    break
                if self._is_closed:
                    return []
            rows = self._choose(min(self._searches, key=next(self._turns)))
            self._searches = [search for search in self._searches if search.waiting]
            self._running.append(len(rows))
            return rows

    def _fail_late(self) -> None:
        """Fail the searches that cannot end in time by either order of turns, and those without a client."""
        expected: dict[_Search, float] = {}
        for order in _ORDERS:
            seconds = 0.0
            for search in sorted(self._searches, key=order):
                rate = self._seconds_per_token.get(id(search.plan.generators[0].model), 0.0)
                seconds += search.num_tokens * rate / len(self._threads)
                expected[search] = min(seconds, expected.get(search, seconds))
        for search, seconds in expected.items():
            try:
                if seconds > search.ticket.check():
                    raise TimeoutError("The request would take too long for the server. Send fewer texts at a time.")
            except (CancelledRequest, TimeoutError) as error:
                self._fail(search, error)

    def _has_turn(self) -> bool:
        return not self._calls and bool(self._searches or self._is_closed)

    def _has_share(self) -> bool:
        """Return True if a free thread would get its share of all sentences, or need not wait for more."""
        if self._is_closed or not self._searches:
            return True
        waiting = sum(len(search.waiting) for search in self._searches)
        is_full = waiting >= self._searches[0].plan.generators[0].batch_size
        return is_full or waiting * len(self._threads) >= waiting + sum(self._running)

    def _choose(self, search: _Search) -> list[_Row]:
        """Take the batch of the longest sentence of a search, with sentences of similar length of all searches."""
        if search.is_random:
            # The random numbers must not depend on other requests.
            indices, search.waiting = search.waiting, []
            return [(search, index) for index in indices]
        generator, longest = search.plan.generators[0], search.waiting[-1]
        size, rows = generator.batch_size, []
        for other in self._searches:
            if other.key == search.key:
                # No sentence of another length could share the batch.
                middle = bisect.bisect_right(other.waiting, search.lengths[longest], key=other.lengths.__getitem__)
                rows += [(other, index) for index in other.waiting[max(0, middle - size) : middle + size]]
        lengths, first = [other.lengths[index] for other, index in rows], rows.index((search, longest))
        batches = batches_by_length(lengths, size, self._most_tokens(generator))
        taken = dict.fromkeys(rows[row] for row in next(batch for batch in batches if first in batch))
        for other in {other for other, _ in taken}:
            other.waiting = [index for index in other.waiting if (other, index) not in taken]
            other.num_tokens = sum(other.lengths[index] for index in other.waiting)
        return list(taken)

    def _most_tokens(self, generator: Generator) -> int:
        """Return the tokens of a batch that takes about `_LONGEST_BATCH` seconds, within bounds."""
        most = generator.max_tokens_per_batch
        if not (seconds := self._seconds_per_token.get(id(generator.model))):
            return most
        return max(int(_SMALLEST_PART * most), min(most, int(_LONGEST_BATCH / seconds)))

    def _decode(self, rows: list[_Row]) -> None:
        searches = list(dict.fromkeys(search for search, _ in rows))
        try:
            with self._random_lock if searches[0].is_random else contextlib.nullcontext():
                if searches[0].is_random:
                    seed = searches[0].ticket.seed
                    torch.seed() if seed is None else torch.manual_seed(seed)
                hypotheses = self._search(rows)
        except Exception as error:
            if len(searches) > 1:
                # Only the request that caused the error may fail.
                for search in searches:
                    self._decode([row for row in rows if row[0] is search])
                return
            with self._condition:
                self._fail(searches[0], error)
            return
        with self._condition:
            for (search, index), row in zip(rows, hypotheses, strict=True):
                search.results[index] = row
                if len(search.results) == len(search.lengths):
                    search.future.set_result(None)

    def _fail(self, search: _Search, error: Exception) -> None:
        if search in self._searches:
            self._searches.remove(search)
        if not search.future.done():
            search.future.set_exception(error)

    def _search(self, rows: list[_Row]) -> list[list[Hypothesis]]:
        search, started = rows[0][0], time.perf_counter()
        ids = [[other.ids[number][index] for other, index in rows] for number in range(len(search.ids))]
        generator = search.plan.generators[0].original
        hypotheses = generator.generate_encoded(search.plan, EncodedTexts(ids, documents=[], counts={}))
        seconds = time.perf_counter() - started
        lengths = [other.lengths[index] for other, index in rows]
        num_target_tokens = sum(len(hypothesis.ids) for row in hypotheses for hypothesis in row)
        # A full batch takes no less time. So no request is refused that could end in time.
        size = max(len(rows), min(generator.batch_size, self._most_tokens(generator) // max(lengths)))
        with self._condition:
            newest, model = seconds / (max(lengths) * size), id(generator.model)
            before = self._seconds_per_token.get(model, newest)
            self._seconds_per_token[model] = before + _NEWEST * (newest - before)
            self._batch_seconds = seconds
        self.observe(len(rows), sum(lengths), num_target_tokens)
        return hypotheses
