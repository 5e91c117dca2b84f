"""Completion of a recipe: read the pairs, time a few updates, and fill the open fields."""

import functools
import logging
import time
from typing import Any

import datasets
import numpy as np
import torch

from metaphrase.data.pairs import LENGTH_COLUMNS, possible_validation
from metaphrase.data.profile import CorpusProfile
from metaphrase.data.token_budget import check_beside_budget
from metaphrase.storage.loading import free_main_memory
from metaphrase.training.choices.finetuning import choose_finetuning, choose_limits
from metaphrase.training.choices.rules import (
    BATCH_SIZES,
    SIZES,
    STRATEGIES,
    Choice,
    OpenRecipe,
    Pace,
    Size,
    TokenProfile,
    choose_from_text,
    choose_from_tokens,
    choose_optimizer,
    tokens_of_batch,
    tokens_per_update,
)
from metaphrase.training.cpu_setup import has_fast_bfloat16
from metaphrase.training.experiment import Experiment
from metaphrase.training.planning.estimate import dry_run
from metaphrase.training.recipe.checks import VALIDATION_FIELDS
from metaphrase.training.recipe.recipe import Recipe

logger = logging.getLogger(__name__)

# Share of the time for updates. The rest is for evaluations and for the scores of the finished model.
_UPDATES_SHARE = 0.8
# Memory of a process relative to its tensors: see the note of `estimate_run`.
_HEAP = 1.8
_TOKENS_PER_BATCH = 4096
# In hours.
_LONG_RUN = 24


def is_completable(recipe: Recipe) -> bool:
    """Return True if open fields of a recipe can be chosen: those of a network that learns from pairs of text."""
    is_special = recipe.tasks or recipe.stages or recipe.streaming or recipe.objective != "pairs"
    return not (is_special or recipe.resume_from_checkpoint)


def complete_optimizer(recipe: Recipe) -> tuple[Recipe, list[Choice]]:
    """Fill the open fields that depend on the network alone, where `is_completable` is false.

    Streams, tasks, stages and plain texts are not read beforehand. A base model and a resumed run keep what they have.
    """
    if recipe.is_set("model_name_or_path") or recipe.resume_from_checkpoint:
        return recipe, []
    filled = OpenRecipe(recipe)
    if filled.is_open(*BATCH_SIZES):
        check_beside_budget(recipe, None)
        filled.choose("usual for Transformers", max_tokens_per_batch=_TOKENS_PER_BATCH)
    choose_optimizer(filled, warmup_steps=0.1)
    return _with_reasons(filled), filled.choices


def complete(recipe: Recipe, is_dry_run: bool = False, started: float | None = None) -> tuple[Experiment, list[Choice]]:
    """Fill the open fields of a recipe. Fields that are given stay.

    Args:
        recipe: A recipe for which `is_completable` is true.
        is_dry_run: True if nothing will be written.
        started: Beginning of `time_budget`, in seconds of `time.time()`; None for now.

    Returns:
        The experiment, whose data are read and encoded, and the choices with their reasons.

    Raises:
        ValueError: If the pairs cannot be read, or fields contradict each other.
    """
    started = time.time() if started is None else started
    filled = OpenRecipe(recipe)
    if filled.is_open(*BATCH_SIZES):
        check_beside_budget(recipe, None)
    choose_dataset(filled)
    first = Experiment(_before_evaluation(filled), is_dry_run)
    with first.arguments.main_process_first(desc="reading the corpus"):
        first.corpus.load()
    train = first.corpus.splits["train"]
    profile, is_base = CorpusProfile.of(train), recipe.model_name_or_path is not None
    if is_base or recipe.tokenizer_name_or_path is not None:
        choose_limits(filled, first, profile)
    choose_from_text(filled, profile)
    if not recipe.is_set("num_validation") and filled.recipe.num_validation:
        # Pairs with the same source stay together.
        size = possible_validation(train, filled.recipe.num_validation, recipe.num_test, recipe.seed)
        filled.correct(num_validation=size)
    if filled.is_open("bf16", "fp16", "use_cpu") and has_fast_bfloat16():
        filled.choose("this machine multiplies matrices faster in bfloat16", bf16=True)
    experiment = Experiment(_before_evaluation(filled), is_dry_run, started)
    with experiment.arguments.main_process_first(desc="encoding the corpus"):
        _, encoded = experiment.prepare()
    lengths = np.stack([np.asarray(encoded["train"][side][:]) for side in LENGTH_COLUMNS], axis=1)
    tokens = TokenProfile(len(lengths), *map(int, lengths.sum(axis=0)), int(lengths.sum(axis=1).max()))

    measured = functools.cache(lambda size: _measure(experiment, size, tokens))

    def pace_of(size: Size) -> Pace:
        # A given network has one speed.
        return measured(size if filled.is_open("preset") else SIZES[0])

    seconds = None
    if recipe.time_budget is not None:
        if not is_base:
            pace_of(SIZES[1])
        # Reading long files may have used up all the time.
        seconds = _UPDATES_SHARE * max(0.0, experiment.deadline - time.time())
    if is_base:
        hours = choose_finetuning(filled, experiment, tokens, seconds, free_memory() / _HEAP) / 3600
    else:
        hours = choose_from_tokens(filled, tokens, pace_of, seconds) / 3600
    if seconds is None and hours > _LONG_RUN:
        logger.warning(
            "This run takes about %.1f hours on this machine. To get the best model of a shorter time, give it: "
            "--time_budget 8h.",
            hours,
        )
    final = Experiment(_with_reasons(filled), is_dry_run, started)
    final.take_data(experiment)
    return final, filled.choices


def _before_evaluation(filled: OpenRecipe) -> Recipe:
    """Return the recipe without fields of evaluation that need other fields, which are chosen after the pairs are read."""
    fields: dict[str, Any] = {}
    if filled.is_open(*VALIDATION_FIELDS):
        fields = {"eval_strategy": "no", "choose_decoding": False}
    if any(filled.is_open(name) for name in STRATEGIES) or fields:
        fields["load_best_model_at_end"] = False
    return filled.recipe.replace(**fields)


def _with_reasons(filled: OpenRecipe) -> Recipe:
    reasons = {next(iter(choice.values)): choice.reason for choice in filled.choices}
    return filled.recipe.replace(reasons={**filled.recipe.reasons, **reasons}).checked()


def _measure(experiment: Experiment, size: Size, tokens: TokenProfile) -> Pace:
    """Time a few batches of a network, as large as memory holds."""
    budget, batches = tokens_per_update(experiment.recipe, tokens), experiment.recipe.gradient_accumulation_steps
    while True:
        sized = OpenRecipe(experiment.recipe)
        is_given = not sized.is_open(*BATCH_SIZES, "gradient_accumulation_steps")
        is_smallest = is_given or budget // (2 * batches) < tokens.longest
        if sized.is_open("preset"):
            sized.choose_network("", size.with_width_of(sized.recipe.model).fields)
        sized.choose("", max_tokens_per_batch=tokens_of_batch(tokens, budget, batches))
        timed = Experiment(sized.recipe, is_dry_run=True)
        timed.take_data(experiment)
        if is_smallest or _HEAP * dry_run(timed, devices=1).peak <= free_memory():
            break
        batches *= 2
    estimate = dry_run(timed)
    seconds = 3600 * (estimate.hours or 0.0) / estimate.data.steps
    # An update of the trial has one batch, unless the recipe says how many.
    return Pace(seconds if is_given else batches * seconds, batches)


def free_memory() -> int:
    """Return the bytes that training may take, on the accelerator or else in main memory."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    return free_main_memory()


# Names of a source and its target.
PAIRS = (("source", "target"), ("src", "tgt"), ("input", "output"), ("question", "answer"), ("article", "highlights"))
PAIRS += tuple((source, "summary") for source in ("text", "document", "article", "dialogue"))
_VALIDATION_NAMES = ("validation", "valid", "dev", "val")
_VALIDATION = ("dataset_validation_split", "num_validation")


def choose_dataset(recipe: OpenRecipe) -> None:
    """Choose the splits and columns of `dataset_name`, if the recipe has it.

    Raises:
        FileNotFoundError: If there is no such data set.
        ValueError: If a configuration must be given, or the columns do not tell source and target.
    """
    name, config = recipe.recipe.dataset_name, recipe.recipe.dataset_config_name
    if name is None:
        return
    try:
        splits = list(datasets.load_dataset(name, config))
    except (FileNotFoundError, ConnectionError) as error:
        raise FileNotFoundError(
            f"`dataset_name` must be a data set of the Hub or a folder that exists, got {name!r}: {error}"
        ) from error
    reason = f"{name} has the splits {', '.join(splits)}"
    validation = next((split for split in _VALIDATION_NAMES if split in splits), None)
    if validation is not None and recipe.is_open(*_VALIDATION):
        recipe.choose(reason, dataset_validation_split=validation)
    if "test" in splits and recipe.is_open("dataset_test_split", "num_test"):
        recipe.choose(reason, dataset_test_split="test")
    if recipe.is_open("source_column", "target_column"):
        # The split may be a part, such as `train[:10%]`.
        row = next(iter(datasets.load_dataset(name, config, split=recipe.recipe.dataset_train_split)), {})
        source, target = find_columns(row, name, config)
        recipe.choose(f"{name} has the columns {', '.join(row)}", source_column=source, target_column=target)


def find_columns(row: dict, name: str, config: str | None) -> tuple[str, str]:
    """Return the columns of source and target.

    Args:
        row: A row of the data set.
        name: Name of the data set, for errors.
        config: Configuration; `de-en` decides the direction of a column `translation`.

    Raises:
        ValueError: If no pair of columns is known, or several are.
    """
    languages = row.get("translation")
    names, direction = (languages, (config or "").split("-")) if isinstance(languages, dict) else (row, ())
    pairs = [tuple(pair) for pair in (direction, *PAIRS) if len(pair) == 2 and set(pair) <= set(names)]
    if len(pairs) != 1 and PAIRS[0] not in pairs:
        raise ValueError(
            f"`source_column` and `target_column` must be given for {name}, which has {', '.join(names)}, got neither."
        )
    return PAIRS[0] if PAIRS[0] in pairs else pairs[0]
