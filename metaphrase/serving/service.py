"""The way of a request from its endpoint to the models and back: checks, whole texts sentence by sentence, and streams."""

import asyncio
import contextlib
import functools
import hmac
import itertools
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import anyio
from fastapi import Request

from metaphrase.errors import MetaphraseError
from metaphrase.inference.generator import Generator
from metaphrase.serving import Limits
from metaphrase.serving.batcher import Batcher, Result, Ticket
from metaphrase.serving.models import Pivot, ServedModel, UnknownModelError, base_code, identify_languages
from metaphrase.storage.generation_options import GENERATION_OPTIONS, check_options, complete_sampling
from metaphrase.texts.documents import split_texts
from metaphrase.texts.plan import Terms
from metaphrase.texts.whole_texts import TextDecoder

# A client may not choose special tokens.
CLIENT_OPTIONS = tuple(name for name in GENERATION_OPTIONS if not name.endswith("_token_id"))
_TAGS = re.compile(r"<[^<>]*>")
_LONG_REQUEST = 5000  # characters of a request whose Python code would hold up other threads


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
    stops: Sequence[str] = ()  # a target ends before the first of these strings
    seed: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def make_query(texts: str | Sequence[str], fields: Any, num_targets: int, options: Mapping[str, Any]) -> Query:
    """Return the query of a body whose fields of languages, seed and stops are those of OpenAI's and Hugging Face's API."""
    texts, stops = ([words] if isinstance(words, str) else words or () for words in (texts, fields.stop))
    languages = fields.src_lang, fields.tgt_lang
    return Query(texts, *languages, num_targets=num_targets, stops=stops, seed=fields.seed, options=options)


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
        self.models = {model.name: model for model in models}
        if len(self.models) < len(models):
            names = ", ".join(model.name for model in models)
            raise MetaphraseError(f"Each model must have a name of its own, got {names}. Write NAME=FOLDER.")
        self.batcher, self.limits, self.glossaries = batcher, limits or Limits(), glossaries or {}
        self.keys = [key.encode() for key in api_keys]  # without keys every client may use the server
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
    def routes(self) -> dict[str, dict[str, ServedModel | Pivot]]:
        """The first model that translates between two languages, or else two models, by source and then by target language."""
        direct: dict[str, dict[str, ServedModel]] = {}
        for model in self.models.values():
            if model.task == "translation":
                for source, target in itertools.product(model.source_languages, model.target_languages):
                    direct.setdefault(source, {}).setdefault(target, model)
        routes: dict[str, dict[str, ServedModel | Pivot]] = {source: dict(row) for source, row in direct.items()}
        for source, row in direct.items():
            # English comes first among several languages between the two, then the order of the models.
            for middle in sorted(row, key=lambda code: code != "en"):
                for target, second in direct.get(middle, {}).items():
                    if source != target:
                        routes[source].setdefault(target, Pivot(row[middle], middle, second))
        return routes

    def find_translator(self, source: str | None, target: str) -> ServedModel | Pivot:
        """Return the route between two languages; `None` is any source language. Raises `UnknownModelError` if there is none."""
        code = base_code(target)
        rows = self.routes.values() if source is None else [self.routes.get(base_code(source), {})]
        if route := next((row[code] for row in rows if code in row), None):
            return route
        pairs = [f"{first}-{second}" for first, row in self.routes.items() for second in row if first != second]
        known = ", ".join(pairs[:9]) or "none: start the server with a name such as en-de=FOLDER"
        pair = target if source is None else f"{source}-{target}"
        raise UnknownModelError(f"A model must know the languages ({known}), got {pair}.")

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

    def work_on_texts(self, query: Query, ticket: Ticket, function: Callable[[], Result]) -> Result:
        """Run a function that splits, encodes and joins the texts of a request; one file or long request at a time."""
        is_long = query.is_file or sum(map(len, query.texts)) >= _LONG_REQUEST
        ticket.text_lock = lock = self._text_lock if is_long else threading.Lock()
        while not lock.acquire(timeout=ticket.check()):
            pass
        try:
            ticket.check()
            return function()
        finally:
            ticket.text_lock = None
            lock.release()

    async def run_in_thread(self, function: Callable[[], Result]) -> Result:
        """Run a function that waits for the models in another thread."""
        try:
            return await anyio.to_thread.run_sync(function, limiter=self._threads)
        except TimeoutError as error:
            raise OverloadError(str(error) or "The request took longer than the server allows.") from error

    async def run(self, request: Request, query: Query, function: Callable[[Ticket], Result]) -> Result:
        """Check a query, and run a function of its ticket in another thread. A client that goes away cancels the ticket."""
        check_query(query, self.limits)
        with self.admit(query.seed) as ticket:

            async def watch() -> None:
                # After the body, the only further message tells that the client has gone.
                while (await request.receive())["type"] != "http.disconnect":
                    pass
                ticket.is_cancelled = True

            task = asyncio.create_task(watch())
            try:
                return await self.run_in_thread(lambda: self.work_on_texts(query, ticket, lambda: function(ticket)))
            finally:
                task.cancel()
                request.state.num_unknown, request.state.num_unfinished = ticket.num_unknown, ticket.num_unfinished

    def translate_texts(self, query: Query, ticket: Ticket) -> tuple[list[list[str]], list[list[dict[str, Any]]]]:
        """Translate texts, in `run`, from their own language or that of each. Returns also what `identify_languages` does."""
        self.find_translator(query.source_lang, query.target_lang)
        target, sources = base_code(query.target_lang), [query.source_lang]
        if query.source_lang is None:
            sources = [source for source, row in self.routes.items() if target in row]
        texts = [text if query.text_format == "text" else _TAGS.sub(" ", text) for text in query.texts]
        texts, count = ([" ".join(texts)], len(texts)) if query.is_file else (texts, 1)
        languages = identify_languages(texts, sources) * count
        best, targets = [row[0]["language"] for row in languages], {}
        for code in dict.fromkeys(best):
            indices = [index for index, language in enumerate(best) if language == code]
            part = replace(query, source_lang=code, texts=[query.texts[index] for index in indices])
            rows = answer(self.find_translator(code, query.target_lang), part, ticket)
            targets.update(zip(indices, rows, strict=True))
        return [targets[index] for index in range(len(best))], languages


def check_query(query: Query, limits: Limits) -> None:
    """Check a request before it waits. Raises `MetaphraseError` if a text or an option is beyond a limit."""
    counts = {"texts": 1 if query.is_file else len(query.texts), "characters": sum(map(len, query.texts))}
    for (kind, count), most in zip(counts.items(), (limits.max_texts, limits.max_text_characters), strict=True):
        if count > most:
            raise MetaphraseError(f"A request must have at most {most} {kind}, got {count}.")
    for name, value in query.options.items():
        if name not in CLIENT_OPTIONS or not isinstance(value, int | float):
            known = f"{', '.join(CLIENT_OPTIONS)} with a number, true or false"
            raise MetaphraseError(f"An option must be one of {known}, got {name!r}: {value!r}.")
    check_options(query.options)
    for name in ("max_new_tokens", "max_length", "min_length", "min_new_tokens", "num_beams", "num_return_sequences"):
        most = limits.max_beams if name.startswith("num") else limits.max_new_tokens_per_text
        if query.options.get(name, 0) > most:
            raise MetaphraseError(f"`{name}` must be at most {most}, got {query.options[name]}.")
    if not isinstance(query.num_targets, int) or not 1 <= query.num_targets <= limits.max_beams:
        raise MetaphraseError(f"The number of targets must be from 1 to {limits.max_beams}, got {query.num_targets!r}.")


def open_model(model: ServedModel, query: Query, ticket: Ticket) -> tuple[Generator, dict[str, Any], str | bool]:
    """Return the generator of a request, its options of `generate()`, and the value of `split_sentences` for `split_texts`."""
    generator, language_options = model.open(ticket, query.source_lang, query.target_lang)
    is_split = model.task == "translation" if query.split_sentences is None else query.split_sentences
    codes = (base_code(code) for code in [query.source_lang, *model.source_languages[:1]] if code)
    return generator, complete_sampling(query.options) | language_options, is_split and next(codes, True)


def answer(model: ServedModel | Pivot, query: Query, ticket: Ticket) -> list[list[str]]:
    """Return for each source of a request the best target and its alternatives."""
    if isinstance(model, Pivot):
        if query.terms:
            names = f"{model.first.name} and {model.second.name}"
            raise MetaphraseError(f"A glossary needs one model for both languages, got {names}. Leave it out.")
        rows = answer(model.first, replace(query, target_lang=model.language, num_targets=1), ticket)
        texts = [target for [target] in rows]
        return answer(model.second, replace(query, texts=texts, source_lang=model.language), ticket)
    generator, options, split_sentences = open_model(model, query, ticket)
    has_marks = query.text_format != "text" or query.terms
    if has_marks and query.num_targets > 1:
        raise MetaphraseError("Alternatives must be left out with markup and terms, got both.")
    if has_marks or (split_sentences and query.num_targets == 1):
        marks: dict[str, Any] = {"terms": query.terms, "keep_tags": query.keep_tags, "has_lines": query.is_file}
        decoder = TextDecoder(generator, text_format=query.text_format, split_sentences=split_sentences, **marks)
        decoder.run_alone = functools.partial(model.batcher.call, ticket)
        targets = [[text] for text in decoder.decode(query.texts, **options)]
    else:
        if query.num_targets > 1 and not options.get("do_sample"):
            # Each target needs a beam.
            beams = options.get("num_beams") or generator.model.generation_config.num_beams or 1
            options["num_beams"] = max(beams, query.num_targets)
        options["num_return_sequences"] = query.num_targets
        rows = generator.generate_n_best(query.texts, return_scores=False, split_sentences=split_sentences, **options)
        targets = [[scored.text for scored in row] for row in rows]
    ticket.num_unfinished += generator.num_unfinished
    return targets


def cut_at(text: str, stops: Sequence[str]) -> str:
    """Return a text up to the first of several strings."""
    ends = [text.find(stop) for stop in stops if stop and stop in text]
    return text[: min(ends)] if ends else text


async def stream_target(service: Service, model: ServedModel, query: Query) -> AsyncIterator[tuple[str, str | None]]:
    """Yield the target of one text, sentence by sentence, each with None; in the end "stop", or "length" at the length limit."""
    check_query(query, service.limits)
    if len(query.texts) != 1 or query.num_targets != 1:
        raise MetaphraseError("A stream must have one text and one target.")
    # A stop may begin in one piece and end in the next one.
    num_held = max(max(map(len, query.stops), default=0) - 1, 0)
    with service.admit(query.seed) as ticket:
        generator, options, split_sentences = open_model(model, query, ticket)
        options["num_return_sequences"] = 1
        split = functools.partial(split_texts, [generator], query.texts, split_sentences)
        [document], _ = await service.run_in_thread(lambda: service.work_on_texts(query, ticket, split))
        waiting, *gaps = document.layout
        for sentence, gap in zip(document.sentences, gaps, strict=True):
            [text] = await service.run_in_thread(functools.partial(generator.generate, [sentence], **options))
            waiting += text + gap
            if (text := cut_at(waiting, query.stops)) != waiting:
                yield text, "stop"
                return
            if ready := waiting[: max(len(waiting) - num_held, 0)]:
                yield ready, None
                waiting = waiting[len(ready) :]
        yield cut_at(waiting, query.stops), "length" if generator.num_unfinished else "stop"
