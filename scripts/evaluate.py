"""`metaphrase evaluate MODEL --source F --target F`: scores a model on a test set and writes metrics.json."""

import sys

if __name__ == "__main__" and not __package__:  # Run as a file: its folder must not hide `evaluate` or `tokenize`.
    sys.path.pop(0)

import argparse
import contextlib
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from datasets import Dataset
from transformers import set_seed

from metaphrase.inference import ENGINES, Generator
from metaphrase.inference.generation_options import add_generation_options, chosen_generation_options
from metaphrase.inference.input_lines import check_files
from metaphrase.inference.loading_options import add_loading_options, chosen_loading_options, chosen_models
from metaphrase.inference.output_file import NewFile, OutputStream, as_lines
from metaphrase.scripts.console import check_dependents, run, warn_of_lengths
from metaphrase.tokenization import join_pieces
from metaphrase.training.data_report import DataReport
from metaphrase.training.evaluation import evaluate_generator
from metaphrase.training.metrics import DEFAULT_METRICS, METRICS, check_metrics, check_place, is_folder, write_metrics
from metaphrase.training.pairs import load_pairs

logger = logging.getLogger(__name__)

# Options that mean nothing without another one.
NEEDS = {"source_column": "file", "target_column": "file"}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="metaphrase evaluate",
        description="Decodes a test set, scores it, and writes metrics.json with the signature of every score.",
        allow_abbrev=False,
    )
    add_loading_options(parser)
    parser.add_argument("--source", metavar="FILE", help="sources, one a line")
    parser.add_argument("--target", metavar="FILE", help="references, one a line")
    parser.add_argument("--file", metavar="FILE", help="both in one .tsv, .csv, .jsonl or .parquet file")
    parser.add_argument(
        "--source_column", type=column, help="its column of sources: a name, or a number from 0 in a .tsv file"
    )
    parser.add_argument("--target_column", type=column, help="its column of references, likewise")
    for name, words in (("malformed", "lines that hold no pair"), ("invalid_utf8", "pairs that are not UTF-8")):
        choices = ("error", "skip")
        parser.add_argument(
            f"--{name}", choices=choices, default="error", help=f"what becomes of {words} [%(default)s]"
        )
    parser.add_argument(
        "--metrics", nargs="+", default=list(DEFAULT_METRICS), help=f"of {', '.join(METRICS)} [bleu chrf]"
    )
    parser.add_argument("--bleu_tokenize", help="sacreBLEU's tokenizer [13a]; none for text that is tokenized already")
    parser.add_argument("--lowercase", action="store_true", help="score without regard to case, as sacreBLEU's -lc")
    parser.add_argument(
        "--joiner", help="join references that are split into subwords, such as @@ [as the tokenizer does]"
    )
    parser.add_argument("--source_prefix", help="stands before every source, such as 'summarize: '")
    parser.add_argument("--seed", type=int, default=42, help="of sampling [%(default)s]")
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="where to write [metrics.json: in the model's folder, or here, as for an ensemble, another engine or type, or "
        "sources that are cut]",
    )
    parser.add_argument("--predictions", metavar="FILE", help="where to write the decoded targets, one a line")
    add_generation_options(parser)
    return parser


def column(word: str) -> str | int:
    """A column as a recipe has it: a number where the word is one, otherwise a name."""
    return int(word) if word.isascii() and word.isdecimal() else word


def metric_options(arguments: argparse.Namespace) -> dict[str, dict]:
    """For each score its options.

    Raises:
        ValueError: If an option is given that none of the scores has.
    """
    options: dict[str, dict] = {}
    if arguments.bleu_tokenize is not None:
        if "bleu" not in arguments.metrics:
            raise ValueError(
                f"`metrics` must hold bleu with `bleu_tokenize`, got {arguments.metrics} and {arguments.bleu_tokenize!r}."
            )
        options["bleu"] = {"tokenize": arguments.bleu_tokenize}
    if arguments.lowercase:
        folding = {"lowercase", "ignore_case"}
        known = {name: folding.intersection(METRICS[name]().option_names()) for name in arguments.metrics}
        if not any(known.values()):
            raise ValueError(
                f"`metrics` must hold a score that regards case with `lowercase`, got {arguments.metrics}."
            )
        for name, keys in known.items():
            options.setdefault(name, {}).update(dict.fromkeys(keys, True))
    return {name: values for name, values in options.items() if values}


def default_output(arguments: argparse.Namespace) -> Path:
    """The model's folder, whose scores its model card shows; for what is not the model as it is saved, a file here."""
    is_as_saved = arguments.engine == ENGINES[0] and arguments.dtype == "auto" and arguments.ensemble is None
    is_as_saved = is_as_saved and arguments.max_source_length is None
    folder = Path(arguments.model)
    return folder if is_as_saved and folder.is_dir() else Path("metrics.json")


def check_outputs(arguments: argparse.Namespace, place: Path) -> None:
    """Checks before any work that nothing is written over what is read, nor two things to one place.

    Args:
        arguments: Of the command line.
        place: Where metrics.json goes.

    Raises:
        ValueError: If two files are one.
        OSError: If an input cannot be read.
    """
    for name in ("source", "target", "file"):
        for output_name, path in (("output", place), ("predictions", arguments.predictions)):
            check_files(getattr(arguments, name), path, name, output_name)
    # Neither of them needs to be there yet.
    if arguments.predictions is not None and Path(arguments.predictions).resolve() == place.resolve():
        raise ValueError(f"`predictions` must be another file than `output`, got {str(place)!r} for both.")


def open_predictions(path: str | None) -> AbstractContextManager[OutputStream | None]:
    """The file of the decoded targets, opened before the work whose result it shall hold; what is there stays until then.

    Raises:
        ValueError: If the place of the file is taken by a folder.
    """
    if path is None:
        return contextlib.nullcontext()
    if is_folder(path):
        raise ValueError(f"`predictions` must be a file, got the folder {path}.")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    return NewFile(path)


def read_pairs(arguments: argparse.Namespace, report: DataReport) -> Dataset:
    """The test pairs. An empty side is a legitimate test case: such pairs are never dropped here."""
    return load_pairs(
        file=arguments.file,
        source_file=arguments.source,
        target_file=arguments.target,
        source_column=arguments.source_column,
        target_column=arguments.target_column,
        source_prefix=arguments.source_prefix,
        malformed=arguments.malformed,
        invalid_utf8=arguments.invalid_utf8,
        report=report,
    )


def describe(arguments: argparse.Namespace, report: DataReport) -> dict[str, dict]:
    """What `metrics.json` says of the data and of what decoded it."""
    data = {"name": Path(arguments.source or arguments.file).name}
    # A score of fewer pairs than the file holds says so.
    data |= {name: getattr(report, name) for name in ("malformed", "invalid_utf8") if getattr(report, name)}
    inference = {
        "engine": arguments.engine,
        "dtype": arguments.dtype,
        "models": 1 + len(arguments.ensemble or []),
    }
    if arguments.max_source_length is not None:
        inference["max_source_length"] = arguments.max_source_length
    return {"data": data, "inference": inference}


def evaluate(
    generator: Generator,
    pairs: Dataset,
    arguments: argparse.Namespace,
    on_decoded: Callable[[list[str]], object] | None,
) -> dict:
    """Decodes the pairs' sources and scores what comes of them (see `evaluate_generator`)."""
    targets, references = list(pairs["target"]), None
    if arguments.joiner is not None:
        references = [join_pieces(text, arguments.joiner) for text in targets]
        if generator.tokenizers.target_joiner is None:
            # The model learned whole words, which are split in this file alone.
            targets = references
    result, _ = evaluate_generator(
        generator,
        list(pairs["source"]),
        targets,
        references=references,
        metrics=arguments.metrics,
        metric_options=metric_options(arguments),
        generation_options=chosen_generation_options(arguments),
        on_decoded=on_decoded,
    )
    return result


def main(words: Sequence[str]) -> None:
    arguments = make_parser().parse_args(words)
    check_dependents(arguments, NEEDS)
    check_metrics(arguments.metrics, arguments.bleu_tokenize)
    metric_options(arguments)
    place = check_place(arguments.output or default_output(arguments))
    check_outputs(arguments, place)
    report = DataReport()
    pairs = read_pairs(arguments, report)
    with open_predictions(arguments.predictions) as file:
        set_seed(arguments.seed)
        generator = Generator.from_pretrained(chosen_models(arguments), **chosen_loading_options(arguments))
        # At once: a mistake in what follows must not cost what took the longest.
        keep = None if file is None else lambda texts: file.write(as_lines(texts))
        result = evaluate(generator, pairs, arguments, keep) | describe(arguments, report)
    write_metrics(place, result)
    for name, score in result["scores"].items():
        logger.info("%s: %.2f  %s", name, score["score"], score["signature"])
    warn_of_lengths(generator, len(pairs))
    figures = [f"{name}: {result[name]:.4f}" for name in ("loss", "perplexity") if result.get(name) is not None]
    if figures:
        logger.info("%s", "  ".join(figures))
    logger.info("Written to %s", place)


if __name__ == "__main__":
    sys.exit(run(main, "evaluate"))
