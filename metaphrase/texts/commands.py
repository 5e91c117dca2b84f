"""Parts of `metaphrase generate`: whole texts, pages and files, and generation by way of a third language."""

import argparse
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from metaphrase.inference.generator import Generator, ScoredText, TextStream, read_chunks
from metaphrase.inference.line_files import OutputFile, read_lines
from metaphrase.storage.folders import file_in_one_step
from metaphrase.texts.plan import Terms, read_glossary
from metaphrase.texts.whole_texts import TextDecoder, read_file

logger = logging.getLogger(__name__)

MAX_SHOWN = 10


class PivotGenerator(TextStream):
    """Two generators, of which the second one reads the targets of the first: German to English, then English to French."""

    def __init__(self, first: Generator, second: Generator):
        self.generators = [first, second]

    def num_targets(self, **options) -> int:
        """Return the number of candidates of a source with these options."""
        return self.generators[1].num_targets(**options)

    def generate_stream(
        self, lines: Iterable[str], *, split_sentences: bool | str = False, chunk_size: int, **options
    ) -> Iterator[list[ScoredText]]:
        """Yield the candidates of the second generator, as `Generator.generate_stream` does."""
        first, second = self.generators
        shown = {**options, "return_scores": False, "risk": None, "show_progress": False}
        rows = first.generate_stream(
            lines, split_sentences=split_sentences, chunk_size=chunk_size, **options_of_first(shown)
        )
        # A language of `split_sentences` is that of the input.
        sources, is_split = (row[0].text for row in rows), bool(split_sentences)
        return second.generate_stream(sources, split_sentences=is_split, chunk_size=chunk_size, **options)

    def log_counts(self, num_sources: int) -> None:
        for generator in self.generators:
            generator.log_counts(num_sources)


def load_pivot(arguments: argparse.Namespace, loading: dict[str, Any]) -> PivotGenerator:
    """Load the models of `--pivot`. Raises `ValueError` if other options do not fit."""
    names = ("ensemble", "assistant_model", "glossary", "source_lang", "target_lang", "source_prefix")
    refused = {name: getattr(arguments, name) for name in names} | {"num_processes": arguments.num_processes > 1}
    if names := [name for name, value in refused.items() if value]:
        raise ValueError(
            f"`{names[0]}` must be left out with `pivot`, which has two models for a pair of languages each."
        )
    return PivotGenerator(*(Generator.from_pretrained([n], **loading) for n in (arguments.model, arguments.pivot)))


def options_of_first(options: dict) -> dict:
    """Return the generation options of a model whose targets another one reads: one for each source, in another language."""
    refused = ("must_contain", "never_contain")
    return {name: value for name, value in options.items() if name not in refused} | {"num_return_sequences": 1}


def generate_whole_texts(
    arguments: argparse.Namespace, options: dict, load: Callable[..., AbstractContextManager]
) -> None:
    """Write the target of a page, of a file of a known format, or of lines with terms, into the output, and log counts."""
    _check_options(arguments, options)
    terms = Terms(arguments.keep, None if arguments.glossary is None else read_glossary(arguments.glossary))
    file = None if arguments.file is None else read_file(Path(arguments.file))
    is_page = arguments.format != "text"
    lines = read_lines(arguments.input, arguments.max_line_characters) if file is None else file.texts
    if is_page:
        lines = iter(["\n".join(lines)])
    split_sentences = arguments.split_sentences or is_page or file is not None
    with load(arguments, options) as generator:
        # A language of `--split_sentences` is that of the input.
        decoders = [
            TextDecoder(
                part,
                text_format=arguments.format if file is None else "xml",
                split_sentences=split_sentences if number == 0 else bool(split_sentences),
                terms=terms,
                has_lines=file is not None,
            )
            for number, part in enumerate(getattr(generator, "generators", [generator]))
        ]

        def generate(texts: list[str]) -> list[str]:
            for decoder in decoders[:-1]:
                texts = decoder.decode(texts, **options_of_first(options))
            return decoders[-1].decode(texts, **options)

        targets = (target for chunk in read_chunks(lines, arguments.chunk_size) for target in generate(chunk.texts))
        if file is not None:
            targets = list(targets)
            with file_in_one_step(Path(arguments.output)) as path:
                file.write(targets, path)
        else:
            with OutputFile(arguments.output) as output:
                for target in targets:
                    output.write(target + "\n")
                output.finish()
    for decoder in decoders:
        decoder.generator.log_counts(decoder.counts["num_sentences"])
    counts = sum((decoder.counts for decoder in decoders), Counter())
    logger.info("Sentences: %d.", counts["num_sentences"])
    for name, text in (
        ("num_cut", "Sentences that were too long and were cut between clauses: %d."),
        ("num_forced", "Sentences generated again, so that they contain their terms: %d."),
        ("num_placed", "In %d places the model left out a term, which attention put in. Check the sentences below."),
    ):
        if counts[name]:
            logger.warning(text, counts[name])
    for sentence in [sentence for decoder in decoders for sentence in decoder.placed][:MAX_SHOWN]:
        logger.warning("  %s", sentence)


def _check_options(arguments: argparse.Namespace, options: dict) -> None:
    """Raise `ValueError` if options do not fit with whole texts or with `--file`."""
    refused = {name: getattr(arguments, name) for name in ("ensemble", "mbr_candidates", "resume", "shard", "n_best")}
    refused["num_return_sequences"] = options.get("num_return_sequences", 1) > 1
    refused |= {"num_processes": arguments.num_processes > 1, "engine": arguments.engine == "ctranslate2"}
    if names := [name for name, value in refused.items() if value]:
        raise ValueError(f"--format, --file, --keep and --glossary need one torch model. Leave out `{names[0]}`.")
    if arguments.file is None:
        return
    suffix, output = Path(arguments.file).suffix, arguments.output
    if arguments.input is not None or arguments.format != "text":
        raise ValueError("`input` and `format` must be left out with `file`, whose suffix tells the format.")
    if output is None or Path(output).suffix.lower() != suffix.lower():
        raise ValueError(f"`output` must be a file that ends in {suffix} as `file` does, got {output!r}.")
