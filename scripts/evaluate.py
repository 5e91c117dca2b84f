"""`metaphrase evaluate MODEL --source F --target F`: score a model on a test set and write metrics.json."""

import argparse
import contextlib
import hashlib
import json
import logging
from contextlib import AbstractContextManager
from pathlib import Path

from datasets import Dataset
from transformers import set_seed

from metaphrase.data.pairs import DataReport, column_texts, load_pairs
from metaphrase.evaluation.evaluate import evaluate_generator, generation_settings
from metaphrase.evaluation.metrics import (
    check_metrics,
    check_writable,
    is_folder,
    metric_options,
    metrics_path,
    to_json,
    write_metrics,
)
from metaphrase.hub_card.card import with_interval
from metaphrase.inference import Generator
from metaphrase.inference.generator import check_source_length
from metaphrase.inference.line_files import NewFile, OutputStream, as_lines, check_files
from metaphrase.scripts.generate import warn_of_lengths
from metaphrase.scripts.parsers import (
    check_dependents,
    chosen_generation_options,
    chosen_loading_options,
    chosen_models,
    given_options,
)
from metaphrase.tokenization import join_pieces

logger = logging.getLogger(__name__)


def path_beside_model(arguments: argparse.Namespace) -> Path | None:
    """Return the metrics.json that the model's card shows; `None` unless a single saved model is decoded as it is."""
    is_as_saved = arguments.engine == "torch" and arguments.dtype == "auto" and arguments.ensemble is None
    is_as_saved = is_as_saved and arguments.max_source_length is None and not arguments.use_vmap
    return metrics_path(arguments.model) if is_as_saved and Path(arguments.model).is_dir() else None


def holds_other_scores(path: Path, measured: dict[str, dict]) -> bool:
    """Return True if a file holds scores of other data or settings, such as those of training."""
    if not path.is_file():
        return False
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return True
    return not isinstance(earlier, dict) or any(earlier.get(name) != value for name, value in measured.items())


def choose_output(arguments: argparse.Namespace, measured: dict[str, dict]) -> Path:
    """Return the path of metrics.json: that of the command line, else beside the model, else in this folder.

    Args:
        arguments: Parsed command line.
        measured: Data and settings of the scores. Only scores of the same data and settings are replaced beside the model.

    Raises:
        ValueError: If the file cannot be written, equals another file, or would become the scores of another model.
        OSError: If an input cannot be read.
    """
    output, beside_model = arguments.output, path_beside_model(arguments)
    if output is None and beside_model is not None and not holds_other_scores(beside_model, measured):
        output = beside_model
    if output is None and Path("config.json").exists():
        raise ValueError(
            f"`output` must be given in a model's folder, got None: metrics.json in {Path.cwd()} would become the scores of "
            "its card."
        )
    output = check_writable("metrics.json" if output is None else output)
    inputs = given_options(arguments, ("source", "target", "file"))
    for name, path in given_options(arguments, ("output", "predictions")).items() | {("output", output)}:
        check_files(inputs, path, name)
    # Compares names, because neither file need exist.
    if arguments.predictions is not None and Path(arguments.predictions).resolve() == output.resolve():
        raise ValueError(f"`predictions` must be another file than `output`, got {str(output)!r} for both.")
    return output


def open_predictions(path: str | None) -> AbstractContextManager[OutputStream | None]:
    """Open the file of the decoded targets. An existing file keeps its content until the first write.

    Raises:
        ValueError: If the path is a folder.
    """
    if path is None:
        return contextlib.nullcontext()
    if is_folder(path):
        raise ValueError(f"`predictions` must be a file, got the folder {path}.")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    return NewFile(path, "predictions")


def describe(arguments: argparse.Namespace, pairs: Dataset, report: DataReport) -> dict[str, dict]:
    """Return the entries of `metrics.json` on data and model."""
    digest = hashlib.sha256()
    for pair in zip(column_texts(pairs, "source"), column_texts(pairs, "target"), strict=True):
        digest.update(json.dumps(pair).encode() + b"\n")
    # The hash tells test sets of one name and size apart.
    data = {"name": Path(arguments.source or arguments.file).name, "sha256": digest.hexdigest()}
    # Numbers of skipped pairs.
    data |= {name: getattr(report, name) for name in ("malformed", "invalid_utf8") if getattr(report, name)}
    inference = {"engine": arguments.engine, "dtype": arguments.dtype, "models": len(chosen_models(arguments))}
    inference |= given_options(arguments, ("max_source_length", "source_lang", "target_lang"))
    if arguments.use_vmap:
        inference["use_vmap"] = True
    return {"data": data, "inference": inference}


def main(arguments: argparse.Namespace) -> None:
    check_dependents(arguments, source_column="file", target_column="file")
    check_metrics(arguments.metrics, arguments.bleu_tokenize)
    score_options = metric_options(arguments.metrics, arguments.bleu_tokenize, arguments.lowercase)
    generation_options = chosen_generation_options(arguments)
    report = DataReport()
    names = (
        "file",
        "source_column",
        "target_column",
        "source_prefix",
        "malformed",
        "invalid_utf8",
        "max_line_characters",
    )
    files = {"source_file": arguments.source, "target_file": arguments.target}
    # Pairs with an empty side stay: they are legitimate test cases.
    pairs = load_pairs(**files, **given_options(arguments, names), report=report)
    measured = describe(arguments, pairs, report)
    choose_output(arguments, measured)
    with open_predictions(arguments.predictions) as file:
        set_seed(arguments.seed)
        # `load_pairs` has added the prefix.
        loading = chosen_loading_options(arguments) | {"source_prefix": ""}
        generator = Generator.from_pretrained(chosen_models(arguments), **loading)
        if arguments.max_source_length is not None and arguments.source_prefix:
            encode = generator.tokenizers.encode_sources
            check_source_length(arguments.max_source_length, encode, arguments.source_prefix)
        settings = generation_settings(generator, generation_options)
        # In their JSON form, for the comparison with earlier scores.
        output = choose_output(arguments, measured | json.loads(to_json({"generation": settings})))
        beside_model = path_beside_model(arguments)
        if arguments.output is None and beside_model not in (None, output):
            logger.warning(
                "%s has scores of the training run, or of other pairs or settings, and is kept. These scores go to %s. Set "
                "--output for another file.",
                beside_model,
                output,
            )
        targets, references = pairs["target"][:], None
        if arguments.joiner is not None:
            references = [join_pieces(text, arguments.joiner) for text in targets]
            if generator.tokenizers.target_joiner is None:
                # The model writes whole words. Only this file splits them.
                targets = references
        result, _ = evaluate_generator(
            generator,
            pairs["source"][:],
            targets,
            references=references,
            metrics=arguments.metrics,
            metric_options=score_options,
            generation_options=generation_options,
            num_bootstrap_samples=arguments.confidence_n,
            show_progress=not arguments.quiet,
            # Written before scoring, because decoding takes the longest.
            on_decoded=None if file is None else lambda texts: file.write(as_lines(texts)),
        )
    result |= measured
    write_metrics(output, result)
    for name, score in result["scores"].items():
        logger.info("%s: %s  %s", name, with_interval(score), score["signature"])
    warn_of_lengths(generator, len(pairs))
    figures = [f"{name}: {result[name]:.4f}" for name in ("loss", "perplexity") if result.get(name) is not None]
    if figures:
        logger.info("%s", "  ".join(figures))
    logger.info("Written to %s", output)
