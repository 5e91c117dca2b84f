"""`metaphrase generate MODEL`: write one target line for each source line, in the same order."""

import sys

if __name__ == "__main__" and not __package__:  # Run as a file: its folder must not hide `evaluate` or `tokenize`.
    sys.path.pop(0)

import argparse
import contextlib
import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

from transformers import set_seed

from metaphrase.inference import Generator, GeneratorPool
from metaphrase.inference.line_files import (
    NewFile,
    OutputStream,
    ResumedFile,
    check_files,
    check_regular,
    count_lines,
    format_targets,
    read_lines,
    standard_output,
)
from metaphrase.inference.minimum_bayes_risk import UTILITIES
from metaphrase.scripts.console import check_dependents, run, warn_of_lengths
from metaphrase.scripts.options import (
    add_generation_options,
    add_loading_options,
    add_phrase_options,
    chosen_generation_options,
    chosen_loading_options,
    chosen_models,
    chosen_phrase_options,
)

logger = logging.getLogger(__name__)

# Options that have no effect without another one.
NEEDS = {
    "mbr_references": "mbr_candidates",
    "mbr_utility": "mbr_candidates",
    "num_assistant_tokens": "assistant_model",
    "resume": "output",
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="metaphrase generate",
        description="Write one target line for each source line, in the same order.",
        allow_abbrev=False,
    )
    add_loading_options(parser)
    parser.add_argument("--input", metavar="FILE", help="file with one source in each line, UTF-8 [standard input]")
    parser.add_argument(
        "--output", metavar="FILE", help="file to write; an existing file is replaced [standard output]"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        default=None,
        help="resume a stopped run of the same command; start from scratch if there is no output yet",
    )
    parser.add_argument("--source_prefix", default="", help="text before every source, such as 'summarize: '")
    parser.add_argument(
        "--chunk_size",
        "--window",
        type=int,
        default=4096,
        help="sources that are sorted and decoded together [%(default)s]",
    )
    parser.add_argument(
        "--num_processes",
        type=int,
        default=1,
        help="processes that decode chunks in parallel [%(default)s]; they share the cores of a CPU, or take the "
        "accelerators in turn",
    )
    parser.add_argument("--seed", type=int, default=42, help="random seed for sampling [%(default)s]")
    parser.add_argument(
        "--n_best",
        action="store_true",
        help="write `index ||| target ||| score` for every target; implied by num_return_sequences above 1",
    )
    add_generation_options(parser)
    group = parser.add_argument_group("speculative and minimum Bayes risk decoding")
    group.add_argument(
        "--assistant_model",
        metavar="MODEL",
        help="smaller model that drafts tokens for the model to check: same output, less time",
    )
    group.add_argument("--num_assistant_tokens", type=int, metavar="INT", help="tokens in a draft")
    group.add_argument(
        "--mbr_candidates",
        type=int,
        metavar="INT",
        help="number of samples for minimum Bayes risk decoding",
    )
    group.add_argument(
        "--mbr_references", type=int, metavar="INT", help="number of pseudo-references [the candidates themselves]"
    )
    group.add_argument(
        "--mbr_utility", choices=list(UTILITIES), help="similarity of a candidate and a pseudo-reference [chrf]"
    )
    add_phrase_options(parser)
    return parser


@contextlib.contextmanager
def load(arguments: argparse.Namespace, options: dict) -> Iterator[Generator | GeneratorPool]:
    """Load a generator, an ensemble or a pool of processes. A draft model goes to the pool, or into `options`."""
    names = chosen_models(arguments)
    loading = {**chosen_loading_options(arguments), "source_prefix": arguments.source_prefix}
    if arguments.num_assistant_tokens is not None:
        options["num_assistant_tokens"] = arguments.num_assistant_tokens
    if arguments.num_processes > 1:
        loading |= {"num_processes": arguments.num_processes, "assistant_model": arguments.assistant_model}
        with GeneratorPool(names, **loading) as pool:
            yield pool
        return
    if arguments.assistant_model is not None:
        options["assistant_model"] = Generator.from_pretrained(arguments.assistant_model, **loading)
    yield Generator.from_pretrained(names, **loading)


def risk_options(arguments: argparse.Namespace) -> dict | None:
    """Return arguments of `Generator.generate_mbr`, or `None` for other decoding."""
    if arguments.mbr_candidates is None:
        return None
    return {
        "num_candidates": arguments.mbr_candidates,
        "num_references": arguments.mbr_references,
        "utility": arguments.mbr_utility or "chrf",
    }


def open_output(arguments: argparse.Namespace, num_targets: int, n_best: bool) -> AbstractContextManager[OutputStream]:
    """Open standard output, a new file, or the file of a stopped run."""
    if not arguments.resume:
        if arguments.output is None:
            return contextlib.nullcontext(OutputStream(standard_output()))
        return NewFile(arguments.output)
    return ResumedFile(arguments.output, num_targets=num_targets, with_scores=n_best, chunk_size=arguments.chunk_size)


def main(words: Sequence[str]) -> None:
    arguments = make_parser().parse_args(words)
    for name in ("chunk_size", "num_processes"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"`{name}` must be at least 1, got {getattr(arguments, name)}.")
    check_dependents(arguments, NEEDS)
    check_files(arguments.input, arguments.output)
    if arguments.resume:
        check_regular(arguments.output)
    options = chosen_generation_options(arguments) | chosen_phrase_options(arguments)
    n_best = arguments.n_best or options.get("num_return_sequences", 1) > 1
    if not n_best and arguments.mbr_candidates is None:
        # Override the model's own setting: one line out for each line in.
        options.setdefault("num_return_sequences", 1)
    set_seed(arguments.seed)
    with load(arguments, options) as generator:
        write(generator, arguments, options, n_best)


def write(generator: Generator | GeneratorPool, arguments: argparse.Namespace, options: dict, n_best: bool) -> None:
    """Decode the input into the output, and log counts and speed."""
    risk = risk_options(arguments)
    num_targets = generator.num_targets(**options) if risk is None else 1
    count, started = 0, time.perf_counter()
    with open_output(arguments, num_targets, n_best) as output:
        first = output.first_source
        if first:
            logger.info("Resuming %s at line %d.", arguments.output, first + 1)
        results = generator.generate_stream(
            itertools.islice(read_lines(arguments.input), first, None),
            risk=risk,
            show_progress=None,
            chunk_size=arguments.chunk_size,
            first_chunk=first // arguments.chunk_size,
            total=count_lines(arguments.input),
            return_scores=n_best,
            seed=arguments.seed,
            **options,
        )
        for index, candidates in enumerate(results, start=first):
            output.write(format_targets(index, candidates, n_best))
            count += 1
        output.finish()
    seconds = time.perf_counter() - started
    logger.info("%d lines in %.1f seconds, %.1f lines per second.", count, seconds, count / seconds)
    warn_of_lengths(generator, count)
    if generator.num_drafted:
        share = generator.num_accepted / generator.num_drafted
        logger.info("Of %d drafted tokens %.1f %% were accepted.", generator.num_drafted, 100 * share)


if __name__ == "__main__":
    sys.exit(run(main, "generate"))
