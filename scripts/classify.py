"""`metaphrase classify MODEL`, `embed MODEL` and `rerank CANDIDATES`: read texts, and write answers, embeddings or choices."""

import argparse
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from metaphrase.analysis.judges import choose, compute_features, load_judge, read_candidates, tune
from metaphrase.errors import MetaphraseError
from metaphrase.inference import Generator
from metaphrase.inference.batches import numbering
from metaphrase.inference.generator import read_chunks
from metaphrase.inference.line_files import OutputFile, as_lines, check_files
from metaphrase.inference.progress import progress_bar
from metaphrase.scripts.parsers import chosen_loading_options, given_options
from metaphrase.storage.folders import file_in_one_step, json_text, read_json
from metaphrase.tokenization.texts import count_lines, iterate_lines

logger = logging.getLogger(__name__)

# Texts that are sorted and read together.
_CHUNK = 4096


def main(arguments: argparse.Namespace) -> None:
    check_files({"input": arguments.input}, arguments.output)
    generator = Generator.from_pretrained(arguments.model, engine="torch", **chosen_loading_options(arguments))
    with OutputFile(arguments.output) as output:
        for rows in _results(arguments, lambda texts: generator.choice_scores(texts, arguments.choices)):
            for row in rows:
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
        for rows in _results(arguments, generator.embed):
            if matrix is None:
                matrix = np.lib.format.open_memmap(path, "w+", np.float32, (total, rows.shape[1]))
            matrix[done : done + len(rows)] = rows
            done += len(rows)
        if matrix is None:
            raise MetaphraseError(f"`input` must have a line, got none in {arguments.input}.")
        matrix.flush()
        generator.log_counts(done)


def _results(arguments: argparse.Namespace, work: Callable[[list[str]], Any]) -> Iterator[Any]:
    """Yield the results of a work for chunks of the lines of the input, with progress."""
    lines = iterate_lines(arguments.input, arguments.max_line_characters)
    with progress_bar(count_lines(arguments.input), "line", not arguments.quiet) as bar:
        for chunk in read_chunks(lines, _CHUNK):
            with numbering(range(chunk.first + 1, chunk.first + 1 + len(chunk.texts))):
                result = work(chunk.texts)
            yield result
            bar.update(len(chunk.texts))


def rerank(arguments: argparse.Namespace) -> None:
    """Run `metaphrase rerank CANDIDATES`: choose the best of several candidates, or tune the weights of their scores."""
    check_files(given_options(arguments, ("candidates", "source", "target")), arguments.output or arguments.weights)

    def read(path: str) -> list[str]:
        return [*iterate_lines(path, arguments.max_line_characters)]

    sources = read(arguments.source)
    lines = iterate_lines(arguments.candidates, arguments.max_line_characters)
    indices, texts, scores = read_candidates(lines, arguments.candidates)
    if len(sources) != indices[-1] + 1:
        raise MetaphraseError(
            f"`source` must have a line for each source of the candidates, {indices[-1] + 1}, got {len(sources)}."
        )
    loading = given_options(arguments, ("device", "batch_size", "max_tokens_per_batch"))
    reverse = arguments.reverse_model and Generator.from_pretrained(arguments.reverse_model, engine="torch", **loading)
    judges = [load_judge(name, False if arguments.quiet else None, **loading) for name in arguments.metric]
    more = {f"scores_{n}": np.array([*map(float, read(path))]) for n, path in enumerate(arguments.scores, start=1)}
    for name, values in more.items():
        if len(values) != len(texts):
            raise MetaphraseError(f"`scores` must have {len(texts)} lines, as candidates, got {len(values)} in {name}.")
    references = [] if arguments.target is None else read(arguments.target)
    if arguments.target is not None and len(references) != len(sources):
        raise MetaphraseError(f"`target` must have {len(sources)} lines, as `source`, got {len(references)}.")
    features = compute_features(sources, indices, texts, scores, reverse, judges, more, not arguments.quiet)
    if arguments.target is not None:
        weights, best, first = tune(features, indices, texts, references, arguments.tuned_metric)
        logger.info("%s %.2f, and %.2f without other scores", arguments.tuned_metric, best, first)
        with file_in_one_step(Path(arguments.weights)) as path:
            path.write_text(json_text(weights), encoding="utf-8")
        print(json.dumps(weights))
        return
    weights = read_json(Path(arguments.weights))
    if unknown := weights.keys() ^ features.keys():
        raise MetaphraseError(f"`weights` must have the scores of this command, {[*features]}, got {min(unknown)!r}.")
    with OutputFile(arguments.output) as output:
        for row in choose(features, weights, indices):
            output.write(as_lines([texts[row]]))
        output.finish()
