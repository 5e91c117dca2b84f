"""`metaphrase generate MODEL`: write one target line for each source line, in the same order."""

import argparse
import contextlib
import itertools
import logging
import sys
import time
from collections.abc import Iterator, Sequence

from transformers import set_seed

from metaphrase.inference import Generator, GeneratorPool
from metaphrase.inference.chunks import read_chunks
from metaphrase.inference.line_files import (
    ResumedFile,
    check_files,
    check_regular,
    format_targets,
    num_lines,
    open_output,
    read_lines,
)
from metaphrase.inference.texts.terms import Terms, read_glossary
from metaphrase.inference.whole_texts import TextDecoder
from metaphrase.scripts.console import check_dependents, warn_of_lengths
from metaphrase.scripts.parsers import parse
from metaphrase.scripts.parsers.options import (
    chosen_generation_options,
    chosen_loading_options,
    chosen_models,
    given_options,
)

logger = logging.getLogger(__name__)

MAX_SHOWN = 10


@contextlib.contextmanager
def load(arguments: argparse.Namespace, options: dict) -> Iterator[Generator | GeneratorPool]:
    """Load a generator, an ensemble or a pool of processes. A draft model goes to the pool, or into `options`."""
    names, loading = chosen_models(arguments), chosen_loading_options(arguments)
    if arguments.num_processes > 1:
        loading |= {"num_processes": arguments.num_processes, "assistant_model": arguments.assistant_model}
        with GeneratorPool(names, **loading) as pool:
            yield pool
        return
    if arguments.assistant_model is not None:
        options["assistant_model"] = Generator.from_pretrained(arguments.assistant_model, **loading)
    yield Generator.from_pretrained(names, **loading)


def main(words: Sequence[str]) -> None:
    arguments, _ = parse("generate", words)
    for name in ("chunk_size", "num_processes"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"`{name}` must be at least 1, got {getattr(arguments, name)}.")
    needs = {"mbr_references": "mbr_candidates", "mbr_utility": "mbr_candidates", "resume": "output"}
    check_dependents(arguments, num_assistant_tokens="assistant_model", ensemble_mean="ensemble", **needs)
    models = [*chosen_models(arguments), *filter(None, [arguments.assistant_model])]
    glossary = {} if arguments.glossary is None else {"glossary": arguments.glossary}
    check_files({"input": arguments.input} | glossary, arguments.output, models=models)
    if arguments.resume:
        check_regular(arguments.output)
    options = chosen_generation_options(arguments)
    options |= given_options(arguments, ("must_contain", "never_contain", "num_assistant_tokens"))
    n_best = arguments.n_best or options.get("num_return_sequences", 1) > 1
    if not n_best and arguments.mbr_candidates is None:
        # Override the model's own setting: one line out for each line in.
        options.setdefault("num_return_sequences", 1)
    set_seed(arguments.seed)
    if arguments.input is None and sys.stdin is not None and sys.stdin.isatty():
        logger.info("Reading sources from the terminal. Ctrl-D ends them. To read a file, set --input.")
    needs_texts = arguments.format != "text" or arguments.keep or arguments.glossary is not None
    if needs_texts:
        check_whole_texts(arguments, n_best)
    with load(arguments, options) as generator:
        if needs_texts:
            write_texts(generator, arguments, options)
        else:
            write(generator, arguments, options, n_best)


def check_whole_texts(arguments: argparse.Namespace, n_best: bool) -> None:
    """Raise `ValueError` for options that do not go together with markup and terms."""
    refused = {"ensemble": arguments.ensemble, "n_best": n_best, "mbr_candidates": arguments.mbr_candidates}
    refused |= {"resume": arguments.resume, "num_processes": arguments.num_processes > 1}
    refused["engine"] = arguments.engine == "ctranslate2"
    if names := [name for name, value in refused.items() if value]:
        raise ValueError(
            f"`{names[0]}` must be left out with --format, --keep and --glossary, which need one torch model."
        )


def write_texts(generator: Generator, arguments: argparse.Namespace, options: dict) -> None:
    """Decode a page, or lines with terms, into the output, and log counts."""
    glossary = None if arguments.glossary is None else read_glossary(arguments.glossary)
    is_page = arguments.format != "text"
    split_sentences = arguments.split_sentences or is_page
    decoder = TextDecoder(
        generator,
        text_format=arguments.format,
        split_sentences=split_sentences,
        terms=Terms(arguments.keep, glossary),
    )
    lines = read_lines(arguments.input, arguments.max_line_characters)
    if is_page:
        lines = iter(["\n".join(lines)])
    with open_output(arguments.output) as output:
        for chunk in read_chunks(lines, arguments.chunk_size):
            for text in decoder.decode(chunk.texts, **options):
                output.write(text + "\n")
        output.finish()
    warn_of_lengths(generator, decoder.counts["num_sentences"])
    report_texts(decoder)


def report_texts(decoder: TextDecoder) -> None:
    """Log the counts of a decoder of whole texts."""
    counts = decoder.counts
    logger.info("Sentences: %d.", counts["num_sentences"])
    for name, text in (
        ("num_cut", "Sentences that were too long and were cut between clauses: %d."),
        ("num_forced", "Sentences decoded again, so that they contain their terms: %d."),
        ("num_placed", "In %d places the model left out a term, which attention put in. Check the sentences below."),
        ("num_loops", "Sentences that repeated themselves and were decoded again: %d."),
        ("num_looping", "Of these still repeat themselves: %d."),
    ):
        if counts[name]:
            logger.warning(text, counts[name])
    for sentence in decoder.placed[:MAX_SHOWN]:
        logger.warning("  %s", sentence)


def write(generator: Generator | GeneratorPool, arguments: argparse.Namespace, options: dict, n_best: bool) -> None:
    """Decode the input into the output, and log counts and speed."""
    risk, num_targets = None, 1
    if arguments.mbr_candidates is None:
        num_targets = generator.num_targets(**options)
    else:
        risk = {"num_candidates": arguments.mbr_candidates, "num_references": arguments.mbr_references}
        risk["utility"] = arguments.mbr_utility or "chrf"
    if arguments.resume:
        layout = {"num_targets": num_targets, "with_scores": n_best, "chunk_size": arguments.chunk_size}
        opened = ResumedFile(arguments.output, **layout)
    else:
        opened = open_output(arguments.output)
    count, started = 0, time.perf_counter()
    with opened as output:
        first = output.first_source
        if first:
            logger.info("Resuming %s at line %d.", arguments.output, first + 1)
        results = generator.generate_stream(
            itertools.islice(read_lines(arguments.input, arguments.max_line_characters), first, None),
            risk=risk,
            show_progress=not arguments.quiet,
            chunk_size=arguments.chunk_size,
            first_chunk=first // arguments.chunk_size,
            total=num_lines(arguments.input),
            return_scores=n_best,
            split_sentences=arguments.split_sentences,
            seed=arguments.seed,
            **options,
        )
        try:
            for index, candidates in enumerate(results, start=first):
                output.write(format_targets(index, candidates, n_best))
                count += 1
        except KeyboardInterrupt:
            if arguments.output is None or not first + count:
                raise
            hint = f"{arguments.output} ends with source {first + count}. Use --resume to go on."
            raise KeyboardInterrupt(hint) from None
        output.finish()
    seconds = time.perf_counter() - started
    logger.info("%d lines in %.1f seconds, %.1f lines per second.", count, seconds, count / seconds)
    warn_of_lengths(generator, count)
    if generator.num_drafted:
        share = generator.num_accepted / generator.num_drafted
        logger.info("Of %d drafted tokens %.1f %% were accepted.", generator.num_drafted, 100 * share)
