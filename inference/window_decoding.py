"""Decoding by windows, each of which is decoded as a whole: in a process of its own, or for minimum Bayes risk."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tqdm.auto import tqdm

from metaphrase.inference.source_limits import counting_on
from metaphrase.inference.text_options import options_of_texts
from metaphrase.inference.windows import read_windows, seed_window
from metaphrase.modeling.patience import without_patience


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
    # What is made of a window must not depend on how many came before it.
    with without_patience():
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
