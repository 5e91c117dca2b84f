"""`metaphrase generate MODEL`: write one target line for each source line, in the same order."""

import argparse
import contextlib
import itertools
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from transformers import set_seed

from metaphrase.inference import Generator, GeneratorPool
from metaphrase.inference.generator import ScoredText, read_chunks
from metaphrase.inference.line_files import (
    OutputFile,
    check_files,
    check_regular,
    format_targets,
    num_lines,
    read_lines,
)
from metaphrase.scripts.parsers import (
    check_dependents,
    chosen_generation_options,
    chosen_loading_options,
    chosen_models,
    given_options,
)
from metaphrase.storage.folders import file_in_one_step
from metaphrase.texts.plan import Terms, read_glossary
from metaphrase.texts.whole_texts import TextDecoder, read_file
from metaphrase.tokenization.texts import shard_range

logger = logging.getLogger(__name__)

MAX_SHOWN = 10


def main(arguments: argparse.Namespace) -> None:
    needs = {"mbr_references": "mbr_candidates", "mbr_utility": "mbr_candidates"}
    check_dependents(arguments, num_assistant_tokens="assistant_model", **needs)
    options = prepare(arguments, {"input": arguments.input} | given_options(arguments, ("glossary", "file")))
    options |= given_options(arguments, ("must_contain", "never_contain", "num_assistant_tokens", "end_loops"))
    n_best = arguments.n_best or options.get("num_return_sequences", 1) > 1
    if arguments.file is not None:
        check_file_options(arguments)
    if arguments.pivot is not None:
        check_pivot_options(arguments)
    if arguments.format != "text" or arguments.keep or arguments.glossary is not None or arguments.file is not None:
        names = ("ensemble", "mbr_candidates", "resume", "shard")
        refused = {name: getattr(arguments, name) for name in names}
        refused |= {"n_best": n_best, "num_processes": arguments.num_processes > 1}
        refused["engine"] = arguments.engine == "ctranslate2"
        if names := [name for name, value in refused.items() if value]:
            raise ValueError(f"--format, --file, --keep and --glossary need one torch model. Leave out `{names[0]}`.")
        write_texts(arguments, options)
        return
    risk = None
    if arguments.mbr_candidates is not None:
        risk = {"num_candidates": arguments.mbr_candidates, "num_references": arguments.mbr_references}
        risk["utility"] = arguments.mbr_utility or "chrf"
    elif not n_best:
        # Override the model's own setting: one line out for each line in.
        options.setdefault("num_return_sequences", 1)
    decode_records(
        arguments,
        options,
        line_records(arguments),
        num_lines(arguments.input),
        lambda index, record, candidates: format_targets(index, candidates, n_best),
        num_targets=1 if risk else None,
        risk=risk,
        with_scores=n_best,
    )


def prepare(arguments: argparse.Namespace, inputs: dict[str, str | None]) -> dict:
    """Check the options and files of a subcommand that decodes a stream, and set the seed. Return the generation options.

    `inputs` holds the files to read, by the names of their options.
    """
    if arguments.chunk_size < 1:
        raise ValueError(f"`chunk_size` must be at least 1, got {arguments.chunk_size}.")
    check_dependents(arguments, resume="output")
    check_files(inputs, arguments.output)
    if arguments.resume:
        check_regular(arguments.output)
    set_seed(arguments.seed)
    if arguments.input is None and "file" not in inputs and sys.stdin is not None and sys.stdin.isatty():
        logger.info("Reading sources from the terminal. Ctrl-D ends them. To read a file, set --input.")
    return chosen_generation_options(arguments)


def line_records(arguments: argparse.Namespace) -> Iterator[tuple[str]]:
    """Yield a record of one text for each line of the input."""
    return ((line,) for line in read_lines(arguments.input, arguments.max_line_characters))


@contextlib.contextmanager
def load(arguments: argparse.Namespace, options: dict) -> Iterator[Generator | GeneratorPool]:
    """Load a generator, an ensemble or a pool of processes. A draft model goes to the pool, or into `options`."""
    names, loading = chosen_models(arguments), chosen_loading_options(arguments)
    # Drafts take no part in an ensemble of teachers.
    assistant = getattr(arguments, "assistant_model", None)
    if arguments.num_processes > 1:
        loading |= {"num_processes": arguments.num_processes, "assistant_model": assistant}
        with GeneratorPool(names, **loading) as pool:
            yield pool
        return
    if assistant is not None:
        options["assistant_model"] = Generator.from_pretrained(assistant, **loading)
    yield Generator.from_pretrained(names, **loading)


@contextlib.contextmanager
def load_chain(arguments: argparse.Namespace, options: dict) -> Iterator[list[Generator | GeneratorPool]]:
    """Load the generator of the texts, and with `--pivot` the generator of its targets."""
    with load(arguments, options) as generator:
        if getattr(arguments, "pivot", None) is None:
            yield [generator]
        else:
            yield [generator, Generator.from_pretrained([arguments.pivot], **chosen_loading_options(arguments))]


def options_of_first(options: dict) -> dict:
    """Return the generation options of a model whose targets another one reads: one for each source, in another language."""
    refused = ("must_contain", "never_contain")
    return {name: value for name, value in options.items() if name not in refused} | {"num_return_sequences": 1}


def check_pivot_options(arguments: argparse.Namespace) -> None:
    """Raise `ValueError` if options do not fit with `--pivot`."""
    names = ("ensemble", "assistant_model", "glossary", "source_lang", "target_lang", "source_prefix")
    refused = {name: getattr(arguments, name) for name in names} | {"num_processes": arguments.num_processes > 1}
    if names := [name for name, value in refused.items() if value]:
        raise ValueError(
            f"`{names[0]}` must be left out with `pivot`, which has two models for a pair of languages each."
        )


def check_file_options(arguments: argparse.Namespace) -> None:
    """Raise `ValueError` if options do not fit with `--file`."""
    suffix, output = Path(arguments.file).suffix, arguments.output
    if arguments.input is not None or arguments.format != "text":
        raise ValueError("`input` and `format` must be left out with `file`, whose suffix tells the format.")
    if output is None or Path(output).suffix.lower() != suffix.lower():
        raise ValueError(f"`output` must be a file that ends in {suffix} as `file` does, got {output!r}.")


def write_texts(arguments: argparse.Namespace, options: dict) -> None:
    """Decode a page, a file of a known format, or lines with terms, into the output, and log counts."""
    terms = Terms(arguments.keep, None if arguments.glossary is None else read_glossary(arguments.glossary))
    file = None if arguments.file is None else read_file(Path(arguments.file))
    is_page = arguments.format != "text"
    lines = read_lines(arguments.input, arguments.max_line_characters) if file is None else file.texts
    if is_page:
        lines = iter(["\n".join(lines)])
    split_sentences = arguments.split_sentences or is_page or file is not None
    with load_chain(arguments, options) as generators:
        # A language of `--split_sentences` is that of the input.
        decoders = [
            TextDecoder(
                generator,
                text_format=arguments.format if file is None else "xml",
                split_sentences=split_sentences if generator is generators[0] else bool(split_sentences),
                terms=terms,
                has_lines=file is not None,
            )
            for generator in generators
        ]

        def decode(texts: list[str]) -> list[str]:
            for decoder in decoders[:-1]:
                texts = decoder.decode(texts, **options_of_first(options))
            return decoders[-1].decode(texts, **options)

        chunks = read_chunks(lines, arguments.chunk_size)
        targets = (target for chunk in chunks for target in decode(chunk.texts))
        if file is not None:
            targets = list(targets)
            with file_in_one_step(Path(arguments.output)) as path:
                file.write(targets, path)
        else:
            with OutputFile(arguments.output) as output:
                for target in targets:
                    output.write(target + "\n")
                output.finish()
    for generator, decoder in zip(generators, decoders, strict=True):
        warn_of_lengths(generator, decoder.counts["num_sentences"])
    counts = sum((decoder.counts for decoder in decoders), Counter())
    logger.info("Sentences: %d.", counts["num_sentences"])
    for name, text in (
        ("num_cut", "Sentences that were too long and were cut between clauses: %d."),
        ("num_forced", "Sentences decoded again, so that they contain their terms: %d."),
        ("num_placed", "In %d places the model left out a term, which attention put in. Check the sentences below."),
    ):
        if counts[name]:
            logger.warning(text, counts[name])
    for sentence in [sentence for decoder in decoders for sentence in decoder.placed][:MAX_SHOWN]:
        logger.warning("  %s", sentence)


def decode_records(
    arguments: argparse.Namespace,
    options: dict,
    records: Iterable[tuple],
    total: int | None,
    format_lines: Callable[[int, tuple, list[ScoredText]], str],
    *,
    num_targets: int | None = None,
    risk: dict | None = None,
    with_scores: bool = False,
) -> None:
    """Decode sources into the output, and log counts and speed.

    Args:
        arguments: Options of the subcommand: models, output, resume, shard, chunks.
        options: Generation options.
        records: Each a source and what belongs to it, such as a reference.
        total: Number of the records; `None` if it is unknown.
        format_lines: Returns the lines for the index of a source, its record and its candidates.
        num_targets: Lines for each source. By default, the options and the model decide.
        risk: As for `generate_stream`.
        with_scores: True if the lines are those of an n-best list with scores.
    """
    if total is None and arguments.shard is not None:
        raise ValueError("`input` must be a file with `shard`, got a pipe or standard input.")
    start, stop = 0, None
    if total is not None:
        part = shard_range(total, arguments.shard, arguments.chunk_size)
        start, stop = part.start, part.stop
    with contextlib.ExitStack() as stack:
        *firsts, generator = generators = stack.enter_context(load_chain(arguments, options))
        if num_targets is None:
            num_targets = generator.num_targets(**options)
        layout = {"num_targets": num_targets, "with_scores": with_scores, "chunk_size": arguments.chunk_size}
        output = stack.enter_context(OutputFile(arguments.output, resume=arguments.resume, **layout))
        first_source = output.next_source
        if first_source:
            logger.info("Resuming %s at line %d.", arguments.output, first_source + 1)
            warn_of_changed_input(arguments.input, arguments.output)
        started = time.perf_counter()
        records, decoded = itertools.tee(itertools.islice(records, start + first_source, stop))
        chunks = {"chunk_size": arguments.chunk_size, "seed": arguments.seed}
        chunks["first_chunk"] = (start + first_source) // arguments.chunk_size
        sources = (record[0] for record in records)
        # A language of `--split_sentences` is that of the input.
        split_sentences = arguments.split_sentences
        for first in firsts:
            splitting = {"split_sentences": split_sentences, "return_scores": False}
            rows = first.generate_stream(sources, **chunks, **splitting, **options_of_first(options))
            sources, split_sentences = (row[0].text for row in rows), bool(split_sentences)
        results = generator.generate_stream(
            sources,
            risk=risk,
            show_progress=not arguments.quiet,
            total=stop,
            return_scores=with_scores,
            split_sentences=split_sentences,
            **chunks,
            **options,
        )
        try:
            # A record is there as soon as its result is.
            for candidates, record in zip(results, decoded, strict=False):
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
        for decoded_by in generators:
            warn_of_lengths(decoded_by, count)
        if generator.num_drafted:
            share = generator.num_accepted / generator.num_drafted
            logger.info("Of %d drafted tokens %.1f %% were accepted.", generator.num_drafted, 100 * share)


def warn_of_changed_input(source: str | None, output: str) -> None:
    """Log that the input changed after the output, whose earlier lines stay as they are."""
    if source is not None and os.path.getmtime(source) > os.path.getmtime(output):
        logger.warning(
            "%s changed after the last line of %s was written. If lines changed that have their targets already, start again "
            "without --resume.",
            source,
            output,
        )


def warn_of_lengths(generator: Generator | GeneratorPool, num_sources: int) -> None:
    """Log the numbers of unfinished and of looping targets, and of truncated sources, if any."""
    if generator.num_unfinished:
        text = "Targets that are unfinished at the length limit: %d (sources: %d). Raise max_length or max_new_tokens."
        logger.warning(text, generator.num_unfinished, num_sources)
    if generator.num_loops:
        text = "Targets that repeated themselves and were decoded again: %d. Of these still repeat themselves: %d."
        logger.warning(text, generator.num_loops, generator.num_looping)
    if generator.num_truncated:
        text = "%d of %d sources had more than max_source_length tokens and were truncated."
        logger.warning(text, generator.num_truncated, num_sources)
    if generator.num_cut:
        logger.warning("%d sentences were too long and were cut between clauses.", generator.num_cut)
