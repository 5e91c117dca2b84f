"""Checks of a recipe beyond the ranges of its fields: fields that contradict each other or need each other.

A field without effect, because another one is missing, is only warned of.
"""

import functools
import itertools
import logging
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from metaphrase.data.pairs import SPLITS
from metaphrase.data.stages import parse_stages
from metaphrase.data.token_budget import check_beside_budget
from metaphrase.evaluation.metrics import DEFAULT_METRICS
from metaphrase.tokenization.tokenizer_trainer import SAMPLED_KINDS
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


# A rule of a recipe: True if it holds, the field, and what must hold.
Rule = tuple[Any, str, str]


def check_recipe(recipe: Any) -> None:
    """Refuse a recipe that contradicts itself by a `ValueError` with the fields, and warn of fields without effect."""
    check_conflicts(recipe)
    _check(recipe, _rules(recipe))
    if recipe.stages:
        parse_stages(recipe.stages, list(recipe.datasets))
    if recipe.max_tokens_per_batch is not None:
        check_beside_budget(recipe, recipe.max_tokens_per_batch)
    needs = {name: field.json_schema_extra["effect_with"] for name, field in OWN_FIELDS.items()}
    parts = [
        f"`{name}` without `{needed}`"
        for name, needed in needs.items()
        if needed and recipe.is_set(name) and not recipe.is_set(needed)
    ]
    if parts:
        logger.warning("These fields have no effect: %s.", ", ".join(parts))


def _check(recipe: Any, rules: Iterable[Rule]) -> None:
    for holds, path, rule in rules:
        if not holds:
            # A path such as `tasks.news.weight` names a field of a part.
            value = functools.reduce(
                lambda value, key: value[key], path.split(".")[1:], getattr(recipe, path.split(".")[0])
            )
            raise ValueError(f"`{path}` must {rule}, got {value!r}.")


def _rules(recipe: Any) -> Iterator[Rule]:
    for name, reason in LEFT_OUT.items():
        yield not getattr(recipe, name), name, f"be left out. {reason}"
    for name, needed in _NEEDS.items():
        yield not recipe.is_set(name) or recipe.is_set(needed), name, f"come with `{needed}`"
    yield recipe.max_steps != 0, "max_steps", "be above 0, or -1 for `num_train_epochs`"
    can_join = recipe.objective == "pairs" or recipe.joint_vocabulary is not False
    yield can_join, "joint_vocabulary", "be true with `objective`: both sides are one text"
    for name in (name for name in ("streaming", "stages") if getattr(recipe, name)):
        yield recipe.max_tokens_per_batch, name, "come with `max_tokens_per_batch`, such as 4000"
        for strategy in ("save_strategy", "eval_strategy", "logging_strategy"):
            rule = f"be steps or no with `{name}`, which has no epochs"
            yield getattr(recipe, strategy) != "epoch", strategy, rule
    has_two = recipe.joint_vocabulary is False or recipe.target_tokenizer_kind or recipe.target_vocab_size
    rule = "be left out with two vocabularies. Its marks are tokens of a joint one"
    yield "terms" not in recipe.augmentation or not has_two, "augmentation.terms", rule
    for group in ("tasks", "datasets"):
        yield from _rules_of_parts(recipe, group)
    yield not recipe.streaming or recipe.max_steps > 0, "streaming", "come with `max_steps`: it has no length"
    if recipe.subword_sampling is not None:
        for name in ("tokenizer_kind", "target_tokenizer_kind"):
            rule = f"be one of {', '.join(SAMPLED_KINDS)} with `subword_sampling`"
            yield getattr(recipe, name) in (None, *SAMPLED_KINDS), name, rule
    yield from _rules_of_best(recipe)
    for name in (name for name in ("average_last", "average_best") if getattr(recipe, name) is not None):
        limit = recipe.save_total_limit
        yield limit is None or getattr(recipe, name) <= limit, name, f"be at most `save_total_limit` {limit}"
        yield not recipe.load_best_model_at_end, "load_best_model_at_end", f"be false with `{name}`"
        yield recipe.save_strategy != "no", "save_strategy", f"be steps, epoch or best with `{name}`"
    if recipe.average_best is not None and recipe.save_strategy != "best":
        # A checkpoint that is not evaluated has no score.
        is_equal = recipe.save_strategy == recipe.eval_strategy
        yield is_equal, "save_strategy", "be best or the `eval_strategy` with `average_best`"
        # `eval_steps` is `logging_steps` by default. Both may be shares of the run.
        steps = recipe.eval_steps or recipe.logging_steps
        times = recipe.save_steps / steps
        is_multiple = (recipe.save_steps < 1) == (steps < 1) and abs(times - round(times)) <= 1e-6
        is_evaluated = recipe.save_strategy != "steps" or is_multiple
        yield is_evaluated, "save_steps", "be a multiple of `eval_steps` with `average_best`"


def _rules_of_best(recipe: Any) -> Iterator[Rule]:
    """Yield the rules by which checkpoints are selected by a metric that is evaluated during training."""
    metric, is_evaluated = recipe.metric_for_best_model, recipe.eval_strategy != "no"
    for name in ("early_stopping_patience", "average_best"):
        yield is_evaluated or getattr(recipe, name) is None, name, "come with `eval_strategy` steps or epoch"
    has_metric = metric or recipe.load_best_model_at_end or not recipe.early_stopping_patience
    yield has_metric, "early_stopping_patience", "come with `metric_for_best_model`"
    if is_evaluated and (metric is not None or recipe.average_best is not None):
        evaluated = ["loss", "perplexity"]
        if decodes(recipe):
            names = recipe.metrics or DEFAULT_METRICS
            tasks = [task for task, fields in recipe.tasks.items() if any(map(fields.get, VALIDATION_FIELDS))]
            evaluated += [*names, *(f"{task}_{name}" for task, name in itertools.product(tasks, names))]
        is_known = (metric or DEFAULT_METRICS[0]).removeprefix("eval_") in evaluated
        yield is_known, "metric_for_best_model", f"be evaluated while training: {', '.join(evaluated)}"


def check_evaluated(recipe: Any) -> None:
    """Refuse an evaluation without data, which a Trainer would notice after reading the corpus."""
    fields_of_parts = recipe.tasks.values() or [{name: getattr(recipe, name) for name in VALIDATION_FIELDS}]
    has_pairs = any(fields.get(name) for fields in fields_of_parts for name in VALIDATION_FIELDS)
    has_any = has_pairs or (not recipe.tasks and recipe.validation_text_file)
    is_pairs = recipe.objective == "pairs"
    rule = f"come with {'`validation_file` or `num_validation`' if is_pairs else '`validation_text_file`'}"
    _check(
        recipe,
        [
            ((has_pairs and is_pairs) or not recipe.choose_decoding, "choose_decoding", rule),
            (has_any or recipe.eval_strategy == "no", "eval_strategy", rule),
        ],
    )


def decodes(recipe: Any) -> bool:
    """Return True if validation pairs are decoded during training."""
    return recipe.objective == "pairs" and bool(recipe.predict_with_generate) and not recipe.prediction_loss_only


def check_conflicts(recipe: Any, names: Collection[str] | None = None) -> None:
    """Refuse two fields that contradict each other, of which one is among `names`; None for all."""
    for first, conflicting, reason in _CONFLICTS:
        if getattr(recipe, first) in (False, type(recipe).model_fields[first].default):
            continue
        for other in conflicting:
            # `null` unsets a value of another recipe.
            is_named = names is None or first in names or other in names
            if is_named and recipe.is_set(other) and getattr(recipe, other) is not None:
                raise ValueError(
                    f"`{first}` and `{other}` must not both be given, because {reason}, "
                    f"got {getattr(recipe, first)!r} and {getattr(recipe, other)!r}."
                )


def _rules_of_parts(recipe: Any, group: str) -> Iterator[Rule]:
    """Yield the rules of each of the `tasks` or of the `datasets`."""
    for part, fields in getattr(recipe, group).items():
        for name in fields:
            path = f"{group}.{part}.{name}"
            if name == "weight" and group == "tasks":
                is_number = isinstance(fields[name], int | float) and not isinstance(fields[name], bool)
                yield is_number and 0 < fields[name] < float("inf"), path, "be a number above 0"
                continue
            is_data = group_of(name, f"`{group}.{part}`") == "data"
            yield is_data and name not in ("data_dir", "streaming", "objective"), path, "be a field of data"
            is_trained = group == "tasks" or not name.startswith(_SCORED)
            yield is_trained, path, "be a field of training pairs"
