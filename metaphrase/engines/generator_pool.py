"""Generator pool: processes with a generator each, which share the chunks of a stream."""

import contextlib
import functools
import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers.utils import logging as transformers_logging

from metaphrase.errors import MetaphraseError
from metaphrase.inference.generator import COUNTERS, Chunk, Generator, Plan, ScoredText, TextStream, read_chunks
from metaphrase.inference.progress import progress_bar
from metaphrase.storage.loading import default_device
from metaphrase.tokenization import checked_texts


class GeneratorPool(TextStream, contextlib.AbstractContextManager):
    """Several processes, each with a generator of the same model.

    One process has each chunk of a stream, with random numbers of its own. The result does not depend on the number of
    processes. The processes end with the context, even in the middle of a chunk, and with the process that started them. A
    script that starts processes needs `if __name__ == "__main__":`. The counters of `TextStream` are sums over the processes.
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
        """Start the processes and wait until each has loaded the model. `ChildProcessError` if a process died.

        By default, and for a `device` without number (`cuda`), the processes take the accelerators in turn.
        """
        if num_processes < 1:
            raise MetaphraseError(f"`num_processes` must be at least 1, got {num_processes}.")
        self.num_processes = num_processes
        # A forked process would inherit this one's thread state, and cannot use a GPU.
        context = multiprocessing.get_context("spawn")
        devices = context.SimpleQueue()
        for worker_device in spread_devices(device, num_processes):
            devices.put(worker_device)
        # Only this process holds the other end. The system closes it whenever this process ends.
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

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes at once."""
        self._life.close()
        self._executor.shutdown(cancel_futures=True)

    def num_targets(self, **generation_kwargs) -> int:
        with self._naming_deaths():
            return self._executor.submit(_num_targets, generation_kwargs).result()

    def generate_stream(
        self,
        lines: Iterable[str],
        *,
        chunk_size: int = 4096,
        first_chunk: int = 0,
        total: int | None = None,
        show_progress: bool | None = False,
        **options,
    ) -> Iterator[list[ScoredText]]:
        """Yield the candidates of each source like `Generator.generate_stream`. Each process has a chunk, and one more waits."""
        chunks = read_chunks(checked_texts(lines, "lines"), chunk_size, first_chunk)
        options = {"seed": None, "return_scores": True, "risk": None, "split_sentences": False} | options
        futures: deque[Future] = deque()
        with self._naming_deaths(), progress_bar(total, "line", show_progress, initial=first_chunk * chunk_size) as bar:
            while True:
                for chunk in itertools.islice(chunks, self.num_processes + 1 - len(futures)):
                    futures.append(self._executor.submit(_generate, chunk, options))
                if not futures:
                    return
                candidates, counts = futures.popleft().result()
                self.count(counts)
                bar.update(len(candidates))
                yield from candidates

    @contextlib.contextmanager
    def _naming_deaths(self) -> Iterator[None]:
        try:
            yield
        except BrokenProcessPool as error:
            text = "A process of the generator pool died. With little memory, lower `num_processes` or `batch_size`."
            raise ChildProcessError(text) from error


def spread_devices(device: str | torch.device | None, num_processes: int) -> list[str | torch.device | None]:
    """Return a device for each process: the accelerators in turn, unless `device` is a CPU or has a number."""
    name = str(default_device() if device is None else device)
    if not torch.accelerator.is_available() or name != torch.accelerator.current_accelerator().type:
        return [device] * num_processes
    return [f"{name}:{number % torch.accelerator.device_count()}" for number in range(num_processes)]


# The code below runs in the processes of a pool.

# The generator of this process and its draft model, loaded at the first use, so that an error reaches the pool.
_generators: Callable[[], list[Generator | None]]


def _start(
    life: Connection, devices: Any, num_threads: int, name_or_path: Any, assistant_name: Any, options: dict[str, Any]
) -> None:
    global _generators
    # A terminal sends SIGINT to all processes. The process that started the pool handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def end_with_pool() -> None:
        wait([life])
        os._exit(0)

    threading.Thread(target=end_with_pool, name="metaphrase-life", daemon=True).start()
    torch.set_num_threads(num_threads)
    # Bars of several processes would overwrite each other.
    transformers_logging.disable_progress_bar()
    # tqdm's default lock between processes would leak, because `end_with_pool` closes nothing.
    tqdm.set_lock(threading.RLock())
    load = functools.partial(Generator.from_pretrained, **options, device=devices.get())
    names = (name_or_path, assistant_name)
    _generators = functools.cache(lambda: [None if name is None else load(name) for name in names])


def _num_targets(options: dict[str, Any]) -> int:
    generator, _ = _generators()
    return generator.num_targets(**options)


def _generate(chunk: Chunk, options: dict[str, Any]) -> tuple[list[list[ScoredText]], dict[str, int]]:
    generator, assistant = _generators()
    if assistant is not None:
        options["assistant_model"] = assistant
    before = {name: getattr(generator, name) for name in COUNTERS}
    settings = {name: options.pop(name) for name in ("return_scores", "split_sentences", "risk")}
    seed = options.pop("seed")
    candidates = generator.generate_chunk(Plan.of(generator, options, **settings), chunk, seed)
    return candidates, {name: getattr(generator, name) - before[name] for name in COUNTERS}
