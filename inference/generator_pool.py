"""Generator pool: processes with a generator each, which share the windows of a stream."""

import contextlib
import functools
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection, wait
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tqdm import tqdm

from metaphrase.inference.generator import Generator
from metaphrase.inference.loading import default_device, find_device
from metaphrase.inference.run import ScoredText
from metaphrase.inference.source_limits import counting_on
from metaphrase.inference.text_options import read_text_options
from metaphrase.inference.windows import (
    PreparedWindows,
    check_seed,
    decode_window,
    line_bar,
    read_windows,
    settings_of_window,
)
from metaphrase.tokenization import checked_texts

# What a generator counts.
_COUNTS = ("num_unfinished", "num_truncated", "num_drafted", "num_accepted")


class GeneratorPool:
    """Several processes, each with a generator of the same model.

    Each window of a stream is decoded by one of them, with random numbers of its own: what comes out does not depend on how many
    there are. They end with the context, in the middle of a window if need be, and with the process that has made them. As
    everywhere in Python, a script that starts processes needs `if __name__ == "__main__":`.

    Attributes:
        num_processes: How many there are.
        num_unfinished: See `Generator`; so the next three.
        num_truncated: Of all processes.
        num_drafted: Of all processes.
        num_accepted: Of all processes.
    """

    def __init__(
        self,
        name_or_path: str | os.PathLike | Sequence[str | os.PathLike],
        *,
        num_processes: int,
        device: str | torch.device | None = None,
        assistant_model: str | os.PathLike | None = None,
        **kwargs,
    ):
        """Starts the processes and waits until the model is loaded.

        Args:
            name_or_path: As for `Generator.from_pretrained`.
            num_processes: How many. On a CPU they share the threads that torch has here.
            device: Where to run. Without a number (`cuda`), and by default, each process has the next accelerator.
            assistant_model: Name of a draft model, see `Generator.generate`.
            **kwargs: As for `Generator.from_pretrained`.

        Raises:
            ChildProcessError: If a process has died.
            ValueError: If `num_processes` is not above 0; or as `Generator.from_pretrained` does.
        """
        if num_processes < 1:
            raise ValueError(f"`num_processes` must be at least 1, got {num_processes}.")
        self.num_processes = num_processes
        self._is_closed = False
        name_or_path, self._copy = _converted_once(name_or_path, kwargs.get("engine"))
        for name in _COUNTS:
            setattr(self, name, 0)
        # A process that was forked would share the threads of this one, and cannot use a GPU.
        context = multiprocessing.get_context("spawn")
        devices = context.SimpleQueue()
        for each in spread_devices(device, num_processes):
            devices.put(each)
        # Nobody else holds the other end: it is closed when this process ends, whatever ends it.
        reader, self._life = context.Pipe(duplex=False)
        num_threads = max(1, torch.get_num_threads() // num_processes)
        self._executor = ProcessPoolExecutor(
            num_processes,
            mp_context=context,
            initializer=_start,
            initargs=(reader, devices, num_threads, name_or_path, assistant_model, kwargs),
        )
        try:
            with self._naming_deaths():
                for loaded in [self._executor.submit(_num_targets, {}) for _ in range(num_processes)]:
                    loaded.result()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "GeneratorPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the processes, whatever they do."""
        self._is_closed = True
        self._life.close()
        self._executor.shutdown(cancel_futures=True)
        if self._copy is not None:
            self._copy.cleanup()

    def num_targets(self, **generation_kwargs) -> int:
        """How many candidates a source has with these options.

        Raises:
            ChildProcessError: If a process has died.
            ValueError: If the pool is closed.
        """
        with self._naming_deaths():
            return self._executor.submit(_num_targets, generation_kwargs).result()

    def generate_stream(
        self,
        lines: Iterable[str],
        *,
        window: int = 4096,
        return_scores: bool = True,
        show_progress: bool | None = False,
        seed: int | None = None,
        first_window: int = 0,
        total: int | None = None,
        risk: Mapping[str, Any] | None = None,
        **generation_kwargs,
    ) -> Iterator[list[ScoredText]]:
        """Candidates for each source of a stream of any length, in order and in bounded memory.

        Each process has a window, and one more is waiting.

        Args:
            lines: Sources; iterated in another thread.
            window: Sources that are decoded together.
            return_scores: As for `Generator.generate_stream`, as are the next five.
            show_progress: A progress bar over the whole stream.
            seed: Of the random numbers.
            first_window: Number of the window with which `lines` begins.
            total: Sources of the whole stream, for the progress bar.
            risk: For minimum Bayes risk decoding.
            **generation_kwargs: As for `Generator.generate_n_best`.

        Raises:
            ChildProcessError: If a process has died.
            ValueError: If `window` is not above 0, `seed` is negative or the pool is closed, or as `Generator.generate_n_best`
                does.
        """
        lines = checked_texts(lines, "lines")
        check_seed(seed)
        generation_kwargs = read_text_options(generation_kwargs, None)
        numbers = itertools.count(first_window)
        settings = {"seed": seed, "return_scores": return_scores, "risk": risk, **generation_kwargs}

        def submit(texts: list[str]) -> Future:
            number = next(numbers)
            of_window = settings_of_window(settings, number * window, len(texts))
            return self._executor.submit(_decode, number, texts, of_window)

        bar = line_bar(show_progress, total, first_window * window)
        prepared = PreparedWindows(read_windows(lines, window), submit, ahead=self.num_processes)
        with bar, self._naming_deaths(), prepared as windows:
            for number, (texts, future) in enumerate(windows, start=first_window):
                with counting_on(number * window):
                    candidates, counts = future.result()
                for name, count in counts.items():
                    setattr(self, name, getattr(self, name) + count)
                bar.update(len(texts))
                yield from candidates
                del future, candidates

    @contextlib.contextmanager
    def _naming_deaths(self) -> Iterator[None]:
        """Says what became of the processes, where they cannot be asked."""
        try:
            yield
        except (BrokenProcessPool, CancelledError, RuntimeError) as error:
            if self._is_closed:
                raise ValueError("A generator pool must be used before it is closed, got a call after that.") from error
            if not isinstance(error, BrokenProcessPool):
                raise
            raise ChildProcessError(
                "One of the processes that decode has died. If memory was short: fewer of them, or smaller batches, need less."
            ) from error


def _converted_once(name_or_path: Any, engine: str | None) -> tuple[Any, TemporaryDirectory | None]:
    """What the processes load, and, if that is a converted copy, what it lasts as long as: they are ended, and remove nothing."""
    if engine != "ctranslate2" or not isinstance(name_or_path, str | os.PathLike):
        return name_or_path, None
    from metaphrase.inference.ctranslate2.engine import converted_copy, is_exported  # An extra.

    return (name_or_path, None) if is_exported(name_or_path) else converted_copy(name_or_path)


def spread_devices(device: str | torch.device | None, num_processes: int) -> list[str | torch.device | None]:
    """A device for each process: accelerators in turn, where no certain one is named."""
    place = find_device(default_device() if device is None else device)
    if place.type == "cpu" or place.index is not None or not torch.accelerator.is_available():
        return [device] * num_processes
    count = torch.accelerator.device_count()
    return [f"{place.type}:{number % count}" for number in range(num_processes)]


class _Worker:
    """What a process of a pool decodes with; it is loaded when it is asked for."""

    def __init__(self, name_or_path: Any, assistant_name: Any, options: dict[str, Any]):
        self._name_or_path, self._assistant_name, self._options = name_or_path, assistant_name, options

    @functools.cached_property
    def generators(self) -> tuple[Generator, Generator | None]:
        """The one that decodes, and the one that drafts for it."""
        names = (self._name_or_path, self._assistant_name)
        return tuple(None if name is None else Generator.from_pretrained(name, **self._options) for name in names)


_worker: _Worker


def _start(
    life: Connection, devices: Any, num_threads: int, name_or_path: Any, assistant_name: Any, options: dict[str, Any]
) -> None:
    global _worker
    # The terminal sends it to all processes; the one that made these decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(life,), name="metaphrase-life", daemon=True).start()
    torch.set_num_threads(num_threads)
    # A lock between processes would be left behind, since nothing is closed when this process is ended.
    tqdm.set_lock(threading.RLock())
    _worker = _Worker(name_or_path, assistant_name, {**options, "device": devices.get()})


def _end_with(life: Connection) -> None:
    """Ends this process when nobody holds the other end any more."""
    wait([life])
    os._exit(0)


def _num_targets(options: dict[str, Any]) -> int:
    generator, _ = _worker.generators
    return generator.num_targets(**options)


def _decode(number: int, texts: list[str], settings: dict[str, Any]) -> tuple[list[list[ScoredText]], dict[str, int]]:
    """The candidates of a window, and what the generator has counted with them."""
    generator, assistant = _worker.generators
    if assistant is not None:
        settings["assistant_model"] = assistant
    for name in _COUNTS:
        setattr(generator, name, 0)
    candidates = decode_window(generator, number, texts, **settings)
    return candidates, {name: getattr(generator, name) for name in _COUNTS}
