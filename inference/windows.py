"""Decoding by windows, each of which is decoded as a whole: in a process of its own, or for minimum Bayes risk.

Windows: a stream of any length, so many sources at a time; the next ones are prepared while the last ones are decoded.
"""

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from tqdm.auto import tqdm

from metaphrase.inference.source_limits import counting_on
from metaphrase.inference.text_options import options_of_texts


def decode_window(
    generator: Any,
    number: int,
    texts: list[str],
    *,
    seed: int | None,
    return_scores: bool,
    risk: Mapping[str, Any] | None,
    **options,
) -> list[list[Any]]:
    """Candidates for each source of one window.

    Args:
        generator: The `Generator` that decodes.
        number: Of the window in its stream, from 0.
        texts: Its sources.
        seed: Of the whole stream's random numbers, if they are to depend on it and on the number alone.
        return_scores: Whether candidates carry their score.
        risk: Arguments of `Generator.generate_mbr`, whose choice is the only candidate then.
        **options: Arguments of `generate()`.
    """
    if seed is not None:
        seed_window(seed, number)
    if risk is not None:
        return [[chosen] for chosen in generator.generate_mbr(texts, **risk, **options)]
    return generator.generate_n_best(texts, return_scores=return_scores, **options)


def decode_windows(
    generator: Any, lines: Iterable[str], window: int, first_window: int, bar: tqdm, **settings
) -> Iterator[list[Any]]:
    """Candidates for each source of a stream, window by window; `settings` are those of `decode_window`."""
    for number, texts in enumerate(read_windows(lines, window), start=first_window):
        first = number * window
        with counting_on(first):
            candidates = decode_window(generator, number, texts, **settings_of_window(settings, first, len(texts)))
        yield from candidates
        bar.update(len(texts))


def settings_of_window(settings: Mapping[str, Any], first: int, count: int) -> dict[str, Any]:
    """Arguments of `decode_window`, in which what is of each text is of those from `first` on."""
    numbers = range(first, first + count)
    settings = options_of_texts(settings, numbers)
    if (settings["risk"] or {}).get("reference_options"):
        others = options_of_texts(settings["risk"]["reference_options"], numbers)
        settings["risk"] = {**settings["risk"], "reference_options": others}
    return settings


def line_bar(show_progress: bool | None, total: int | None, done: int) -> tqdm:
    """A progress bar over the lines of a stream; `None` shows it on a terminal only."""
    return tqdm(total=total, initial=done, unit="line", disable=None if show_progress is None else not show_progress)


Prepared = TypeVar("Prepared")


def read_windows(lines: Iterable[str], size: int) -> Iterator[list[str]]:
    """The lines in lists of `size`; the last one may be shorter.

    Raises:
        ValueError: If `size` is not above 0.
    """
    if size < 1:
        raise ValueError(f"`window` must be at least 1, got {size}.")
    iterator = iter(lines)
    while window := list(itertools.islice(iterator, size)):
        yield window


def check_seed(seed: int | None) -> None:
    """Checks what `seed_window` is to be called with.

    Raises:
        ValueError: If it is none that random numbers can start from.
    """
    if seed is not None and not (isinstance(seed, int) and 0 <= seed < 1 << 64):
        raise ValueError(f"`seed` must be a whole number from 0 to 2**64 - 1, got {seed!r}.")


def seed_window(seed: int, number: int) -> None:
    """Puts torch's random numbers where a window of the input finds them, whatever was decoded before it.

    Args:
        seed: Of the whole input.
        number: Of the window, from 0; the first one has the seed itself.
    """
    if number:
        seed = int(np.random.SeedSequence(seed, spawn_key=(number,)).generate_state(1, np.uint64)[0] >> np.uint64(1))
    torch.manual_seed(seed)


class PreparedWindows(Generic[Prepared]):
    """Iterates windows, each with what a function makes of it, in a thread of its own that is ahead, by one window or by several.

    The function runs only while the consumer is neither inside `alone()` nor done, so that the two can share a tokenizer. An
    error of the reader or of the function comes where its window would have come. A consumer that stops early does not wait for
    a reader that has nothing to read: the thread ends when it does.
    """

    def __init__(self, windows: Iterable[list[str]], prepare: Callable[[list[str]], Prepared], ahead: int = 1):
        """Says what to read and what to make of it; the thread starts with the context.

        Args:
            windows: Read in the thread.
            prepare: Called in the thread, for one window at a time.
            ahead: Windows that are prepared, at most, beside the one that the consumer has.
        """
        self._windows = windows
        self._prepare = prepare
        self._lock = threading.Lock()
        self._is_done = False
        # The thread reads a window for each permit, and there is one for each window that was taken.
        self._permits = threading.Semaphore(ahead)
        self._ready: queue.SimpleQueue = queue.SimpleQueue()

    def __enter__(self) -> "PreparedWindows[Prepared]":
        # A daemon, since a reader may wait for a terminal or a pipe for ever.
        threading.Thread(target=self._work, name="metaphrase-windows", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_done = True
        self._permits.release()

    def __iter__(self) -> Iterator[tuple[list[str], Prepared]]:
        while True:
            found, error = self._ready.get()
            if error is not None:
                raise error
            if found is None:
                return
            self._permits.release()
            yield found

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Waits until the function has returned, and holds it back from its next call."""
        with self._lock:
            yield

    def _work(self) -> None:
        windows = iter(self._windows)
        try:
            while self._permits.acquire() and not self._is_done:
                window = next(windows, None)
                if window is None:
                    break
                with self._lock:
                    if self._is_done:
                        return
                    prepared = self._prepare(window)
                self._ready.put(((window, prepared), None))
                del window, prepared
            self._ready.put((None, None))
        except BaseException as error:
            self._ready.put((None, error))
