"""`metaphrase filter PAIRS --output CLEAN`, and `metaphrase shortlist MODEL PAIRS`, which learns from pairs, too."""

import argparse
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np

from metaphrase.analysis.judges import load_judge
from metaphrase.analysis.scoring import dual_scores
from metaphrase.data.pairs import PairSource
from metaphrase.errors import MetaphraseError, did_you_mean
from metaphrase.filtering.alignment import MAX_MAP_PAIRS, make_vocabulary_map
from metaphrase.filtering.rules import RULES, FilterSettings, Pair
from metaphrase.filtering.run import filter_pairs, format_report, partial_path, sample_pairs
from metaphrase.inference import Generator
from metaphrase.scripts.parsers import check_dependents, given_options
from metaphrase.storage.folders import VOCABULARY_MAP_NAME, file_in_one_step
from metaphrase.storage.loading import check_model_folder
from metaphrase.tokenization import TokenizerPair

logger = logging.getLogger(__name__)


def main(arguments: argparse.Namespace) -> None:
    check_dependents(arguments, forward_model="backward_model", backward_model="forward_model")
    check_dependents(arguments, metric="worst_score", worst_score="metric", add_weights="metric")
    names = ("file", "source_column", "target_column", "weight_column", "max_line_characters")
    files = {"source_file": arguments.source, "target_file": arguments.target}
    source = PairSource(**files, **given_options(arguments, names))
    if check_outputs(arguments, source.paths):
        logger.info("%s is complete, and there is no unfinished run.", arguments.output[0])
        return
    settings, started = chosen_settings(arguments), time.perf_counter()
    rules: dict[str, Callable[[Sequence[Pair]], Iterable[bool]]] = {}
    weigh = None
    if "dual_cross_entropy" in settings.rules:
        paths = settings.forward_model, settings.backward_model
        forward, backward = (Generator.from_pretrained(path, engine="torch", device=arguments.device) for path in paths)
        least = settings.min_dual_score
        rules["dual_cross_entropy"] = lambda pairs: [score < least for score in dual_scores(forward, backward, pairs)]
    if "quality" in settings.rules:
        judge = load_judge(settings.metric, show_progress=False, device=arguments.device)
        worst = -settings.worst_score if judge.is_better_lower else settings.worst_score
        rules["quality"] = lambda pairs: judge.utilities(*zip(*pairs, strict=True)) < worst
        if settings.add_weights:

            def weigh(pairs: Sequence[Pair]) -> np.ndarray:
                scores = judge.values(*zip(*pairs, strict=True))
                return 1 / (1 + scores) if judge.is_better_lower else scores

    try:
        options = {name: getattr(arguments, name) for name in ("rejected", "report", "shard", "resume")}
        options |= {"model_rules": rules, "weigh": weigh, "show_progress": not arguments.quiet}
        report = filter_pairs(source, arguments.output, settings, **options)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("Use --resume to go on.") from None
    logger.info("%s", format_report(report))
    logger.info("%d pairs in %.1f seconds.", report["read"], time.perf_counter() - started)
    for rule, count in report["dropped"].items():
        # A rule that drops a larger share may not suit the corpus.
        if count > 0.2 * report["read"]:
            hint = f" If they are good pairs, pass --skip_rules {rule}." if rule in RULES else ""
            share = 100 * count / report["read"]
            logger.warning("`%s` dropped %.0f %% of the pairs. See the examples of --report.%s", rule, share, hint)


def chosen_settings(arguments: argparse.Namespace) -> FilterSettings:
    settings = FilterSettings(**{field.name: getattr(arguments, field.name) for field in fields(FilterSettings)})
    for rule in (*(settings.rules or ()), *arguments.skip_rules):
        if rule not in RULES:
            raise MetaphraseError(f"A rule must be one of {', '.join(RULES)}, got {rule!r}.{did_you_mean(rule, RULES)}")
    rules = {*(settings.rules or RULES)} - {*arguments.skip_rules}
    # A rule is on if its options are given.
    for rule, options in (
        ("language", ("source_lang", "target_lang")),
        ("dual_cross_entropy", ("forward_model", "backward_model")),
        ("quality", ("metric", "worst_score")),
    ):
        is_given = [getattr(settings, option) is not None for option in options]
        if any(is_given) and rule not in rules:
            raise MetaphraseError(f"`{rule}` must be one of the rules with `{options[0]}`, got rules without it.")
        if not any(is_given) and rule in (settings.rules or ()):
            raise MetaphraseError(f"`{options[0]}` or `{options[1]}` must be given with the rule `{rule}`, got None.")
        if not any(is_given):
            rules.discard(rule)
    return replace(settings, rules=tuple(rule for rule in RULES if rule in rules))


def check_outputs(arguments: argparse.Namespace, inputs: Sequence[str]) -> bool:
    """Check the outputs before any work. Return True if `resume` is given, and all outputs are newer than the inputs."""
    outputs = arguments.output
    is_pairs = len(outputs) == 1 and outputs[0].removesuffix(".gz").endswith((".tsv", ".jsonl"))
    has_weights = arguments.add_weights or arguments.weight_column is not None
    if not is_pairs and (len(outputs) != 2 or has_weights):
        expected = "a .tsv or .jsonl file, or two text files without weights"
        raise MetaphraseError(f"`output` must be {expected}, got {' '.join(outputs)!r}.")
    paths = [Path(path) for path in (*outputs, arguments.rejected, arguments.report) if path is not None]
    names = [str(path.resolve()) for path in (*paths, *map(Path, inputs))]
    for path in paths:
        if path.is_dir():
            raise MetaphraseError(f"`output` must be a file, got the folder {str(path)!r}.")
        if names.count(str(path.resolve())) > 1:
            raise MetaphraseError(f"Every file of the command must be another one, got {str(path)!r} twice.")
    partial, present = partial_path(paths[0]), [path for path in paths if path.exists()]
    if arguments.overwrite or (arguments.resume and partial.exists()):
        return False
    if partial.exists():
        raise MetaphraseError(f"`output` must have no unfinished run, got {partial}. Pass --resume or --overwrite.")
    if arguments.resume and len(present) == len(paths):
        oldest = min(path.stat().st_mtime_ns for path in paths)
        if all(Path(path).stat().st_mtime_ns <= oldest for path in inputs):
            return True
    if present:
        raise MetaphraseError(f"`output` must be a new file, got {str(present[0])!r}. Pass --overwrite to replace it.")
    return False


def shortlist(arguments: argparse.Namespace) -> None:
    """Run `metaphrase shortlist MODEL PAIRS`: write the vocabulary map of a model, for --use_vmap."""
    path, files = Path(arguments.model, VOCABULARY_MAP_NAME), arguments.pairs
    check_model_folder(path.parent)
    if path.exists() and not arguments.overwrite:
        raise MetaphraseError(f"`model` must have no {path.name}, got {str(path)!r}. Pass --overwrite to replace it.")
    if len(files) > 2:
        raise MetaphraseError(f"`pairs` must be one file, or two parallel files, got {len(files)}.")
    names = ("file",) if len(files) == 1 else ("source_file", "target_file")
    columns = given_options(arguments, ("source_column", "target_column"))
    source = PairSource(**dict(zip(names, files, strict=True)), **columns)
    num_records, pairs = sample_pairs(source.records(), MAX_MAP_PAIRS, source.name)
    logger.info("Learning from %d of %d pairs.", len(pairs), num_records)
    tokenizers = TokenizerPair.from_pretrained(path.parent)
    sizes = {"num_per_token": arguments.num_per_token, "num_frequent": arguments.num_frequent}
    vocabulary_map = make_vocabulary_map(pairs, tokenizers, **sizes)
    with file_in_one_step(path) as partial:
        vocabulary_map.save(partial, tokenizers)
    logger.info("Written to %s", path)
