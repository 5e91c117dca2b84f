"""Split a stream of sources into chunks, prepare them in another thread, and decode each chunk as a whole."""

import abc
import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch

from metaphrase.inference.progress import ProgressBar, progress_bar
from metaphrase.inference.run import ScoredText
from metaphrase.inference.source_limits import numbering
from metaphrase.inference.text_options import options_of_texts, read_text_options
from metaphrase.tokenization import checked_texts

if TYPE_CHECKING:
    from metaphrase.inference.generator import Generator

Prepared = TypeVar("Prepared")
COUNTERS = ("num_unfinished", "num_truncated", "num_cut", "num_drafted", "num_accepted")


@dataclass(frozen=True)
class Chunk:
    """Sources that are decoded together.

    Attributes:
        number: Number of the chunk in its stream, from 0.
        indices: Index of each source in the stream.
        texts: The sources.
    """

    number: int
    indices: range
    texts: list[str]

    def numbering(self) -> contextlib.AbstractContextManager:
        """Return a context in which an error names a source by its number in the stream."""
        return numbering([index + 1 for index in self.indices])

    def prepare(self, generator: "Generator", seed: int | None) -> None:
        """Set torch's seed and the choice of the engine by the chunk, whatever was decoded before.

        Args:
            generator: The generator that decodes the chunk.
            seed: Seed of the stream, which chunk 0 takes as it is. None leaves torch's random numbers as they are.
        """
        if self.number and generator.engine_choice is not None:
            generator.engine_choice.expect_many()
        if seed is not None and self.number:
            state = np.random.SeedSequence(seed, spawn_key=(self.number,)).generate_state(1, np.uint64)
            seed = int(state[0] >> np.uint64(1))
        if seed is not None:
            torch.manual_seed(seed)


def read_chunks(lines: Iterable[str], size: int, first_chunk: int = 0) -> Iterator[Chunk]:
    """Yield chunks of `size` lines. The last one may be shorter.

    Raises:
        ValueError: If `size` is below 1.
    """
    if size < 1:
        raise ValueError(f"`chunk_size` must be at least 1, got {size}.")
    iterator = iter(lines)
    for number in itertools.count(first_chunk):
        if not (texts := list(itertools.islice(iterator, size))):
            return
        yield Chunk(number, range(number * size, number * size + len(texts)), texts)


class StreamDecoder(abc.ABC):
    """Base of `Generator` and `GeneratorPool`: streams, and counters over all calls.

    Attributes:
        num_unfinished: Hypotheses that met the length limit before their end of sequence.
        num_truncated: Sources that were truncated.
        num_cut: Sentences of whole texts that were too long and were cut into parts.
        num_drafted: Tokens that draft models proposed.
        num_accepted: Proposed tokens that became part of a target.
    """

    num_unfinished = num_truncated = num_cut = num_drafted = num_accepted = 0

    def count(self, counts: Mapping[str, int]) -> None:
        """Add to the counters, by name."""
        for name, number in counts.items():
            setattr(self, name, getattr(self, name) + number)

    def generate_stream(
        self,
        lines: Iterable[str],
        *,
        chunk_size: int = 4096,
        return_scores: bool = True,
        show_progress: bool | None = False,
        seed: int | None = None,
        first_chunk: int = 0,
        total: int | None = None,
        risk: Mapping[str, Any] | None = None,
        split_sentences: bool | str = False,
        **generation_kwargs,
    ) -> Iterator[list[ScoredText]]:
        """Yield the candidates of each source of a stream of any length, in order and in bounded memory.

        The sources of a chunk are sorted and decoded together. Meanwhile another thread reads and tokenizes the next chunk.
        The thread does not use the tokenizers while the caller handles a result. In a pool each process has a chunk, and one
        more chunk waits.

        Args:
            lines: Sources; iterated in the other thread.
            chunk_size: Sources that are decoded together.
            return_scores: True if candidates carry their score.
            show_progress: As for `progress_bar`, over the stream.
            seed: Seed of the stream. The random numbers of a chunk depend only on the seed and the chunk's number, so that a
                stopped stream can be resumed. Chunk 0 has those of `torch.manual_seed(seed)`.
            first_chunk: Number of the first chunk in `lines`, for a resumed stream.
            total: Sources of the whole stream, for the progress bar.
            risk: Arguments of `generate_mbr()`, if its choice is to be the only candidate.
            split_sentences: As for `generate_n_best()`.
            **generation_kwargs: As for `generate_n_best()`.

        Raises:
            ChildProcessError: If a process of a pool died.
            ValueError: If `chunk_size` is below 1 or `seed` is negative, if a pool is closed, or as `generate_n_best()` does.
        """
        lines = checked_texts(lines, "lines")
        if seed is not None and not (isinstance(seed, int) and 0 <= seed < 1 << 64):
            raise ValueError(f"`seed` must be a whole number from 0 to 2**64 - 1, got {seed!r}.")
        if risk is not None and split_sentences:
            raise ValueError(
                "`split_sentences` must be left out for minimum Bayes risk decoding, which compares whole texts."
            )
        options = {"seed": seed, "return_scores": return_scores, "risk": risk, "split_sentences": split_sentences}
        options |= read_text_options(generation_kwargs, None)
        with progress_bar(total, "line", show_progress, initial=first_chunk * chunk_size) as bar:
            yield from self.decode_chunks(read_chunks(lines, chunk_size, first_chunk), bar, **options)

    @abc.abstractmethod
    def decode_chunks(self, chunks: Iterator[Chunk], bar: ProgressBar, **options) -> Iterator[list[ScoredText]]:
        """Yield the candidates of each source; `options` are those of `decode_chunk`."""


def decode_chunk(
    generator: "Generator",
    chunk: Chunk,
    *,
    seed: int | None,
    return_scores: bool,
    risk: Mapping[str, Any] | None,
    split_sentences: bool | str,
    **options,
) -> list[list[ScoredText]]:
    """Return the candidates of each source of one chunk. The arguments are those of `generate_stream`."""
    chunk.prepare(generator, seed)
    options = options_of_texts(options, chunk.indices)
    with chunk.numbering():
        if risk is None:
            return generator.generate_n_best(
                chunk.texts, return_scores=return_scores, split_sentences=split_sentences, **options
            )
        if risk.get("reference_options"):
            risk = {**risk, "reference_options": options_of_texts(risk["reference_options"], chunk.indices)}
        return [[chosen] for chosen in generator.generate_mbr(chunk.texts, **risk, **options)]


class PreparedChunks(Generic[Prepared]):
    """Iterator over pairs of a chunk and its prepared form. A thread prepares chunks ahead of the consumer.

    The thread does not call `prepare` while the consumer is inside `alone()`, so that both can use one tokenizer. An error in
    the thread is raised in the consumer, in place of the chunk. A consumer that stops early waits for `prepare`, not
    for the reader.
    """

    def __init__(self, chunks: Iterable[Chunk], prepare: Callable[[Chunk], Prepared], ahead: int = 1):
        """Set up the iterator. The thread starts when the context is entered.

        Args:
            chunks: Read in the thread.
            prepare: Called in the thread, for one chunk at a time.
            ahead: Most prepared chunks that wait for the consumer.
        """
        self._chunks = chunks
        self._prepare = prepare
        self._lock = threading.Lock()
        self._is_done = False
        # The thread takes a permit for each chunk. The consumer gives one back for each chunk that it takes.
        self._permits = threading.Semaphore(ahead)
        self._ready: queue.SimpleQueue = queue.SimpleQueue()

    def __enter__(self) -> "PreparedChunks[Prepared]":
        # A daemon thread, since a reader may wait for a terminal or a pipe for ever.
        threading.Thread(target=self._work, name="metaphrase-chunks", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_done = True
        self._permits.release()
        # If the process ended while the thread is inside a library that is not Python, it would abort.
        with self._lock:
            pass

    def __iter__(self) -> Iterator[tuple[Chunk, Prepared]]:
        while True:
            item, error = self._ready.get()
            if error is not None:
                raise error
            if item is None:
                return
            self._permits.release()
            yield item

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Wait for the current call of `prepare`, and delay the next one."""
        with self._lock:
            yield

    def _work(self) -> None:
        chunks = iter(self._chunks)
        try:
            while self._permits.acquire() and not self._is_done:
                chunk = next(chunks, None)
                if chunk is None:
                    break
                with self._lock:
                    if self._is_done:
                        return
                    prepared = self._prepare(chunk)
                self._ready.put(((chunk, prepared), None))
                del chunk, prepared
            self._ready.put((None, None))
        except BaseException as error:
            self._ready.put((None, error))
