"""`metaphrase evaluate MODEL --source F --target F`: score a model on a test set and write metrics.json."""

import argparse
import contextlib
import hashlib
import json
import logging
from pathlib import Path

from datasets import Dataset
from transformers import set_seed

from metaphrase.data.pairs import DataReport, column_texts, load_pairs
from metaphrase.errors import MetaphraseError
from metaphrase.evaluation.evaluate import evaluate_generator, generation_settings
from metaphrase.evaluation.metrics import DEFAULT_METRICS, metric_options, metrics_path, write_metrics
from metaphrase.hub_card.card import read_recipe, with_interval
from metaphrase.inference import Generator
from metaphrase.inference.generator import check_source_length
from metaphrase.inference.line_files import OutputFile, as_lines, check_files
from metaphrase.plugins import needed_plugin
from metaphrase.scripts import parsers
from metaphrase.scripts.generate import keep_memory
from metaphrase.scripts.parsers.options import COLUMNS
from metaphrase.storage.folders import check_writable, members_of, read_fields
from metaphrase.tokenization import join_pieces
from metaphrase.tokenization.tokenizer_trainer import find_joiner

logger = logging.getLogger(__name__)


def main(arguments: argparse.Namespace) -> None:
    parsers.check_dependents(arguments, source_column="file", target_column="file")
    recipe = read_recipe(Path((members_of(arguments.model) or [arguments.model])[0])) or {}
    if arguments.file is not None and not parsers.given_options(arguments, COLUMNS):
        columns = {name: recipe.get(name) for name in COLUMNS}
        # The columns of texts with features are those of training.
        vars(arguments).update(columns if list in map(type, columns.values()) else {})
    if arguments.metrics is None:
        arguments.metrics = recipe.get("metrics") or list(DEFAULT_METRICS)
        arguments.bleu_tokenize = arguments.bleu_tokenize or recipe.get("bleu_tokenize")
    score_options = metric_options(arguments.metrics, arguments.bleu_tokenize, arguments.lowercase)
    generation_options, report = parsers.chosen_generation_options(arguments), DataReport()
    names = ("file", "source_column", "target_column", "source_prefix", "malformed", "invalid_utf8")
    options = parsers.given_options(arguments, (*names, "max_line_characters"))
    # Pairs with an empty side stay: they are legitimate test cases.
    pairs = load_pairs(source_file=arguments.source, target_file=arguments.target, **options, report=report)
    inputs = parsers.given_options(arguments, ("source", "target", "file"))
    for name, path in parsers.given_options(arguments, ("output", "predictions")).items():
        check_files(inputs, path, name)
    set_seed(arguments.seed)
    judges = [needed_plugin("judge", "metric")(name, device=arguments.device) for name in arguments.metric]
    # `load_pairs` has added the prefix.
    loading = parsers.chosen_loading_options(arguments) | {"source_prefix": ""}
    keep_memory()
    generator = Generator.from_pretrained([arguments.model, *(arguments.ensemble or [])], **loading)
    if arguments.max_source_length is not None and arguments.source_prefix:
        check_source_length(arguments.max_source_length, generator.tokenizers, arguments.source_prefix)
    measured = describe(arguments, pairs, report, 1 + len(generator.members))
    # In their JSON form, for the comparison with earlier scores.
    settings = json.dumps(generation_settings(generator, generation_options), allow_nan=False)
    output = choose_output(arguments, measured | {"generation": json.loads(settings)})
    check_writable(output.parent, "output")
    targets, references = pairs["target"][:], None
    if arguments.joiner is not None:
        references = [join_pieces(text, arguments.joiner) for text in targets]
        if find_joiner(generator.tokenizers.target) is None:
            # The model writes whole words. Only this file splits them.
            targets = references
    if (predictions := arguments.predictions) is not None:
        if Path(predictions).resolve() == output.resolve():
            raise MetaphraseError(f"`predictions` must be another file than `output`, got {str(output)!r} for both.")
        Path(predictions).parent.mkdir(parents=True, exist_ok=True)
    with contextlib.nullcontext() if predictions is None else OutputFile(predictions, "predictions") as file:
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
            judges=judges,
        )
    write_metrics(output, result | measured)
    for name, score in result["scores"].items():
        logger.info("%s: %s  %s", name, with_interval(score), score["signature"])
    generator.log_counts(len(pairs))
    if result.get("perplexity") is not None:
        logger.info("loss: %.4f  perplexity: %.4f", result["loss"], result["perplexity"])
    logger.info("Written to %s", output)


def describe(arguments: argparse.Namespace, pairs: Dataset, report: DataReport, num_models: int) -> dict[str, dict]:
    """Return the entries of `metrics.json` on data and model."""
    digest = hashlib.sha256()
    for pair in zip(column_texts(pairs, "source"), column_texts(pairs, "target"), strict=True):
        digest.update(json.dumps(pair).encode() + b"\n")
    # The hash tells test sets of one name and size apart.
    data = {"name": Path(arguments.source or arguments.file).name, "sha256": digest.hexdigest()}
    # Numbers of skipped pairs.
    data |= {name: getattr(report, name) for name in ("malformed", "invalid_utf8") if getattr(report, name)}
    inference = {"engine": arguments.engine, "dtype": arguments.dtype, "models": num_models}
    inference |= parsers.given_options(arguments, ("max_source_length", "source_lang", "target_lang"))
    if arguments.use_vmap:
        inference["use_vmap"] = True
    return {"data": data, "inference": inference}


def choose_output(arguments: argparse.Namespace, measured: dict[str, dict]) -> Path:
    """Return the path of metrics.json: that of the command line, else beside the model, else in this folder.

    Only the scores of a single saved model that is decoded as it is go beside the model, where its card shows them. They replace
    only scores of the same data and settings.
    """
    if arguments.output is not None:
        return metrics_path(arguments.output)
    has_changes = arguments.ensemble or arguments.use_vmap or arguments.max_source_length is not None
    is_as_saved = (arguments.engine, arguments.dtype) == ("torch", "auto") and not has_changes
    if is_as_saved and Path(arguments.model).is_dir():
        path = metrics_path(arguments.model)
        try:
            earlier = read_fields(path)
        except ValueError:
            earlier = {}
        if earlier is None or all(earlier.get(name) == value for name, value in measured.items()):
            return path
        logger.warning(
            "The scores will be written to %s. %s is kept: it holds scores of the training run, or of other pairs or settings. "
            "Set --output for another file.",
            *(Path("metrics.json").absolute(), path),
        )
    if Path("config.json").exists():
        raise MetaphraseError(
            f"`output` must be given in a model's folder, got None: metrics.json in {Path.cwd()} would become the scores of "
            "its card."
        )
    return Path("metrics.json")
