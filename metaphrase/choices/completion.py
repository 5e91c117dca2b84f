"""Completion of a recipe: read the pairs, time a few updates, and fill the open fields."""

import functools
import logging
import time
from pathlib import Path
from typing import Any

import datasets
import torch

from metaphrase.augmentation.augmentation import learn_rare_words
from metaphrase.choices.estimate import RunEstimate, dry_run
from metaphrase.choices.rules import (
    BATCH_SIZES,
    SIZES,
    STRATEGIES,
    Size,
    StepCost,
    TokenProfile,
    choose_augmentation,
    choose_finetuning,
    choose_from_text,
    choose_from_tokens,
    choose_limits,
    choose_optimizer,
    describe_choices,
    tokens_of_batch,
    tokens_per_update,
    with_network,
)
from metaphrase.data.pairs import SIDES, CorpusProfile, data_seed, possible_validation, split_pairs
from metaphrase.data.token_budget import check_beside_budget
from metaphrase.engines.memory import free_main_memory
from metaphrase.storage.folders import ADAPTATION_NAME
from metaphrase.training.cpu_setup import has_fast_bfloat16
from metaphrase.training.experiment import Experiment
from metaphrase.training.recipe.checks import VALIDATION_FIELDS
from metaphrase.training.recipe.recipe import Recipe

logger = logging.getLogger(__name__)

# Share of the time for updates. The rest is for evaluations and for the scores of the finished model.
_UPDATES_SHARE = 0.8
# Memory of a process relative to its tensors: see the note of `estimate_run`.
_HEAP = 1.8
_TOKENS_PER_BATCH = 4096
# Pairs whose tokens are counted for the limits of length.
_SAMPLE_PAIRS = 10_000
# In hours.
_LONG_RUN = 24


def complete(recipe: Recipe, is_dry_run: bool = False, started: float | None = None) -> tuple[Experiment, list[str]]:
    """Fill the open fields of a recipe. Fields that are given stay.

    Streams, tasks, stages and plain texts are not read beforehand, so the network alone decides. A resumed run keeps what it has.

    Args:
        recipe: The recipe.
        is_dry_run: True if nothing will be written.
        started: Beginning of `time_budget`, in seconds of `time.time()`; None for now.

    Returns:
        The experiment, and a line for each choice with its reason.

    Raises:
        ValueError: If the pairs cannot be read, or fields contradict each other.
    """
    started = time.time() if started is None else started
    if recipe.resume_from_checkpoint:
        experiment = Experiment(recipe, is_dry_run, started)
    elif recipe.tasks or recipe.stages or recipe.streaming or recipe.objective != "pairs":
        experiment = Experiment(_from_network(recipe), is_dry_run, started)
    else:
        experiment = _from_pairs(recipe, is_dry_run, started)
    return experiment, describe_choices(recipe, experiment.recipe)


def _from_network(recipe: Recipe) -> Recipe:
    """Return the recipe with the open fields that depend on the network alone. A base model keeps what it has."""
    if recipe.model_name_or_path is not None:
        return recipe
    if recipe.is_open(*BATCH_SIZES):
        check_beside_budget(recipe, None)
        recipe = recipe.choose("usual for Transformers", max_tokens_per_batch=_TOKENS_PER_BATCH)
    return choose_optimizer(recipe, warmup_steps=0.1).checked()


def _from_pairs(recipe: Recipe, is_dry_run: bool, started: float) -> Experiment:
    """Return an experiment, whose data are read and encoded, with all open fields filled."""
    before, is_base = recipe, recipe.model_name_or_path is not None
    if recipe.is_open(*BATCH_SIZES):
        check_beside_budget(recipe, None)
    recipe = choose_dataset(recipe)
    experiment = Experiment(_before_evaluation(recipe), is_dry_run, started)
    with experiment.arguments.main_process_first(desc="reading the corpus"):
        experiment.corpus.read()
    train = experiment.corpus.splits["train"]
    if recipe.num_test:
        train = split_pairs(train, 0, recipe.num_test, data_seed(recipe))["train"]
    recipe = choose_from_text(recipe, CorpusProfile.of(train))
    if before.is_open("num_validation") and recipe.num_validation:
        # Pairs with the same source stay together.
        size = possible_validation(train, recipe.num_validation, recipe.num_test, data_seed(recipe))
        recipe = recipe.replace(num_validation=size)
    if recipe.is_open("bf16", "fp16", "use_cpu") and has_fast_bfloat16():
        recipe = recipe.choose("this machine multiplies matrices faster in bfloat16", bf16=True)
    experiment = experiment.with_recipe(_before_evaluation(recipe))
    with experiment.arguments.main_process_first(desc="encoding the corpus"):
        experiment.load()
        recipe = choose_augmentation(recipe, lambda: learn_rare_words(experiment.corpus))
        tokenizers = experiment.make_tokenizers()
        train = experiment.corpus.splits["train"]
        sample = train.select(range(0, len(train), -(-len(train) // _SAMPLE_PAIRS)))
        encoders = zip(SIDES, (tokenizers.encode_sources, tokenizers.encode_targets), strict=True)
        lengths = {side: [len(ids) for ids in encode(sample[side][:])] for side, encode in encoders}
        recipe = choose_limits(recipe, lengths, experiment.corpus.longest)
        experiment = experiment.with_recipe(_before_evaluation(recipe))
        _, encoded = experiment.prepare()
    tokens = TokenProfile.of(encoded["train"])

    @functools.cache
    def measured(size: Size) -> StepCost:
        sized = experiment.with_recipe(with_network(experiment.recipe, "", size))
        timed, batches, _ = _split_step(sized, tokens)
        return StepCost(_step_seconds(dry_run(timed)), batches)

    def cost_of(size: Size) -> StepCost:
        # A given network has one speed.
        return measured(size if recipe.is_open("preset") else SIZES[0])

    def time_left() -> float | None:
        # Reading long files may have used up all the time.
        return None if recipe.time_budget is None else _UPDATES_SHARE * max(0.0, experiment.deadline - time.time())

    if is_base:
        with torch.device("meta"):
            model = experiment.make_model(tokenizers, with_weights=False)
        facts = model.config, model.generation_config.num_beams or 1, _cost_of_base(experiment, tokens)
        has_seen_pairs = not Path(recipe.model_name_or_path, ADAPTATION_NAME).is_file()
        recipe, total = choose_finetuning(recipe, tokens, *facts, time_left(), has_seen_pairs)
    else:
        if recipe.time_budget is not None:
            cost_of(SIZES[1])
        recipe, total = choose_from_tokens(recipe, tokens, cost_of, time_left())
    if recipe.time_budget is None and total > _LONG_RUN * 3600:
        logger.warning(
            "This run takes about %.1f hours on this machine. To get the best model of a shorter time, give it: "
            "--time_budget 8h.",
            total / 3600,
        )
    return experiment.with_recipe(recipe.checked())


def _before_evaluation(recipe: Recipe) -> Recipe:
    """Return the recipe without fields of evaluation that need other fields, which are chosen after the pairs are read."""
    fields: dict[str, Any] = {}
    if recipe.is_open(*VALIDATION_FIELDS):
        fields = {"eval_strategy": "no", "choose_decoding": False}
    if any(recipe.is_open(name) for name in STRATEGIES) or fields:
        fields["load_best_model_at_end"] = False
    return recipe.replace(**fields)


def _split_step(experiment: Experiment, tokens: TokenProfile) -> tuple[Experiment, int, float]:
    """Split an optimizer step into batches, as large as memory holds.

    Return the experiment with these batches, their number, and the bytes that it lacks; 0 or less if memory holds it.
    """
    recipe = experiment.recipe
    budget, batches = tokens_per_update(recipe, tokens), recipe.gradient_accumulation_steps
    is_open = recipe.is_open(*BATCH_SIZES)
    is_final = not (is_open and recipe.is_open("gradient_accumulation_steps"))
    while True:
        size = {"max_tokens_per_batch": tokens_of_batch(tokens, budget, batches)}
        trial = recipe.choose("", **size, gradient_accumulation_steps=batches) if is_open else recipe
        lacking = _HEAP * dry_run(experiment.with_recipe(trial), devices=1).peak - free_memory()
        if lacking <= 0 or is_final or budget // (2 * batches) < tokens.longest:
            return experiment.with_recipe(trial), batches, lacking
        batches *= 2


def _cost_of_base(experiment: Experiment, tokens: TokenProfile) -> StepCost:
    """Return the cost of an optimizer step in batches that memory holds, and warn if memory holds none."""
    timed, batches, lacking = _split_step(experiment, tokens)
    if lacking > 0:
        logger.warning(
            "Training takes about %.1f GiB, and %.1f GiB are free. Set `lora_rank: 16` (pip install metaphrase[lora]), or "
            "choose a smaller model.",
            *(size / _HEAP / 2**30 for size in (lacking + free_memory(), free_memory())),
        )
    return StepCost(_step_seconds(dry_run(timed)), batches)


def _step_seconds(estimate: RunEstimate) -> float:
    return 3600 * (estimate.hours or 0.0) / estimate.steps


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


def choose_dataset(recipe: Recipe) -> Recipe:
    """Choose the splits and columns of `dataset_name`, if the recipe has it."""
    name, config = recipe.dataset_name, recipe.dataset_config_name
    if name is None:
        return recipe
    try:
        splits = list(datasets.load_dataset(name, config))
    except (FileNotFoundError, ConnectionError) as error:
        raise FileNotFoundError(
            f"`dataset_name` must be a data set of the Hub or a folder that exists, got {name!r}: {error}"
        ) from error
    reason = f"{name} has the splits {', '.join(splits)}"
    validation = next((split for split in _VALIDATION_NAMES if split in splits), None)
    if validation is not None and recipe.is_open(*_VALIDATION):
        recipe = recipe.choose(reason, dataset_validation_split=validation)
    if "test" in splits and recipe.is_open("dataset_test_split", "num_test"):
        recipe = recipe.choose(reason, dataset_test_split="test")
    if recipe.is_open("source_column", "target_column"):
        # The split may be a part, such as `train[:10%]`.
        row = next(iter(datasets.load_dataset(name, config, split=recipe.dataset_train_split)), {})
        source, target = find_columns(row, name, config)
        recipe = recipe.choose(f"{name} has the columns {', '.join(row)}", source_column=source, target_column=target)
    return recipe


def find_columns(row: dict, name: str, config: str | None) -> tuple[str, str]:
    """Return the columns of source and target. A configuration `de-en` decides the direction of a column `translation`."""
    languages = row.get("translation")
    names, direction = (languages, (config or "").split("-")) if isinstance(languages, dict) else (row, ())
    pairs = [tuple(pair) for pair in (direction, *PAIRS) if len(pair) == 2 and set(pair) <= set(names)]
    if len(pairs) != 1 and PAIRS[0] not in pairs:
        raise ValueError(
            f"`source_column` and `target_column` must be given for {name}, which has {', '.join(names)}, got neither."
        )
    return PAIRS[0] if PAIRS[0] in pairs else pairs[0]
