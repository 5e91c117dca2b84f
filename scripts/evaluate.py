"""`metaphrase evaluate MODEL --source F --target F`: scores a model on a test set and writes metrics.json."""

import sys

if __name__ == "__main__" and not __package__:  # Run as a file: its folder must not hide `evaluate` or `tokenize`.
    sys.path.pop(0)

import argparse
import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from datasets import Dataset
from transformers import set_seed

from metaphrase.data.pairs import column_texts, load_pairs
from metaphrase.data.reports import DataReport
from metaphrase.decoding.options import add_generation_options, chosen_generation_options
from metaphrase.evaluation.evaluate import evaluate_generator, generation_settings
from metaphrase.evaluation.metrics import (
    DEFAULT_METRICS,
    METRICS,
    check_metrics,
    check_writable,
    is_folder,
    metrics_path,
    to_json,
    write_metrics,
)
from metaphrase.inference import ENGINES, Generator
from metaphrase.inference.line_files import NewFile, OutputStream, as_lines, check_files
from metaphrase.inference.source_limits import check_source_length
from metaphrase.scripts.console import check_dependents, run, warn_of_lengths
from metaphrase.scripts.options import add_loading_options, chosen_loading_options, chosen_models
from metaphrase.tokenization import join_pieces

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
        help="where to write, in place of what is there; a folder is for metrics.json in it [metrics.json: in the model's "
        "folder, unless that holds the scores of the training run, of other pairs or of other settings; then here, and so for "
        "an ensemble, another engine or type, or sources that are cut]",
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


def own_scores(arguments: argparse.Namespace) -> Path | None:
    """The metrics.json that the model's card shows; `None` for what is not the model as it is saved in a folder."""
    is_as_saved = arguments.engine == ENGINES[0] and arguments.dtype == "auto" and arguments.ensemble is None
    is_as_saved = is_as_saved and arguments.max_source_length is None
    return metrics_path(arguments.model) if is_as_saved and Path(arguments.model).is_dir() else None


def holds_others(path: Path, measured: dict[str, dict]) -> bool:
    """Whether a file holds other scores than those of such data and settings, such as those of the training run."""
    if not path.is_file():
        return False
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return True
    return not isinstance(earlier, dict) or any(earlier.get(name) != value for name, value in measured.items())


def choose_place(arguments: argparse.Namespace, measured: dict[str, dict]) -> Path:
    """Where metrics.json goes: as the command line says, else to the model, else to this folder. It can be written there.

    Args:
        arguments: Of the command line.
        measured: What the scores are of, as far as it is known: earlier ones of the same are replaced, no others.

    Raises:
        ValueError: If it cannot be written there, or is to be nowhere but in a model's folder that it does not belong to.
        OSError: If an input cannot be read.
    """
    place, own = arguments.output, own_scores(arguments)
    if place is None and own is not None and not holds_others(own, measured):
        place = own
    if place is None and Path("config.json").exists():
        raise ValueError(
            "`output` must be given in a model's folder for scores that are not to be those of its card, got None: in "
            f"{Path.cwd()} metrics.json would be these."
        )
    place = check_writable("metrics.json" if place is None else place)
    check_outputs(arguments, place)
    return place


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
    return NewFile(path, "predictions")


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


def describe(arguments: argparse.Namespace, pairs: Dataset, report: DataReport) -> dict[str, dict]:
    """What `metrics.json` says of the data and of what decodes it."""
    digest = hashlib.sha256()
    for pair in zip(column_texts(pairs, "source"), column_texts(pairs, "target"), strict=True):
        digest.update(json.dumps(pair).encode() + b"\n")
    # Many test sets have the same name, and as many pairs.
    data = {"name": Path(arguments.source or arguments.file).name, "sha256": digest.hexdigest()}
    # A score of fewer pairs than the file holds says so.
    data |= {name: getattr(report, name) for name in ("malformed", "invalid_utf8") if getattr(report, name)}
    inference = {
        "engine": arguments.engine,
        "dtype": arguments.dtype,
        "models": 1 + len(arguments.ensemble or []),
    }
    for name in ("max_source_length", "source_lang", "target_lang"):
        if getattr(arguments, name) is not None:
            inference[name] = getattr(arguments, name)
    return {"data": data, "inference": inference}


def evaluate(
    generator: Generator,
    pairs: Dataset,
    arguments: argparse.Namespace,
    on_decoded: Callable[[list[str]], object] | None,
) -> dict:
    """Decodes the pairs' sources and scores what comes of them (see `evaluate_generator`)."""
    targets, references = pairs["target"][:], None
    if arguments.joiner is not None:
        references = [join_pieces(text, arguments.joiner) for text in targets]
        if generator.tokenizers.target_joiner is None:
            # The model learned whole words, which are split in this file alone.
            targets = references
    result, _ = evaluate_generator(
        generator,
        pairs["source"][:],
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
    report = DataReport()
    pairs = read_pairs(arguments, report)
    measured = describe(arguments, pairs, report)
    choose_place(arguments, measured)
    with open_predictions(arguments.predictions) as file:
        set_seed(arguments.seed)
        generator = Generator.from_pretrained(chosen_models(arguments), **chosen_loading_options(arguments))
        if arguments.max_source_length is not None and arguments.source_prefix:
            # The prefix is part of the pairs here, of which the generator knows nothing.
            encode = generator.tokenizers.encode_sources
            check_source_length(arguments.max_source_length, encode, arguments.source_prefix)
        settings = generation_settings(generator.model, chosen_generation_options(arguments))
        # As they are written, so that they can be compared with what was, and what cannot be written is found now.
        place = choose_place(arguments, measured | json.loads(to_json({"generation": settings})))
        own = own_scores(arguments)
        if arguments.output is None and own not in (None, place):
            logger.warning(
                "%s is of the training run, or of other pairs or settings, and stays as it is: these scores go to %s. "
                "--output says where else.",
                own,
                place,
            )
        # At once: a mistake in what follows must not cost what took the longest.
        keep = None if file is None else lambda texts: file.write(as_lines(texts))
        result = evaluate(generator, pairs, arguments, keep) | measured
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
