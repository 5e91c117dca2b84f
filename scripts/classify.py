"""`metaphrase classify MODEL` and `metaphrase embed MODEL`: read texts, and write answers or embeddings."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from metaphrase.errors import MetaphraseError
from metaphrase.inference import Generator
from metaphrase.inference.generator import read_chunks
from metaphrase.inference.line_files import OutputFile, as_lines, check_files
from metaphrase.inference.progress import progress_bar
from metaphrase.scripts.parsers import chosen_loading_options
from metaphrase.storage.folders import file_in_one_step
from metaphrase.tokenization.texts import count_lines, iterate_lines

# Texts that are sorted and read together.
_CHUNK = 4096


def main(arguments: argparse.Namespace) -> None:
    check_files({"input": arguments.input}, arguments.output)
    generator = Generator.from_pretrained(arguments.model, engine="torch", **chosen_loading_options(arguments))
    with OutputFile(arguments.output) as output:
        for texts in _read(arguments):
            for row in generator.choice_scores(texts, arguments.choices):
                best = arguments.choices[row.argmax()]
                output.write("\t".join([as_lines([best])[:-1], *(f"{value:.6f}" for value in row)]) + "\n")
        output.finish()
        generator.log_counts(output.next_source)


def embed(arguments: argparse.Namespace) -> None:
    """Run `metaphrase embed MODEL ...`: write a matrix with one row for each line."""
    if not arguments.output.endswith(".npy"):
        raise MetaphraseError(f"`output` must end in .npy, numpy's format, got {arguments.output!r}.")
    check_files({"input": arguments.input}, arguments.output)
    total, done, matrix = count_lines(arguments.input), 0, None
    generator = Generator.from_pretrained(arguments.model, engine="torch", **chosen_loading_options(arguments))
    with file_in_one_step(Path(arguments.output)) as path:
        for texts in _read(arguments):
            rows = generator.embed(texts)
            if matrix is None:
                matrix = np.lib.format.open_memmap(path, "w+", np.float32, (total, rows.shape[1]))
            matrix[done : done + len(rows)] = rows
            done += len(rows)
        if matrix is None:
            raise MetaphraseError(f"`input` must have a line, got none in {arguments.input}.")
        matrix.flush()
        generator.log_counts(done)


def _read(arguments: argparse.Namespace) -> Iterator[list[str]]:
    """Yield the lines of the input in chunks, with progress."""
    lines = iterate_lines(arguments.input, arguments.max_line_characters)
    with progress_bar(count_lines(arguments.input), "line", not arguments.quiet) as bar:
        for chunk in read_chunks(lines, _CHUNK):
            yield chunk.texts
            bar.update(len(chunk.texts))
