"""`metaphrase generate MODEL`: one line in, one line out, in the same order."""

import sys

if not __package__:  # Run as a file: this folder must not hide the library `evaluate` or the standard `tokenize`.
    sys.path.pop(0)

import argparse
import codecs
import contextlib
import io
import itertools
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

from tqdm.auto import tqdm
from transformers import set_seed

from metaphrase.inference import ENGINES, Generator, ScoredText
from metaphrase.inference.ensemble import ENSEMBLE_MEANS
from metaphrase.inference.generation_options import (
    add_generation_options,
    add_language_options,
    add_phrase_options,
    chosen_generation_options,
    chosen_phrase_options,
)
from metaphrase.inference.minimum_bayes_risk import UTILITIES
from metaphrase.inference.output_file import OutputStream, ResumedFile, check_regular, format_targets
from metaphrase.inference.windows import read_windows, seed_window
from metaphrase.scripts.console import run
from metaphrase.tokenization import iterate_lines

logger = logging.getLogger(__name__)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="metaphrase generate",
        description="Reads sources line by line and writes one target line for each, in the same order.",
        allow_abbrev=False,
    )
    parser.add_argument("model", help="folder or Hub id of any encoder-decoder model")
    parser.add_argument("--input", metavar="FILE", help="sources, one a line, UTF-8; standard input by default")
    parser.add_argument(
        "--output", metavar="FILE", help="where to write, in place of what is there; standard output by default"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        default=None,
        help="go on with an output of the same command that was stopped; where there is none, begin",
    )
    parser.add_argument("--source_prefix", default="", help="stands before every source, such as 'summarize: '")
    add_language_options(parser)
    parser.add_argument("--batch_size", type=int, default=64, help="most sources in a batch [%(default)s]")
    parser.add_argument(
        "--max_tokens_per_batch", type=int, default=8192, help="most source tokens in a batch [%(default)s]"
    )
    parser.add_argument("--window", type=int, default=4096, help="sources held and sorted at a time [%(default)s]")
    parser.add_argument(
        "--engine",
        default=ENGINES[0],
        choices=ENGINES,
        help="what computes [%(default)s]; ctranslate2 takes an exported folder, or converts a Metaphrase model first",
    )
    parser.add_argument("--device", help="where to run; an accelerator by default, if there is one")
    parser.add_argument(
        "--dtype",
        default="auto",
        help="type of the weights [%(default)s: as saved]; int8 and float16 make a CPU faster",
    )
    parser.add_argument("--seed", type=int, default=42, help="of sampling [%(default)s]")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that comes with the model")
    parser.add_argument(
        "--n_best",
        action="store_true",
        help="write `index ||| target ||| score` for every target; so it is when num_return_sequences is above 1",
    )
    add_generation_options(parser)
    group = parser.add_argument_group("several models, or several candidates")
    group.add_argument(
        "--ensemble",
        nargs="+",
        metavar="MODEL",
        help="more models, which write each target together with the first",
    )
    group.add_argument("--ensemble_mean", choices=ENSEMBLE_MEANS, help="of what they predict [linear]")
    group.add_argument(
        "--assistant_model",
        metavar="MODEL",
        help="a smaller model that drafts what the first checks: the same output, sooner",
    )
    group.add_argument("--num_assistant_tokens", type=int, metavar="INT", help="tokens of a draft")
    group.add_argument(
        "--mbr_candidates",
        type=int,
        metavar="INT",
        help="minimum Bayes risk: of so many candidates the most expected one",
    )
    group.add_argument(
        "--mbr_references", type=int, metavar="INT", help="pseudo-references; else the candidates are these, too"
    )
    group.add_argument("--mbr_utility", choices=list(UTILITIES), help="how alike two texts are [chrf]")
    add_phrase_options(parser)
    return parser


def read_lines(path: str | None) -> Iterator[str]:
    """The lines of a file or of standard input, as they come; only a line feed ends one, so that as many go out.

    Raises:
        ValueError: If a line is not valid UTF-8. The message says which.
    """
    if path is not None:
        yield from iterate_lines(path)
        return
    for number, line in enumerate(open_standard_input(), start=1):
        line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        try:
            yield line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"Standard input must be UTF-8, but line {number} is not ({error}).") from error


def open_standard_input() -> BinaryIO:
    """A file of its own: Python cannot close `sys.stdin` at its end while a thread still waits for a line of it."""
    try:
        return open(os.dup(sys.stdin.fileno()), "rb")
    except io.UnsupportedOperation:
        # It is no file of the system's.
        return sys.stdin.buffer


def check_files(input_path: str | None, output_path: str | None) -> None:
    """Fails before any work, and before the output is emptied.

    Raises:
        ValueError: If both are the same file.
        OSError: If the input cannot be read.
    """
    if input_path is None:
        return
    if not Path(input_path).is_fifo():  # Opening and closing a pipe would stop its writer.
        with open(input_path, "rb"):
            pass
    if output_path is not None and os.path.exists(output_path) and os.path.samefile(input_path, output_path):
        raise ValueError(f"`output` must be another file than `input`, got {output_path!r} for both.")


def check_dependents(arguments: argparse.Namespace) -> None:
    """Raises `ValueError` for an option that means nothing without another one."""
    needs = {
        "ensemble_mean": "ensemble",
        "mbr_references": "mbr_candidates",
        "mbr_utility": "mbr_candidates",
        "num_assistant_tokens": "assistant_model",
        "resume": "output",
    }
    for name, needed in needs.items():
        value = getattr(arguments, name)
        if value is not None and getattr(arguments, needed) is None:
            raise ValueError(f"`{needed}` must be given with `{name}`, got None and {value!r}.")


def load(arguments: argparse.Namespace, names: str | list[str]) -> Generator:
    """A generator of one model or, of several, of an ensemble."""
    return Generator.from_pretrained(
        names,
        engine=arguments.engine,
        device=arguments.device,
        dtype=arguments.dtype,
        trust_remote_code=arguments.trust_remote_code,
        source_lang=arguments.source_lang,
        target_lang=arguments.target_lang,
        source_prefix=arguments.source_prefix,
        batch_size=arguments.batch_size,
        max_tokens_per_batch=arguments.max_tokens_per_batch,
        ensemble_mean=arguments.ensemble_mean or "linear",
    )


def decode_by_risk(
    generator: Generator,
    lines: Iterable[str],
    arguments: argparse.Namespace,
    options: dict,
    first_window: int,
    total: int | None,
) -> Iterator[list[ScoredText]]:
    """The candidate of minimum Bayes risk for each line, with its expected utility."""
    with tqdm(total=total, initial=first_window * arguments.window, unit="line", disable=None) as bar:
        for number, window in enumerate(read_windows(lines, arguments.window), start=first_window):
            seed_window(arguments.seed, number)
            for scored in generator.generate_mbr(
                window,
                num_candidates=arguments.mbr_candidates,
                num_references=arguments.mbr_references,
                utility=arguments.mbr_utility or "chrf",
                **options,
            ):
                yield [scored]
            bar.update(len(window))


def open_output(arguments: argparse.Namespace, num_targets: int, n_best: bool) -> AbstractContextManager[OutputStream]:
    """Standard output, a new file, or one to go on with."""
    if not arguments.resume:
        if arguments.output is None:
            return contextlib.nullcontext(OutputStream(sys.stdout))
        return new_file(arguments.output)
    return ResumedFile(arguments.output, num_targets=num_targets, with_scores=n_best, window=arguments.window)


@contextlib.contextmanager
def new_file(path: str) -> Iterator[OutputStream]:
    with open(path, "w", encoding="utf-8", newline="\n") as stream:
        yield OutputStream(stream)


def count_lines(path: str | None) -> int | None:
    """For a progress bar that somebody sees; `None` for what cannot be read twice."""
    if path is None or not Path(path).is_file() or not sys.stderr.isatty():
        return None
    with open(path, "rb") as file:
        return sum(1 for _ in file)


def main(words: Sequence[str]) -> None:
    arguments = make_parser().parse_args(words)
    if arguments.window < 1:
        raise ValueError(f"`window` must be at least 1, got {arguments.window}.")
    check_dependents(arguments)
    check_files(arguments.input, arguments.output)
    if arguments.resume:
        check_regular(arguments.output)
    options = chosen_generation_options(arguments) | chosen_phrase_options(arguments)
    n_best = arguments.n_best or options.get("num_return_sequences", 1) > 1
    if not n_best and arguments.mbr_candidates is None:
        # Whatever the model's own settings say, it is one line out per line in.
        options["num_return_sequences"] = 1
    set_seed(arguments.seed)
    generator = load(arguments, [arguments.model, *(arguments.ensemble or [])])
    num_targets = 1 if arguments.mbr_candidates is not None else generator.num_targets(**options)
    if arguments.assistant_model is not None:
        options["assistant_model"] = load(arguments, arguments.assistant_model)
        if arguments.num_assistant_tokens is not None:
            options["num_assistant_tokens"] = arguments.num_assistant_tokens
    count, started = 0, time.perf_counter()
    with open_output(arguments, num_targets, n_best) as output:
        first, total = output.first_source, count_lines(arguments.input)
        if first:
            logger.info("%s holds the targets of the first lines: going on at line %d.", arguments.output, first + 1)
        lines = itertools.islice(read_lines(arguments.input), first, None)
        place = {"first_window": first // arguments.window, "total": total}
        results = (
            generator.generate_stream(
                lines,
                window=arguments.window,
                return_scores=n_best,
                show_progress=None,
                seed=arguments.seed,
                **place,
                **options,
            )
            if arguments.mbr_candidates is None
            else decode_by_risk(generator, lines, arguments, options, **place)
        )
        for index, candidates in enumerate(results, start=first):
            output.write(format_targets(index, candidates, n_best))
            count += 1
        output.finish()
    seconds = time.perf_counter() - started
    logger.info("%d lines in %.1f seconds, %.1f lines per second.", count, seconds, count / seconds)
    if generator.num_unfinished:
        logger.warning(
            "%d targets of %d sources met the length limit before their end: raise max_length or max_new_tokens.",
            generator.num_unfinished,
            count,
        )
    if generator.num_drafted:
        share = generator.num_accepted / generator.num_drafted
        logger.info("Of %d drafted tokens %.1f %% were accepted.", generator.num_drafted, 100 * share)


if __name__ == "__main__":
    sys.exit(run(main, "generate"))
