"""Checks of a recipe beyond the ranges of its fields: fields that contradict each other or need each other.

A field without effect, because another one is missing, is only warned of.
"""

import itertools
import logging
from collections.abc import Collection
from typing import Any

from metaphrase.data.pairs import SPLITS
from metaphrase.data.stages import parse_stages
from metaphrase.data.token_budget import check_beside_budget
from metaphrase.evaluation.metrics import DEFAULT_METRICS
from metaphrase.tokenization.subword_sampling import SAMPLED_KINDS
from metaphrase.training.recipe.fields import OWN_FIELDS, group_of

logger = logging.getLogger(__name__)

# Fields of transformers that a recipe must not set.
LEFT_OUT = {
    "generation_config": "It would replace `num_beams`, `length_penalty`, `generation_max_length` and others. Set them instead.",
    "push_to_hub": "`metaphrase push` uploads a finished run.",
    "use_liger_kernel": "It has no kernels for encoder-decoder models.",
}
# Fields that must come together.
_NEEDS = {f"{split}_source_file": f"{split}_target_file" for split in SPLITS}
_NEEDS |= {target: source for source, target in _NEEDS.items()}
_NEEDS |= {"datasets": "stages", "stages": "datasets"}
_NEEDS |= {"target_tokenizer_name_or_path": "tokenizer_name_or_path", "lora_rank": "model_name_or_path"}
_FILES = tuple(f"{split}{kind}" for split in SPLITS for kind in ("_file", "_source_file"))
_PAIR_SOURCES = (*_FILES, "dataset_name", "streaming", "num_validation", "num_test")
_OF_EACH_TASK = (*_PAIR_SOURCES, "source_prefix", "source_column", "target_column", "objective")
_OF_EACH_TASK += tuple(f"max_{split}_samples" for split in SPLITS)
_OF_DATASETS = ("train_file", "train_source_file", "dataset_name", "streaming", "num_validation", "num_test")
_OF_DATASETS += ("objective", "tasks", "max_train_samples")
_OF_NEW_TOKENIZER = ("tokenizer_kind", "vocab_size", "target_vocab_size", "joint_vocabulary", "lowercase")
_OF_NEW_TOKENIZER += ("target_tokenizer_kind", "normalization", "min_frequency", "joiner", "num_sentinels")
# Pairs of one field, when it differs from its default and is not false, and fields that contradict it, with the reason.
_CONFLICTS = (
    *((f"{split}_file", (f"{split}_source_file",), "a split comes from one place") for split in SPLITS),
    ("dataset_name", _FILES, "pairs come from a data set or from files"),
    ("model_name_or_path", ("preset", "model"), "a model to fine-tune has its dimensions"),
    ("average_last", ("average_best",), "one mean is kept"),
    *(
        (name, ("lora_rank",), "a checkpoint does not hold the whole model that is kept")
        for name in ("average_last", "average_best")
    ),
    ("lora_rank", ("freeze",), "all but the adapter is frozen"),
    *(
        (
            f"num_{split}",
            (f"{split}_file", f"{split}_source_file", f"dataset_{split}_split"),
            f"the {split} pairs are given or taken out of train",
        )
        for split in ("validation", "test")
    ),
    ("streaming", ("num_validation", "num_test"), "pairs cannot be taken out of a stream"),
    ("objective", (*_PAIR_SOURCES, "target_tokenizer_kind", "target_vocab_size"), "it is learned from plain text"),
    ("objective", ("subword_sampling", "augmentation"), "it draws the noise of its pairs"),
    ("tasks", _OF_EACH_TASK, "each task has its own pairs, read as a whole"),
    ("stages", _OF_DATASETS, "each of `datasets` has its own pairs, read as a whole"),
    ("stages", ("num_train_epochs",), "the stages say how often pairs are read"),
    (
        "joint_vocabulary",
        ("target_tokenizer_kind", "target_vocab_size", "target_tokenizer_name_or_path"),
        "a joint vocabulary has one tokenizer",
    ),
    *(
        (name, _OF_NEW_TOKENIZER, "a tokenizer that exists is as it was trained")
        for name in ("tokenizer_name_or_path", "model_name_or_path")
    ),
)
# Beginnings of fields of validation and test pairs.
_SCORED = ("validation", "test", "num_", "dataset_validation", "dataset_test", "max_validation", "max_test")
# Any of these gives a task validation pairs.
VALIDATION_FIELDS = ("validation_file", "validation_source_file", "dataset_validation_split", "num_validation")


def check_recipe(recipe: Any) -> None:
    """Refuse a recipe that contradicts itself, and warn of fields without effect.

    Raises:
        ValueError: Naming the fields, what must hold and what was given.
    """
    check_conflicts(recipe)
    for name, reason in LEFT_OUT.items():
        _require(not getattr(recipe, name), recipe, name, f"be left out. {reason}")
    for name, needed in _NEEDS.items():
        _require(not recipe.is_set(name) or recipe.is_set(needed), recipe, name, f"come with `{needed}`")
    if recipe.max_steps == 0:
        raise ValueError("`max_steps` must be above 0, or -1 for `num_train_epochs`, got 0.")
    if recipe.objective != "pairs":
        is_joint = recipe.joint_vocabulary is not False
        _require(is_joint, recipe, "joint_vocabulary", "be true with `objective`: both sides are one text")
    for group in ("tasks", "datasets"):
        _check_parts(recipe, group)
    if recipe.stages:
        parse_stages(recipe.stages, list(recipe.datasets))
    for name in ("streaming", "stages"):
        if getattr(recipe, name):
            _require(recipe.max_tokens_per_batch, recipe, name, "come with `max_tokens_per_batch`, such as 4000")
            for strategy in ("save_strategy", "eval_strategy", "logging_strategy"):
                is_epoch = getattr(recipe, strategy) == "epoch"
                _require(not is_epoch, recipe, strategy, f"be steps or no with `{name}`, which has no epochs")
    _require(
        not recipe.streaming or recipe.max_steps > 0, recipe, "streaming", "come with `max_steps`: it has no length"
    )
    if recipe.max_tokens_per_batch is not None:
        check_beside_budget(recipe, recipe.max_tokens_per_batch)
    _check_augmentation(recipe)
    _check_best(recipe)
    _check_averages(recipe)
    ineffective = {name: field.json_schema_extra["effect_with"] for name, field in OWN_FIELDS.items()}
    parts = [
        f"`{name}` without `{needed}`"
        for name, needed in ineffective.items()
        if needed and recipe.is_set(name) and not recipe.is_set(needed)
    ]
    if parts:
        logger.warning("These fields have no effect: %s.", ", ".join(parts))


def _require(condition: Any, recipe: Any, name: str, rule: str) -> None:
    if not condition:
        raise ValueError(f"`{name}` must {rule}, got {getattr(recipe, name)!r}.")


def check_conflicts(recipe: Any, names: Collection[str] | None = None) -> None:
    """Refuse two fields that contradict each other, of which one is among `names`; None for all.

    Raises:
        ValueError: Naming both fields and the reason.
    """
    for first, conflicting, reason in _CONFLICTS:
        if not recipe.is_changed(first) or getattr(recipe, first) is False:
            continue
        for other in conflicting:
            # `null` unsets a value of another recipe.
            is_named = names is None or first in names or other in names
            if is_named and recipe.is_set(other) and getattr(recipe, other) is not None:
                raise ValueError(
                    f"`{first}` and `{other}` must not both be given, because {reason}, "
                    f"got {getattr(recipe, first)!r} and {getattr(recipe, other)!r}."
                )


def _check_parts(recipe: Any, group: str) -> None:
    """Check the fields of each of the `tasks` or of the `datasets`."""
    for part, fields in getattr(recipe, group).items():
        path = f"{group}.{part}"
        for name in fields:
            is_weight = name == "weight" and group == "tasks"
            is_data = is_weight or (name != "weight" and group_of(name, f"`{path}`") == "data")
            if not is_data or name in ("data_dir", "streaming", "objective"):
                raise ValueError(f"`{path}` must hold fields of data, got `{name}`.")
            if group == "datasets" and name.startswith(_SCORED):
                raise ValueError(f"`{path}` must hold fields of training pairs, got `{name}`.")
        weight = fields.get("weight", 1)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            raise ValueError(f"`{path}.weight` must be a number above 0, got {weight!r}.")


def _check_augmentation(recipe: Any) -> None:
    for name in ("tokenizer_kind", "target_tokenizer_kind"):
        is_sampled = recipe.subword_sampling is None or getattr(recipe, name) in (None, *SAMPLED_KINDS)
        _require(is_sampled, recipe, name, f"be one of {', '.join(SAMPLED_KINDS)} with `subword_sampling`")
    has_two = recipe.joint_vocabulary is False or recipe.target_tokenizer_kind or recipe.target_vocab_size
    if "terms" in recipe.augmentation and has_two:
        raise ValueError(
            "`augmentation.terms` must be left out with two vocabularies. Its marks are tokens of a joint one."
        )
    cases = [recipe.augmentation.get(name, 0) for name in ("uppercase", "titlecase")]
    if sum(cases) > 1:
        raise ValueError(
            f"`augmentation.uppercase` and `augmentation.titlecase` must be at most 1 together, got {cases[0]} and {cases[1]}."
        )


def check_evaluated(recipe: Any) -> None:
    """Refuse an evaluation without data, which a Trainer would notice after reading the corpus.

    Raises:
        ValueError: If there is neither a file nor a number of pairs to evaluate.
    """
    fields_of_parts = recipe.tasks.values() or [{name: getattr(recipe, name) for name in VALIDATION_FIELDS}]
    has_pairs = any(fields.get(name) for fields in fields_of_parts for name in VALIDATION_FIELDS)
    has_any = has_pairs or (not recipe.tasks and recipe.validation_text_file)
    names = "`validation_text_file`" if recipe.objective != "pairs" else "`validation_file` or `num_validation`"
    can_choose = has_pairs and recipe.objective == "pairs"
    _require(can_choose or not recipe.choose_decoding, recipe, "choose_decoding", f"come with {names}")
    _require(has_any or recipe.eval_strategy == "no", recipe, "eval_strategy", f"come with {names}")


def decodes(recipe: Any) -> bool:
    """Return True if validation pairs are decoded during training."""
    return recipe.objective == "pairs" and bool(recipe.predict_with_generate) and not recipe.prediction_loss_only


def _check_best(recipe: Any) -> None:
    """Refuse to select checkpoints by a metric that is not evaluated during training."""
    metric = recipe.metric_for_best_model
    for name in ("early_stopping_patience", "average_best"):
        is_evaluated = recipe.eval_strategy != "no" or getattr(recipe, name) is None
        _require(is_evaluated, recipe, name, "come with `eval_strategy` steps or epoch")
    has_metric = metric or recipe.load_best_model_at_end or not recipe.early_stopping_patience
    _require(has_metric, recipe, "early_stopping_patience", "come with `metric_for_best_model`")
    if recipe.eval_strategy == "no" or (metric is None and recipe.average_best is None):
        return
    evaluated = ["loss", "perplexity"]
    if decodes(recipe):
        names = recipe.metrics or DEFAULT_METRICS
        tasks = [task for task, fields in recipe.tasks.items() if any(fields.get(name) for name in VALIDATION_FIELDS)]
        evaluated += [*names, *(f"{task}_{name}" for task, name in itertools.product(tasks, names))]
    is_evaluated = (metric or DEFAULT_METRICS[0]).removeprefix("eval_") in evaluated
    _require(is_evaluated, recipe, "metric_for_best_model", f"be evaluated while training: {', '.join(evaluated)}")


def _check_averages(recipe: Any) -> None:
    name = next((name for name in ("average_last", "average_best") if getattr(recipe, name) is not None), None)
    if name is None:
        return
    limit, save = recipe.save_total_limit, recipe.save_strategy
    _require(limit is None or getattr(recipe, name) <= limit, recipe, name, f"be at most `save_total_limit` {limit}")
    _require(not recipe.load_best_model_at_end, recipe, "load_best_model_at_end", f"be false with `{name}`")
    _require(save != "no", recipe, "save_strategy", f"be steps, epoch or best with `{name}`")
    if name == "average_best" and save != "best":
        # A checkpoint that is not evaluated has no score.
        _require(
            save == recipe.eval_strategy, recipe, "save_strategy", "be best or the `eval_strategy` with `average_best`"
        )
        is_evaluated = save != "steps" or saves_evaluated_weights(recipe)
        _require(is_evaluated, recipe, "save_steps", "be a multiple of `eval_steps` with `average_best`")


def saves_evaluated_weights(recipe: Any) -> bool:
    """Return True if each step that saves a checkpoint also evaluates it."""
    # `eval_steps` is `logging_steps` by default. Both may be shares of the run.
    steps = recipe.eval_steps or recipe.logging_steps or recipe.save_steps
    times = recipe.save_steps / steps
    return (recipe.save_steps < 1) == (steps < 1) and abs(times - round(times)) <= 1e-6
