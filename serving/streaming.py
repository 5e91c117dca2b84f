"""Stream a target in pieces: token by token where the search allows, else sentence by sentence."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import torch

from metaphrase.decoding.options import complete_sampling
from metaphrase.inference import Generator
from metaphrase.inference.generator import Plan, make_splitter
from metaphrase.inference.texts.documents import keep_whole
from metaphrase.modeling.pipeline_support import resolve_settings
from metaphrase.serving.batcher import Ticket
from metaphrase.serving.models import QueuedGenerator, ServedModel
from metaphrase.serving.service import Service
from metaphrase.serving.translation import Query, check_query, cut_at, splitting_language

# The end of a character that needs more bytes.
_INCOMPLETE = "\ufffd"


class _PieceStreamer:
    """Receives each token of one target, and emits the text that it adds."""

    def __init__(self, generator: QueuedGenerator, emit: Callable[[str], None]):
        self._generator, self._emit = generator, emit
        self._ids: list[int] = []
        self._has_start = False
        self.text = ""

    def put(self, tokens: torch.Tensor) -> None:
        """Take tokens from `generate()`. The first ones are the decoder's start. An error here ends the search."""
        self._generator.ticket.check()
        if not self._has_start:
            self._has_start = True
            return
        self._ids += tokens.flatten().tolist()
        [text] = self._generator.tokenizers.decode_targets([self._ids])
        # A tokenizer may rewrite earlier text; then the piece comes with the end.
        if text.startswith(self.text) and not text.endswith(_INCOMPLETE):
            self.finish(text)

    def end(self) -> None:
        """Do nothing: the caller has the whole target."""

    def finish(self, text: str) -> None:
        """Emit the text behind what was emitted before."""
        if text.startswith(self.text) and len(text) > len(self.text):
            self._emit(text[len(self.text) :])
        self.text = text


class TextStream:
    """The target of one text in pieces.

    Attributes:
        query: The request.
        is_finished: False if the target, or a sentence of it, met the length limit. Known at the end.
    """

    def __init__(self, service: Service, model: ServedModel, query: Query, seed: int | None = None):
        """Check a request.

        Raises:
            ValueError: If there is more than one text, or a text or an option is beyond a limit.
        """
        check_query(query, service.limits)
        if len(query.texts) != 1 or query.num_targets != 1:
            raise ValueError("A stream must have one text and one target.")
        if query.text_format != "text" or query.terms:
            raise ValueError("Markup and terms must be left out of a stream.")
        self.is_finished = True
        self.query = query
        self._service, self._model, self._seed = service, model, seed

    async def start(self) -> AsyncIterator[str]:
        """Return the pieces. Errors before the first piece are raised here, so that they can have a status of their own.

        Raises:
            CancelledRequest: If the client has gone.
            OverloadError: If the server has no room, or the request takes too long.
            ValueError: As `Generator.generate()`.
        """
        pieces = self._pieces()
        first = await anext(pieces, "")

        async def all_pieces() -> AsyncIterator[str]:
            yield first
            async for piece in pieces:
                yield piece

        return all_pieces()

    async def _pieces(self) -> AsyncIterator[str]:
        loop, queue = asyncio.get_running_loop(), asyncio.Queue()

        def put(piece: str | None) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, piece)

        with self._service.admit(self._seed) as ticket:

            def work() -> int:
                try:
                    return write_pieces(self._model, self.query, ticket, put)
                finally:
                    put(None)

            task = asyncio.create_task(self._service.run_in_thread(work))
            try:
                while (piece := await queue.get()) is not None:
                    yield piece
                self.is_finished = not await task
            finally:
                # The client may have gone.
                ticket.is_cancelled = True


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


def write_pieces(model: ServedModel, query: Query, ticket: Ticket, emit: Callable[[str], None]) -> int:
    """Decode the one text of a request, and emit its target in pieces.

    Returns:
        Number of sentences that met the length limit.

    Raises:
        CancelledRequest: If the client has gone.
        TimeoutError: If the request takes too long.
        ValueError: As `Generator.generate()`.
    """
    generator, language_options = model.open(ticket, query.source_lang, query.target_lang)
    options = complete_sampling(dict(query.options)) | language_options | {"num_return_sequences": 1}
    settings = resolve_settings(generator.model, options)
    if language := splitting_language(model, query):
        [document] = make_splitter([generator], language).split(query.texts)
    else:
        [document] = keep_whole(query.texts)
    first, *gaps = document.layout
    if first:
        emit(first)
    for sentence, gap in zip(document.sentences, gaps, strict=True):
        if (settings.get("num_beams") or 1) == 1:
            _stream_tokens(generator, sentence, options, emit)
        else:
            [text] = generator.generate([sentence], **options)
            emit(text)
        if gap:
            emit(gap)
    return generator.num_unfinished


def _stream_tokens(
    generator: QueuedGenerator, sentence: str, options: dict[str, Any], emit: Callable[[str], None]
) -> None:
    """Decode a sentence alone in the thread of the models."""

    def decode() -> None:
        if generator.ticket.seed is not None:
            torch.manual_seed(generator.ticket.seed)
        streamer = _PieceStreamer(generator, emit)
        plan = Plan.of(generator, options | {"streamer": streamer}, 1)
        sources = plan.encode([sentence])
        # Not the method of a queued generator, which would wait for this thread.
        hypotheses = Generator.search_encoded(generator, plan, sources, False)
        [[scored]] = plan.decode_texts(sources.documents, hypotheses, False)
        streamer.finish(scored.text)

    generator.batcher.call(generator.ticket, decode)
