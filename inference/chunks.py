"""Split a stream of sources into chunks, prepare them in another thread, and decode each chunk as a whole."""

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from tqdm.auto import tqdm

from metaphrase.inference.source_limits import counting_on
from metaphrase.inference.text_options import options_of_texts

if TYPE_CHECKING:
    from metaphrase.inference.generator import Generator

Prepared = TypeVar("Prepared")


def read_chunks(lines: Iterable[str], size: int) -> Iterator[list[str]]:
    """Yield the lines in lists of `size`. The last list may be shorter.

    Raises:
        ValueError: If `size` is below 1.
    """
    if size < 1:
        raise ValueError(f"`chunk_size` must be at least 1, got {size}.")
    iterator = iter(lines)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk


def line_bar(show_progress: bool | None, total: int | None, done: int) -> tqdm:
    """Return a progress bar over the lines of a stream; `None` shows it on a terminal only."""
    return tqdm(total=total, initial=done, unit="line", disable=None if show_progress is None else not show_progress)


def check_seed(seed: int | None) -> None:
    """Check the seed of a stream.

    Raises:
        ValueError: If torch does not accept the seed.
    """
    if seed is not None and not (isinstance(seed, int) and 0 <= seed < 1 << 64):
        raise ValueError(f"`seed` must be a whole number from 0 to 2**64 - 1, got {seed!r}.")


def seed_chunk(seed: int, number: int) -> None:
    """Seed torch for one chunk, whatever was decoded before. Chunk 0 has the stream's own seed."""
    if number:
        seed = int(np.random.SeedSequence(seed, spawn_key=(number,)).generate_state(1, np.uint64)[0] >> np.uint64(1))
    torch.manual_seed(seed)


def decode_chunk(
    generator: "Generator",
    number: int,
    texts: list[str],
    *,
    seed: int | None,
    return_scores: bool,
    risk: Mapping[str, Any] | None,
    **options,
) -> list[list[Any]]:
    """Return the candidates of each source of one chunk.

    Args:
        generator: Decodes the chunk.
        number: Number of the chunk in its stream, from 0.
        texts: Sources.
        seed: Seed of the stream, or `None` to go on with torch's random state.
        return_scores: True if candidates carry their score.
        risk: Arguments of `Generator.generate_mbr`, if its choice is to be the only candidate.
        **options: Arguments of `generate()`.
    """
    if seed is not None:
        seed_chunk(seed, number)
    if risk is not None:
        return [[chosen] for chosen in generator.generate_mbr(texts, **risk, **options)]
    return generator.generate_n_best(texts, return_scores=return_scores, **options)


def decode_chunks(
    generator: "Generator", lines: Iterable[str], chunk_size: int, first_chunk: int, bar: tqdm, **options
) -> Iterator[list[Any]]:
    """Yield the candidates of each source of a stream; `options` are those of `decode_chunk`."""
    for number, texts in enumerate(read_chunks(lines, chunk_size), start=first_chunk):
        first = number * chunk_size
        with counting_on(first):
            candidates = decode_chunk(generator, number, texts, **select_texts(options, first, len(texts)))
        yield from candidates
        bar.update(len(texts))


def select_texts(options: Mapping[str, Any], first: int, num_texts: int) -> dict[str, Any]:
    """Return arguments of `decode_chunk` with the rows of the texts from index `first` on."""
    numbers = range(first, first + num_texts)
    options = options_of_texts(options, numbers)
    if (options["risk"] or {}).get("reference_options"):
        reference_options = options_of_texts(options["risk"]["reference_options"], numbers)
        options["risk"] = {**options["risk"], "reference_options": reference_options}
    return options


class PreparedChunks(Generic[Prepared]):
    """Iterator over pairs of a chunk and its prepared form. A thread prepares chunks ahead of the consumer.

    The thread does not call `prepare` while the consumer is inside `alone()`, so that both can use one tokenizer. An error in
    the thread is raised in the consumer, in place of the chunk. A consumer that stops early does not wait for the reader.
    """

    def __init__(self, chunks: Iterable[list[str]], prepare: Callable[[list[str]], Prepared], ahead: int = 1):
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

    def __iter__(self) -> Iterator[tuple[list[str], Prepared]]:
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
