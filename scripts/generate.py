"""`metaphrase generate MODEL`: write one target line for each source line, in the same order."""

import argparse
import contextlib
import itertools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from transformers import set_seed

from metaphrase.errors import MetaphraseError
from metaphrase.inference import Generator
from metaphrase.inference.generator import ScoredText
from metaphrase.inference.line_files import OutputFile, check_files, format_targets
from metaphrase.plugins import needed_plugin, plugin
from metaphrase.scripts import parsers
from metaphrase.tokenization.texts import count_lines, iterate_lines, shard_range

logger = logging.getLogger(__name__)


def main(arguments: argparse.Namespace) -> None:
    needs = {"mbr_references": "mbr_candidates", "mbr_utility": "mbr_candidates"}
    parsers.check_dependents(arguments, num_assistant_tokens="assistant_model", **needs)
    options = prepare(arguments, {"input": arguments.input} | parsers.given_options(arguments, ("glossary", "file")))
    options |= parsers.given_options(arguments, ("must_contain", "never_contain", "num_assistant_tokens", "end_loops"))
    whole = [name for name in ("file", "keep", "glossary") if getattr(arguments, name)]
    if whole or arguments.format != "text":
        needed_plugin("generate_whole_texts", (whole or ["format"])[0])(arguments, options, load)
        return
    n_best, risk = arguments.n_best or options.get("num_return_sequences", 1) > 1, None
    if arguments.mbr_candidates is not None:
        risk = {"num_candidates": arguments.mbr_candidates, "num_references": arguments.mbr_references}
        risk["utility"] = arguments.mbr_utility or "chrf"
    elif not n_best:
        # Override the model's own setting: one line out for each line in.
        options.setdefault("num_return_sequences", 1)

    def format_lines(index: int, record: tuple, candidates: list[ScoredText]) -> str:
        return format_targets(index, candidates, n_best)

    num_targets = 1 if risk else None
    write_targets(arguments, options, format_lines, num_targets=num_targets, risk=risk, with_scores=n_best)


def prepare(arguments: argparse.Namespace, inputs: dict[str, str | None]) -> dict:
    """Check the options and files of a subcommand that generates a stream, and set the seed. Return the generation options.

    `inputs` holds the files to read, by the names of their options.
    """
    if arguments.chunk_size < 1:
        raise MetaphraseError(f"`chunk_size` must be at least 1, got {arguments.chunk_size}.")
    parsers.check_dependents(arguments, resume="output")
    check_files(inputs, arguments.output, resume=arguments.resume)
    set_seed(arguments.seed)
    if arguments.input is None and "file" not in inputs and sys.stdin is not None and sys.stdin.isatty():
        logger.info("Reading sources from the terminal. Ctrl-D ends them. To read a file, set --input.")
    return parsers.chosen_generation_options(arguments)


def keep_memory() -> None:
    """Make the C library keep freed memory: beam search at base dimensions becomes 4 % faster on a CPU."""
    if (keep_freed_memory := plugin("kept_memory")) is not None:
        keep_freed_memory()


@contextlib.contextmanager
def load(arguments: argparse.Namespace, options: dict) -> Iterator[Any]:
    """Load a generator, an ensemble, a pool of processes or two models. A draft model goes to the pool, or into `options`."""
    names, loading = [arguments.model, *(arguments.ensemble or [])], parsers.chosen_loading_options(arguments)
    keep_memory()
    # Drafts and pivots take no part in an ensemble of teachers.
    assistant, pivot = (getattr(arguments, name, None) for name in ("assistant_model", "pivot"))
    if pivot is not None:
        yield needed_plugin("pivot", "pivot")(arguments, loading)
        return
    if arguments.num_processes > 1:
        make_pool = needed_plugin("generator_pool", "num_processes")
        with make_pool(names, num_processes=arguments.num_processes, assistant_model=assistant, **loading) as pool:
            yield pool
        return
    if assistant is not None:
        options["assistant_model"] = Generator.from_pretrained(assistant, **loading)
    yield Generator.from_pretrained(names, **loading)


def write_targets(
    arguments: argparse.Namespace,
    options: dict,
    format_lines: Callable[[int, tuple, list[ScoredText]], str],
    *,
    records: Iterable[tuple] | None = None,
    total: int | None = None,
    num_targets: int | None = None,
    risk: dict | None = None,
    with_scores: bool = False,
    choose: Callable[[Iterator[tuple]], Iterator[tuple]] = iter,
) -> None:
    """Write the targets of sources into the output, and log counts and speed.

    Args:
        format_lines: Returns the lines for the index of a source, its record and its candidates.
        records: Each a source and what belongs to it, such as a reference; by default the lines of the input.
        total: Number of records, if they are given.
        num_targets: Lines for each source. By default, the options and the model decide.
        with_scores: True if the lines are those of an n-best list with scores.
        choose: Takes and yields the candidates of each source with its record.
    """
    if records is None:
        total = count_lines(arguments.input)
        records = ((line,) for line in iterate_lines(arguments.input, arguments.max_line_characters))
    if total is None and arguments.shard is not None:
        raise MetaphraseError("`input` must be a file with `shard`, got a pipe or standard input.")
    start, stop = 0, None
    if total is not None:
        part = shard_range(total, arguments.shard, arguments.chunk_size)
        start, stop = part.start, part.stop
    with contextlib.ExitStack() as stack:
        generator = stack.enter_context(load(arguments, options))
        if num_targets is None:
            # A new file needs no number.
            num_targets = generator.num_targets(**options) if arguments.resume else 1
        layout = {"num_targets": num_targets, "with_scores": with_scores, "chunk_size": arguments.chunk_size}
        output = stack.enter_context(OutputFile(arguments.output, resume=arguments.resume, **layout))
        first_source = output.next_source
        if first_source:
            logger.info("Resuming %s at line %d.", arguments.output, first_source + 1)
            if arguments.input and os.path.getmtime(arguments.input) > os.path.getmtime(arguments.output):
                text = "%s changed after the last line of %s was written. Without --resume, all lines get new targets."
                logger.warning(text, arguments.input, arguments.output)
        started = time.perf_counter()
        records, written = itertools.tee(itertools.islice(records, start + first_source, stop))
        results = generator.generate_stream(
            (record[0] for record in records),
            chunk_size=arguments.chunk_size,
            first_chunk=(start + first_source) // arguments.chunk_size,
            seed=arguments.seed,
            risk=risk,
            show_progress=not arguments.quiet,
            total=stop,
            return_scores=with_scores,
            split_sentences=arguments.split_sentences,
            **options,
        )
        try:
            # A record is there as soon as its result is.
            for candidates, record in choose(zip(results, written, strict=False)):
                output.write(format_lines(start + output.next_source, record, candidates))
        except KeyboardInterrupt:
            if arguments.output is None or not output.next_source:
                raise
            hint = f"{arguments.output} ends with source {output.next_source}. Use --resume to go on."
            raise KeyboardInterrupt(hint) from None
        output.finish()
        count = output.next_source - first_source
        seconds = time.perf_counter() - started
        logger.info("%d lines in %.1f seconds, %.1f lines per second.", count, seconds, count / seconds)
        generator.log_counts(count)
