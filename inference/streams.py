"""Streams of sources in chunks, for one generator or a pool of processes."""

import abc
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from metaphrase.inference.progress import ProgressBar, progress_bar
from metaphrase.inference.sources import read_prompts
from metaphrase.tokenization import checked_texts

COUNTERS = ("num_unfinished", "num_truncated", "num_cut", "num_drafted", "num_accepted")


@dataclass(frozen=True)
class ScoredText:
    """One target text and its score (see `Hypothesis.score`)."""

    text: str
    score: float | None


class TextStream(abc.ABC):
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

        The sources of a chunk are sorted and decoded together. In a pool each process has a chunk, and one more chunk waits.

        Args:
            lines: Sources.
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
        if chunk_size < 1:
            raise ValueError(f"`chunk_size` must be at least 1, got {chunk_size}.")
        if seed is not None and not (isinstance(seed, int) and 0 <= seed < 1 << 64):
            raise ValueError(f"`seed` must be a whole number from 0 to 2**64 - 1, got {seed!r}.")
        if risk is not None and split_sentences:
            raise ValueError("Minimum Bayes risk decoding compares whole texts: leave out `split_sentences`.")
        options = {"seed": seed, "return_scores": return_scores, "risk": risk, "split_sentences": split_sentences}
        options |= read_prompts(generation_kwargs, None)
        with progress_bar(total, "line", show_progress, initial=first_chunk * chunk_size) as bar:
            yield from self.decode_chunks(read_chunks(lines, chunk_size, first_chunk), bar, options)

    @abc.abstractmethod
    def decode_chunks(
        self, chunks: Iterator["Chunk"], bar: ProgressBar, options: dict[str, Any]
    ) -> Iterator[list[ScoredText]]:
        """Yield the candidates of each source; `options` are those of `Generator.decode_chunk`."""


@dataclass(frozen=True)
class Chunk:
    """Sources that are decoded together.

    Attributes:
        number: Number of the chunk in its stream, from 0.
        first: Index of the first source in the stream.
        texts: The sources.
    """

    number: int
    first: int
    texts: list[str]


def read_chunks(lines: Iterable[str], size: int, first_chunk: int = 0) -> Iterator[Chunk]:
    """Yield chunks of `size` lines. The last one may be shorter."""
    iterator = iter(lines)
    for number in itertools.count(first_chunk):
        if not (texts := list(itertools.islice(iterator, size))):
            return
        yield Chunk(number, number * size, texts)
