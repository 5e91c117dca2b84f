"""Service: models, limits and keys, and the way of a request from its endpoint to the models and back."""

import asyncio
import contextlib
import hmac
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import anyio
from fastapi import Request

from metaphrase.inference.texts.terms import Terms
from metaphrase.serving.batcher import Batcher, Ticket
from metaphrase.serving.languages import base_code, identify_languages
from metaphrase.serving.limits import Limits
from metaphrase.serving.metrics import Metrics
from metaphrase.serving.models import ServedModel, ServedModels
from metaphrase.serving.translation import Answer, Query, answer, check_query

Result = TypeVar("Result")
# A refused client comes back after at most this time.
_LONGEST_RETRY = 60
_TAGS = re.compile(r"<[^<>]*>")


class OverloadError(Exception):
    """The server has no room for a request.

    Attributes:
        retry_after: Seconds after which the client may try again.
    """

    def __init__(self, message: str, retry_after: int):
        super().__init__(message)
        self.retry_after = retry_after


class Service:
    """State of a server.

    Attributes:
        models: The models.
        batcher: Decodes the sentences of all requests.
        limits: Limits of requests.
        glossaries: Terms by their id in requests.
        metrics: Metrics of requests and batches.
        is_draining: True while the server ends. Then each answer closes its connection.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        batcher: Batcher,
        *,
        limits: Limits | None = None,
        api_keys: Iterable[str] = (),
        glossaries: Mapping[str, Terms] | None = None,
    ):
        """Join the parts.

        Args:
            models: The models, the default one first.
            batcher: The batcher of the models.
            limits: Limits of requests.
            api_keys: Keys of clients. Without keys every client may use the server.
            glossaries: Terms by their id in requests.

        Raises:
            ValueError: If two models have the same name.
        """
        self.models = ServedModels(models)
        self.batcher = batcher
        self.limits = limits or Limits()
        self.glossaries = dict(glossaries or {})
        self.is_draining = False
        self._keys = [key.encode() for key in api_keys]
        self._num_requests = 0
        self._threads = anyio.CapacityLimiter(self.limits.max_requests)
        self.metrics = Metrics(batcher, lambda: self._num_requests)

    @property
    def needs_key(self) -> bool:
        """True if clients need a key."""
        return bool(self._keys)

    def accepts(self, key: str | None) -> bool:
        """Return True if a client with this key may use the server. The time does not tell how much of a key is right."""
        if not self._keys:
            return True
        return any(hmac.compare_digest((key or "").encode(), known) for known in self._keys)

    @contextlib.contextmanager
    def admit(self, seed: int | None = None) -> Iterator[Ticket]:
        """Return a context for one request, which gives it a ticket.

        Args:
            seed: Seed of random numbers.

        Raises:
            OverloadError: If too many requests run, or the request would wait longer than its time.
        """
        expected, limits = self.batcher.expected_seconds(), self.limits
        if self._num_requests >= limits.max_requests or expected > limits.timeout_seconds:
            retry_after = max(1, min(math.ceil(expected), _LONGEST_RETRY))
            raise OverloadError("The server is overloaded. Try again later.", retry_after)
        self._num_requests += 1
        try:
            yield Ticket(time.monotonic() + limits.timeout_seconds, seed)
        finally:
            self._num_requests -= 1

    async def run_in_thread(self, function: Callable[[], Result]) -> Result:
        """Run a function that waits for the models in another thread.

        Raises:
            CancelledRequest: If the client has gone.
            OverloadError: If the request takes too long.
        """
        try:
            return await anyio.to_thread.run_sync(function, limiter=self._threads)
        except TimeoutError as error:
            raise OverloadError(str(error) or "The request took longer than the server allows.", 1) from error

    @contextlib.asynccontextmanager
    async def watching(self, request: Request, ticket: Ticket) -> AsyncIterator[None]:
        """Return a context that cancels a ticket when its client goes away."""

        async def watch() -> None:
            # After the body, the only further message tells that the client has gone.
            while (await request.receive())["type"] != "http.disconnect":
                pass
            ticket.is_cancelled = True

        task = asyncio.create_task(watch())
        try:
            yield
        finally:
            task.cancel()

    async def answer(self, request: Request, model: ServedModel, query: Query, seed: int | None = None) -> Answer:
        """Decode the texts of a request.

        Raises:
            CancelledRequest: If the client has gone.
            OverloadError: If the server has no room, or the request takes too long.
            ValueError: If a text or an option is wrong or beyond a limit.
        """
        check_query(query, self.limits)
        with self.admit(seed) as ticket:
            async with self.watching(request, ticket):
                return await self.run_in_thread(lambda: answer(model, query, ticket))

    async def translate(self, request: Request, query: Query) -> tuple[Answer, list[dict[str, float]]]:
        """Translate texts, each by a model for its language.

        Args:
            request: The request.
            query: Texts and a target language. Without a source language, that of each text is identified.

        Returns:
            The targets, and the confidence of each source language for each text, as `identify_languages`.

        Raises:
            CancelledRequest: If the client has gone.
            OverloadError: If the server has no room, or the request takes too long.
            UnknownModelError: If no model translates between the languages.
            ValueError: If a text or an option is wrong or beyond a limit.
        """
        check_query(query, self.limits)
        self.models.find_languages(query.source_lang, query.target_lang)
        if query.source_lang is not None:
            languages = [{query.source_lang: 100.0}] * len(query.texts)
        else:
            target, pairs = base_code(query.target_lang), self.models.targets_by_source
            sources = [source for source in pairs if target in pairs[source]]
            texts = [text if query.text_format == "text" else _TAGS.sub(" ", text) for text in query.texts]
            languages = await self.run_in_thread(lambda: identify_languages(texts, sources))
        best, targets, num_unfinished = [next(iter(row)) for row in languages], {}, 0
        for code in dict.fromkeys(best):
            indices = [index for index, language in enumerate(best) if language == code]
            part = replace(query, source_lang=code, texts=[query.texts[index] for index in indices])
            result = await self.answer(request, self.models.find_languages(code, query.target_lang), part)
            targets.update(zip(indices, result.targets, strict=True))
            num_unfinished += result.num_unfinished
        return Answer([targets[index] for index in range(len(best))], num_unfinished), languages
