"""The way of a request from its endpoint to the models and back: checks, whole texts sentence by sentence, and streams."""

import asyncio
import contextlib
import functools
import hmac
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import anyio
from fastapi import Request

from metaphrase.serving.batcher import Batcher, Ticket
from metaphrase.serving.limits import Limits
from metaphrase.serving.models import Pivot, ServedModel, UnknownModelError, base_code, identify_languages
from metaphrase.storage.generation_options import GENERATION_OPTIONS, check_options, complete_sampling
from metaphrase.texts.documents import Document, split_texts
from metaphrase.texts.plan import Terms
from metaphrase.texts.whole_texts import TextDecoder

Result = TypeVar("Result")
# A client may not choose special tokens.
CLIENT_OPTIONS = tuple(name for name in GENERATION_OPTIONS if not name.endswith("_token_id"))
_TAGS = re.compile(r"<[^<>]*>")
# Characters of a request whose Python code would hold up other threads.
_LONG_REQUEST = 5000


@dataclass(frozen=True)
class Query:
    """Texts of a request, options of `TextDecoder`, and options of `generate()`. The model has default languages."""

    texts: Sequence[str]
    source_lang: str | None = None
    target_lang: str | None = None
    text_format: str = "text"
    split_sentences: bool | None = None  # `None` for translation only
    terms: Terms = field(default_factory=Terms)
    keep_tags: Collection[str] = ()
    num_targets: int = 1  # for each source; all but the first are alternatives
    is_file: bool = False  # True if the texts are of one file, in one language, with lines
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """Targets of a request: for each source the best target and its alternatives."""

    targets: list[list[str]]
    # Targets, or their sentences, that met the length limit.
    num_unfinished: int


class OverloadError(Exception):
    """The server has no room for a request. The client may try again."""


class Service:
    """State of a server: models by name, the default one first; terms by their id in requests; and requests that wait or run."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        batcher: Batcher,
        *,
        limits: Limits | None = None,
        api_keys: Iterable[str] = (),
        glossaries: Mapping[str, Terms] | None = None,
    ):
        """Take the parts. Without keys every client may use the server."""
        self.models = {model.name: model for model in models}
        if len(self.models) < len(models):
            names = ", ".join(model.name for model in models)
            raise ValueError(f"Each model must have a name of its own, got {names}. Write NAME=FOLDER.")
        self.batcher = batcher
        self.limits = limits or Limits()
        self.glossaries = dict(glossaries or {})
        self.keys = [key.encode() for key in api_keys]
        self.num_requests = 0
        self._threads = anyio.CapacityLimiter(self.limits.max_requests)
        self._text_lock = threading.Lock()

    def accepts(self, key: str | None) -> bool:
        """Return True if a client with this key may use the server. The time does not tell how much of a key is right."""
        return not self.keys or any(hmac.compare_digest((key or "").encode(), known) for known in self.keys)

    def find_model(self, name: str | None) -> ServedModel:
        """Return the model with a name, or the first one without a name. Raises `UnknownModelError` for another name."""
        name = next(iter(self.models)) if name is None else name
        if name not in self.models:
            raise UnknownModelError(f"`model` must be one of {', '.join(self.models)}, got {name!r}.")
        return self.models[name]

    @functools.cached_property
    def targets_by_source(self) -> dict[str, list[str]]:
        """Target languages by source language, of all models that translate, alone or two in a row."""
        pairs: dict[str, dict[str, None]] = {}
        for model in self.models.values():
            for source in model.source_languages if model.task == "translation" else ():
                pairs.setdefault(source, {}).update(dict.fromkeys(model.target_languages))
        rows = {source: list(targets) for source, targets in pairs.items()}
        for source, targets in rows.items():
            pairs[source].update((code, None) for middle in targets for code in rows.get(middle, ()) if code != source)
        return {source: list(targets) for source, targets in pairs.items()}

    def find_translator(self, source: str | None, target: str) -> ServedModel | Pivot:
        """Return the first model that translates between two languages, or else two models; `None` is any source language.

        Of several languages between the two, English comes first, and then the order of the models.
        """
        translators = [model for model in self.models.values() if model.task == "translation"]

        def find_direct(source: str | None, target: str) -> ServedModel | None:
            for model in translators:
                knows_source = source is None or base_code(source) in model.source_languages
                if knows_source and base_code(target) in model.target_languages:
                    return model
            return None

        if model := find_direct(source, target):
            return model
        middles = dict.fromkeys(code for model in translators for code in model.target_languages)
        for middle in sorted(middles, key=lambda code: code != "en"):
            first, second = find_direct(source, middle), find_direct(middle, target)
            if first and second and base_code(source) != base_code(target):
                return Pivot(first, middle, second)
        pairs = [f"{a}-{b}" for a, targets in self.targets_by_source.items() for b in targets if a != b]
        known = ", ".join(pairs[:9]) or "none: start the server with a name such as en-de=FOLDER"
        raise UnknownModelError(
            f"The languages must be a pair that a model translates ({known}), got {source or 'any'}-{target}."
        )

    def list_pivots(self) -> list[str]:
        """Return the pairs of languages that two models translate, such as de-en-fr."""
        pairs = [(source, target) for source, targets in self.targets_by_source.items() for target in targets]
        routes = [(source, self.find_translator(source, target), target) for source, target in pairs]
        return [f"{source}-{route.language}-{target}" for source, route, target in routes if isinstance(route, Pivot)]

    @contextlib.contextmanager
    def admit(self, seed: int | None = None) -> Iterator[Ticket]:
        """Return a context for one request, which gives it a ticket. `OverloadError` if the server has no room."""
        if self.num_requests >= self.limits.max_requests:
            raise OverloadError("The server is overloaded. Try again later.")
        self.num_requests += 1
        try:
            yield Ticket(time.monotonic() + self.limits.timeout_seconds, seed)
        finally:
            self.num_requests -= 1

    @contextlib.contextmanager
    def text_work(self, query: Query, ticket: Ticket) -> Iterator[None]:
        """Return a context to split, encode and join the texts of a request. One long request at a time is in it."""
        if sum(map(len, query.texts)) < _LONG_REQUEST:
            yield
            return
        with self._text_lock:
            ticket.check()
            ticket.text_lock = self._text_lock
            try:
                yield
            finally:
                ticket.text_lock = None

    async def run_in_thread(self, function: Callable[[], Result]) -> Result:
        """Run a function that waits for the models in another thread."""
        try:
            return await anyio.to_thread.run_sync(function, limiter=self._threads)
        except TimeoutError as error:
            raise OverloadError(str(error) or "The request took longer than the server allows.") from error

    async def run(self, request: Request, function: Callable[[Ticket], Result], seed: int | None = None) -> Result:
        """Run a function of a request's ticket in another thread. The ticket is cancelled when the client goes away."""
        with self.admit(seed) as ticket:

            async def watch() -> None:
                # After the body, the only further message tells that the client has gone.
                while (await request.receive())["type"] != "http.disconnect":
                    pass
                ticket.is_cancelled = True

            task = asyncio.create_task(watch())
            try:
                return await self.run_in_thread(lambda: function(ticket))
            finally:
                task.cancel()

    async def answer(
        self, request: Request, model: ServedModel | Pivot, query: Query, seed: int | None = None
    ) -> Answer:
        """Decode the texts of a request."""
        check_query(query, self.limits)

        def work(ticket: Ticket) -> Answer:
            with self.text_work(query, ticket):
                return answer(model, query, ticket)

        return await self.run(request, work, seed)

    async def translate(self, request: Request, query: Query) -> tuple[Answer, list[dict[str, float]]]:
        """Translate texts, each by a model for its language, which is identified where the query has none.

        Returns the targets, and the confidence of each source language for each text, as `identify_languages`.
        """
        check_query(query, self.limits)
        self.find_translator(query.source_lang, query.target_lang)
        if query.source_lang is not None:
            languages = [{query.source_lang: 100.0}] * len(query.texts)
        else:
            target, pairs = base_code(query.target_lang), self.targets_by_source
            sources = [source for source in pairs if target in pairs[source]]

            def identify() -> list[dict[str, float]]:
                texts = [text if query.text_format == "text" else _TAGS.sub(" ", text) for text in query.texts]
                if query.is_file:
                    return identify_languages([" ".join(texts)], sources) * len(texts)
                return identify_languages(texts, sources)

            languages = await self.run_in_thread(identify)
        best, targets, num_unfinished = [next(iter(row)) for row in languages], {}, 0
        for code in dict.fromkeys(best):
            indices = [index for index, language in enumerate(best) if language == code]
            part = replace(query, source_lang=code, texts=[query.texts[index] for index in indices])
            result = await self.answer(request, self.find_translator(code, query.target_lang), part)
            targets.update(zip(indices, result.targets, strict=True))
            num_unfinished += result.num_unfinished
        return Answer([targets[index] for index in range(len(best))], num_unfinished), languages


def check_query(query: Query, limits: Limits) -> None:
    """Check a request before it waits. Raises `ValueError` if a text or an option is beyond a limit."""
    if len(query.texts) > limits.max_texts and not query.is_file:
        raise ValueError(f"A request must have at most {limits.max_texts} texts, got {len(query.texts)}.")
    if (total := sum(map(len, query.texts))) > limits.max_text_characters:
        raise ValueError(f"A request must have at most {limits.max_text_characters} characters, got {total}.")
    for name, value in query.options.items():
        if name not in CLIENT_OPTIONS or not isinstance(value, int | float):
            raise ValueError(
                f"An option must be one of {', '.join(CLIENT_OPTIONS)} with a number, true or false, got {name!r}: {value!r}."
            )
    check_options(query.options)
    largest = dict.fromkeys(
        ("max_new_tokens", "max_length", "min_length", "min_new_tokens"), limits.max_new_tokens_per_text
    )
    largest |= dict.fromkeys(("num_beams", "num_return_sequences"), limits.max_beams)
    for name, most in largest.items():
        if query.options.get(name, 0) > most:
            raise ValueError(f"`{name}` must be at most {most}, got {query.options[name]}.")
    if not isinstance(query.num_targets, int) or not 1 <= query.num_targets <= limits.max_beams:
        raise ValueError(f"The number of targets must be from 1 to {limits.max_beams}, got {query.num_targets!r}.")


def splitting_language(model: ServedModel, query: Query) -> str | bool:
    """Return the language to split texts into sentences by, True for the generator's, or False to keep them whole."""
    if not (model.task == "translation" if query.split_sentences is None else query.split_sentences):
        return False
    return next((base_code(code) for code in [query.source_lang, *model.source_languages[:1]] if code), True)


def answer(model: ServedModel | Pivot, query: Query, ticket: Ticket) -> Answer:
    """Decode the texts of a request."""
    if isinstance(model, Pivot):
        if query.terms:
            names = f"{model.first.name} and {model.second.name}"
            raise ValueError(f"A glossary needs one model for both languages, got {names}. Leave the glossary out.")
        first = answer(model.first, replace(query, target_lang=model.language, num_targets=1), ticket)
        texts = [row[0] for row in first.targets]
        last = answer(model.second, replace(query, texts=texts, source_lang=model.language), ticket)
        return Answer(last.targets, first.num_unfinished + last.num_unfinished)
    generator, language_options = model.open(ticket, query.source_lang, query.target_lang)
    options = complete_sampling(dict(query.options)) | language_options
    split_sentences = splitting_language(model, query)
    needs_decoder = query.text_format != "text" or bool(query.terms)
    if query.num_targets > 1:
        if needs_decoder:
            raise ValueError("Alternatives must be left out with markup and terms, got both.")
        if not options.get("do_sample"):
            # Each target needs a beam.
            beams = options.get("num_beams") or generator.model.generation_config.num_beams or 1
            options["num_beams"] = max(beams, query.num_targets)
        options["num_return_sequences"] = query.num_targets
        rows = generator.generate_n_best(query.texts, return_scores=False, split_sentences=split_sentences, **options)
        targets = [[scored.text for scored in row] for row in rows]
    elif needs_decoder or split_sentences:
        decoder = TextDecoder(
            generator,
            text_format=query.text_format,
            split_sentences=split_sentences,
            terms=query.terms,
            keep_tags=query.keep_tags,
            has_lines=query.is_file,
        )
        decoder.run_alone = functools.partial(model.batcher.call, ticket)
        targets = [[text] for text in decoder.decode(query.texts, **options)]
    else:
        targets = [[text] for text in generator.generate(query.texts, **options)]
    return Answer(targets, generator.num_unfinished)


def cut_at(text: str, stops: Sequence[str] | None) -> str:
    """Return a text up to the first of several strings."""
    ends = [text.find(stop) for stop in stops or () if stop and stop in text]
    return text[: min(ends)] if ends else text


class TextStream:
    """The target of one text, sentence by sentence. In the end `is_finished` is False if a sentence met the length limit."""

    def __init__(
        self,
        service: Service,
        model: ServedModel,
        query: Query,
        *,
        seed: int | None = None,
        stops: Sequence[str] | None = None,
    ):
        """Check a request, whose target ends before the first of `stops`."""
        check_query(query, service.limits)
        if len(query.texts) != 1 or query.num_targets != 1:
            raise ValueError("A stream must have one text and one target.")
        self.is_finished, self.query = True, query
        self._service, self._model, self._seed, self._stops = service, model, seed, stops

    async def start(self) -> AsyncIterator[str]:
        """Return the pieces. Errors before the first piece are raised here, so that they can have a status of their own."""
        pieces = cut_pieces(self._pieces(), self._stops)
        first = await anext(pieces, "")

        async def all_pieces() -> AsyncIterator[str]:
            yield first
            async for piece in pieces:
                yield piece

        return all_pieces()

    async def _pieces(self) -> AsyncIterator[str]:
        service, query = self._service, self.query
        with service.admit(self._seed) as ticket:
            generator, language_options = self._model.open(ticket, query.source_lang, query.target_lang)
            options = complete_sampling(dict(query.options)) | language_options | {"num_return_sequences": 1}
            language = splitting_language(self._model, query)

            def split() -> Document:
                with service.text_work(query, ticket):
                    [document], _ = split_texts([generator], query.texts, language)
                return document

            document = await service.run_in_thread(split)
            lead, *gaps = document.layout
            for sentence, gap in zip(document.sentences, gaps, strict=True):
                decode = functools.partial(generator.generate, [sentence], **options)
                [text] = await service.run_in_thread(decode)
                yield lead + text + gap
                lead = ""
            if lead:
                yield lead
            self.is_finished = not generator.num_unfinished


async def cut_pieces(pieces: AsyncIterator[str], stops: Sequence[str] | None) -> AsyncIterator[str]:
    """Yield pieces up to the first of several strings."""
    most = max(map(len, stops or ()), default=0)
    waiting = ""
    async for piece in pieces:
        waiting += piece
        if (text := cut_at(waiting, stops)) != waiting:
            yield text
            return
        # A stop may begin in this piece and end in the next one.
        ready = len(waiting) - max(most - 1, 0)
        if ready > 0:
            yield waiting[:ready]
            waiting = waiting[ready:]
    if waiting:
        yield waiting
