"""Checks of a recipe: ranges of fields, and fields that contradict each other.

Two fields that contradict each other are refused. A field without effect, because another one is missing, is only warned of.
"""

import dataclasses
import itertools
import logging
import math
import os
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from metaphrase.data.augmentation import AUGMENTATIONS
from metaphrase.data.pairs import SPLITS
from metaphrase.data.stages import parse_stages
from metaphrase.data.token_budget import check_beside_budget
from metaphrase.evaluation.metrics import DEFAULT_METRICS
from metaphrase.modeling.configuration_metaphrase import MAX_SIZE
from metaphrase.storage.model_files import check_options
from metaphrase.tokenization.hints import did_you_mean
from metaphrase.tokenization.subword_sampling import SAMPLED_KINDS
from metaphrase.training.recipe.fields import TRAINING_FIELDS, group_of

if TYPE_CHECKING:
    from metaphrase.training.recipe.recipe import Recipe

logger = logging.getLogger(__name__)


class _Range(NamedTuple):
    """Numbers from `low` to `high`. A round bracket in `ends` leaves an end out."""

    low: float
    high: float = MAX_SIZE
    ends: str = "[]"

    def holds(self, value: float) -> bool:
        is_high_enough = value >= self.low if self.ends[0] == "[" else value > self.low
        return is_high_enough and (value <= self.high if self.ends[1] == "]" else value < self.high)

    def __str__(self) -> str:
        low = f"{'at least' if self.ends[0] == '[' else 'above'} {self.low:.10g}"
        high = f" and {'at most' if self.ends[1] == ']' else 'below'} {self.high:.10g}"
        return low if self.high == MAX_SIZE else low + high


# Other numbers have the minimum of their field. Infinite values and those that are too large to compute with are in no range.
_RANGES = {
    name: numbers
    for numbers, names in (
        (_Range(1), "gradient_accumulation_steps eval_accumulation_steps per_device_train_batch_size"),
        (_Range(1), "per_device_eval_batch_size save_total_limit dataloader_prefetch_factor ddp_bucket_cap_mb"),
        (_Range(1), "ddp_timeout torch_empty_cache_steps"),
        (_Range(-1), "max_steps"),
        (_Range(0), "num_train_epochs warmup_steps eval_delay max_grad_norm neftune_noise_alpha"),
        (_Range(0, ends="(]"), "logging_steps eval_steps save_steps lora_alpha"),
        (_Range(0, 100), "learning_rate weight_decay"),
        (_Range(0, 1000), "r_drop_alpha"),
        (_Range(0, 1, "[)"), "label_smoothing_factor exponential_average_decay lora_dropout adam_beta1 adam_beta2"),
        (_Range(0, 1, "()"), "noise_density subword_sampling"),
        (_Range(0, 1, "(]"), "layer_decay adam_epsilon"),
        (_Range(0, 2**32 - 1), "seed data_seed"),
        # More processes than a machine can serve.
        (_Range(0, 8 * (os.cpu_count() or 1)), "dataloader_num_workers"),
        (_Range(2, 2**20), "generation_max_length"),
    )
    for name in names.split()
}
_MAX_FACTOR = 1000
# Fields that become settings of `generate()`.
_OF_GENERATION = {name: name for name in ("num_beams", "length_penalty", "no_repeat_ngram_size", "repetition_penalty")}
_OF_GENERATION |= {"generation_num_beams": "num_beams"}
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
# Fields that do nothing without another one.
_OF_TEXT = ("train_text_file", "validation_text_file", "noise_density", "mean_span_length", "spans_anywhere")
_NO_EFFECT_WITHOUT = {
    **dict.fromkeys((*_OF_TEXT, "end_documents", "remainder", "num_sentinels"), "objective"),
    **dict.fromkeys((f"dataset_{split}_split" for split in SPLITS), "dataset_name"),
    **dict.fromkeys(("task_mixing", "mixing_temperature", "mixing_limit"), "tasks"),
    **dict.fromkeys(("lora_alpha", "lora_dropout", "lora_target_modules"), "lora_rank"),
    "dataset_config_name": "dataset_name",
    "pairs_in_buffer": "streaming",
    "early_stopping_threshold": "early_stopping_patience",
    "r_drop_start_step": "r_drop_alpha",
    "exponential_average_warmup": "exponential_average_decay",
}
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
        (name, ("exponential_average_decay", "lora_rank"), "a checkpoint does not hold the whole model that is kept")
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
_NO_EFFECT_ON_TEXT = ("metrics", "source_prefix", "source_column", "target_column", "too_long", "empty", "malformed")
_NO_EFFECT_ON_TEXT += ("max_test_samples", "bleu_tokenize", "max_decoded_samples")
_NO_EFFECT_ON_OBJECTIVE = {
    "ul2": ("noise_density", "mean_span_length"),
    "text_infilling": ("spans_anywhere", "num_sentinels"),
}
# Columns of a training pair that hold no lengths.
_NO_LENGTHS = ("input_ids", "labels")
# Beginnings of fields of validation and test pairs.
_SCORED = ("validation", "test", "num_", "dataset_validation", "dataset_test", "max_validation", "max_test")
# Any of these gives a task validation pairs.
VALIDATION_FIELDS = ("validation_file", "validation_source_file", "dataset_validation_split", "num_validation")


def check_recipe(recipe: "Recipe") -> None:
    """Refuse a recipe that is out of range or contradicts itself, and warn of fields without effect.

    Raises:
        ValueError: Naming the fields, what must hold and what was given.
    """
    _check_ranges(recipe)
    check_conflicts(recipe)
    for name, needed in _NEEDS.items():
        if recipe.is_set(name) and not recipe.is_set(needed):
            raise ValueError(f"`{name}` must come with `{needed}`, got {getattr(recipe, name)!r} without.")
    for name in ("source_lang", "target_lang"):
        if recipe.is_set(name) and (recipe.tokenizer_name_or_path or recipe.model_name_or_path) is None:
            raise ValueError(f"`{name}` must come with a tokenizer that exists, got {getattr(recipe, name)!r} without.")
    if recipe.objective != "pairs" and recipe.joint_vocabulary is False:
        raise ValueError(
            f"`joint_vocabulary` must not be false for `objective` {recipe.objective}: both sides are one text."
        )
    if recipe.streaming:
        _check_streaming(recipe)
    _check_parts(recipe, "tasks")
    _check_parts(recipe, "datasets")
    if recipe.stages:
        _check_stages(recipe)
    _check_augmentation(recipe)
    if recipe.max_tokens_per_batch is not None:
        check_beside_budget(recipe, recipe.max_tokens_per_batch)
    _check_evaluation(recipe)
    _check_averages(recipe)
    if 0 < recipe.max_steps <= recipe.r_drop_start_step:
        raise ValueError(
            f"`r_drop_start_step` must be below `max_steps` {recipe.max_steps}, got {recipe.r_drop_start_step}."
        )
    _warn_of_no_effect(recipe)


def check_conflicts(recipe: "Recipe", names: Collection[str] | None = None) -> None:
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


def strategy_name(value: object) -> str:
    """Return the name of a strategy, which is a text or an enum of transformers."""
    return str(getattr(value, "value", value))


def _check_ranges(recipe: "Recipe") -> None:
    for item in dataclasses.fields(recipe):
        name, value = item.name, getattr(recipe, item.name)
        if value is None:
            continue
        if name in _OF_GENERATION:
            check_options({_OF_GENERATION[name]: value}, name)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            minimum = item.metadata.get("minimum")
            numbers = _RANGES.get(name, _Range(-MAX_SIZE if minimum is None else minimum))
            if not numbers.holds(value):
                rule = f"at most {MAX_SIZE}" if value > MAX_SIZE else numbers
                raise ValueError(f"`{name}` must be {rule}, got {value}.")
        choices = TRAINING_FIELDS[name].metadata.get("choices") if name in TRAINING_FIELDS else None
        for text in _texts_in(value):
            if not text.isprintable() and any("\ud800" <= character <= "\udfff" for character in text):
                # No file could be written with it, such as the model card after training.
                raise ValueError(f"`{name}` must be text that UTF-8 can hold, got {text!r}.")
        if choices and strategy_name(value) not in choices:
            raise ValueError(f"`{name}` must be one of {', '.join(choices)}, got {strategy_name(value)!r}.")
    for part, factor in recipe.learning_rate_factors.items():
        if not _is_positive_number(factor) or factor > _MAX_FACTOR:
            raise ValueError(
                f"`learning_rate_factors` must hold numbers above 0 and at most {_MAX_FACTOR}, got {factor!r} for {part!r}. "
                "List parts that are not trained in `freeze`."
            )
    if recipe.max_steps == 0 or (recipe.max_steps < 0 and recipe.num_train_epochs <= 0):
        raise ValueError(
            f"`max_steps` or `num_train_epochs` must be above 0, got {recipe.max_steps} and {recipe.num_train_epochs}."
        )
    if recipe.length_column_name in _NO_LENGTHS:
        raise ValueError(
            f"`length_column_name` must not be one of {', '.join(_NO_LENGTHS)}, got {recipe.length_column_name}."
        )
    for name, reason in LEFT_OUT.items():
        if value := getattr(recipe, name):
            raise ValueError(f"`{name}` must be left out, got {value!r}. {reason}")


def _texts_in(value: Any) -> Iterator[str]:
    """Yield all texts in a value and in the lists and mappings in it, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple | dict):
        for item in itertools.chain(value, value.values() if isinstance(value, dict) else ()):
            yield from _texts_in(item)


def _is_positive_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 < value < math.inf


def _check_streaming(recipe: "Recipe") -> None:
    for name in ("max_tokens_per_batch", "max_steps"):
        if not (getattr(recipe, name) or 0) > 0:
            raise ValueError(
                f"`streaming` must come with `{name}`, since a stream has no length, got {getattr(recipe, name)}."
            )
    _refuse_epochs(recipe, "streaming", "a stream ends no epoch")


def _refuse_epochs(recipe: "Recipe", field: str, reason: str) -> None:
    for name in ("save_strategy", "eval_strategy", "logging_strategy"):
        if strategy_name(getattr(recipe, name)) == "epoch":
            raise ValueError(f"`{name}` must be steps or no with `{field}`, since {reason}, got epoch.")


def _check_stages(recipe: "Recipe") -> None:
    parse_stages(recipe.stages, list(recipe.datasets))
    if recipe.max_tokens_per_batch is None:
        raise ValueError("`stages` must come with `max_tokens_per_batch`, such as 4000, got none.")
    _refuse_epochs(recipe, "stages", "all stages are one epoch")


def _check_parts(recipe: "Recipe", group: str) -> None:
    """Check the fields of each of the `tasks` or of the `datasets`."""
    for part, fields in getattr(recipe, group).items():
        path = f"{group}.{part}"
        where = f"`{path}`"
        if not isinstance(fields, dict):
            raise ValueError(f"{where} must hold fields with values, got {fields!r}.")
        for name in fields:
            if name != "weight" and group_of(name, where) != "data":
                weight = "a `weight` and " if group == "tasks" else ""
                raise ValueError(f"{where} must hold {weight}fields of data, got `{name}`.")
            if name in ("data_dir", "streaming", "objective"):
                raise ValueError(f"{where} must not hold `{name}`, which is that of the recipe.")
            if group == "datasets" and (name == "weight" or name.startswith(_SCORED)):
                raise ValueError(f"{where} must hold fields of training pairs, got `{name}`.")
        if not _is_positive_number(weight := fields.get("weight", 1)):
            raise ValueError(f"`{path}.weight` must be a number above 0, got {weight!r}.")


def _check_augmentation(recipe: "Recipe") -> None:
    for name in ("tokenizer_kind", "target_tokenizer_kind"):
        kind = getattr(recipe, name)
        if recipe.subword_sampling is not None and kind not in (None, *SAMPLED_KINDS):
            raise ValueError(f"`{name}` must be one of {', '.join(SAMPLED_KINDS)} with `subword_sampling`, got {kind}.")
    for name, rate in recipe.augmentation.items():
        if name not in AUGMENTATIONS:
            raise ValueError(
                f"`augmentation` must have keys among {', '.join(AUGMENTATIONS)}, got {name!r}."
                + did_you_mean(name, AUGMENTATIONS)
            )
        if not _is_positive_number(rate) or rate > 1:
            raise ValueError(f"`augmentation.{name}` must be a number above 0 and at most 1, got {rate!r}.")
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


def _check_evaluation(recipe: "Recipe") -> None:
    # A model to fine-tune may have beams in its generation settings.
    has_beams = (recipe.num_beams or 1) > 1 or (recipe.num_beams is None and recipe.model_name_or_path is not None)
    if recipe.length_penalty not in (None, 1) and not has_beams:
        raise ValueError(
            f"`length_penalty` must come with `num_beams` above 1, got {recipe.length_penalty} and {recipe.num_beams or 1}."
        )
    for name in ("early_stopping_patience", "average_best"):
        if getattr(recipe, name) is not None and strategy_name(recipe.eval_strategy) == "no":
            raise ValueError(f"`{name}` must come with `eval_strategy` steps or epoch, got no.")
    if recipe.early_stopping_patience and not recipe.metric_for_best_model and not recipe.load_best_model_at_end:
        raise ValueError("`early_stopping_patience` must come with `metric_for_best_model`, got null.")
    has_metric = recipe.metric_for_best_model is not None or recipe.load_best_model_at_end
    if strategy_name(recipe.save_strategy) == "best" and not has_metric:
        raise ValueError("`save_strategy` best must come with `metric_for_best_model`, such as bleu, got null.")
    _check_best(recipe)


def check_evaluated(recipe: "Recipe") -> None:
    """Refuse an evaluation without data, which a Trainer would notice after reading the corpus.

    Raises:
        ValueError: If there is neither a file nor a number of pairs to evaluate.
    """
    strategy = strategy_name(recipe.eval_strategy)
    if recipe.tasks:
        has_any = any(fields.get(name) for fields in recipe.tasks.values() for name in VALIDATION_FIELDS)
    else:
        has_any = any(getattr(recipe, name) for name in (*VALIDATION_FIELDS, "validation_text_file"))
    names = "`validation_text_file`" if recipe.objective != "pairs" else "`validation_file` or `num_validation`"
    if recipe.choose_decoding and not (has_any and recipe.objective == "pairs"):
        raise ValueError(
            "`choose_decoding` must come with `validation_file` or `num_validation`, got no pairs to choose on."
        )
    if strategy != "no" and not has_any:
        raise ValueError(f"`eval_strategy` must come with {names}, got {strategy} and nothing to evaluate.")


def decodes(recipe: "Recipe") -> bool:
    """Return True if validation pairs are decoded during training."""
    return recipe.objective == "pairs" and bool(recipe.predict_with_generate) and not recipe.prediction_loss_only


def _check_best(recipe: "Recipe") -> None:
    """Refuse a metric of the best checkpoint that is not evaluated during training."""
    metric = recipe.metric_for_best_model
    if strategy_name(recipe.eval_strategy) == "no" or (metric is None and recipe.average_best is None):
        return
    evaluated = ["loss", "perplexity"]
    if decodes(recipe):
        names = recipe.metrics or DEFAULT_METRICS
        tasks = [task for task, fields in recipe.tasks.items() if any(fields.get(name) for name in VALIDATION_FIELDS)]
        evaluated += [*names, *(f"{task}_{name}" for task in tasks for name in names)]
    if (metric or DEFAULT_METRICS[0]).removeprefix("eval_") in evaluated:
        return
    shown = repr(metric) if metric is not None else f"{DEFAULT_METRICS[0]!r}, the default of `average_best`"
    raise ValueError(
        f"`metric_for_best_model` must be evaluated while training, one of {', '.join(evaluated)}, got {shown}."
    )


def _check_averages(recipe: "Recipe") -> None:
    name = next((name for name in ("average_last", "average_best") if getattr(recipe, name) is not None), None)
    if name is None:
        return
    limit = recipe.save_total_limit
    if limit is not None and getattr(recipe, name) > limit:
        raise ValueError(f"`{name}` must be at most `save_total_limit`, got {getattr(recipe, name)} and {limit}.")
    if recipe.load_best_model_at_end:
        raise ValueError(f"`load_best_model_at_end` must be false with `{name}`, the finished model, got true.")
    if (save := strategy_name(recipe.save_strategy)) == "no":
        raise ValueError(f"`{name}` must come with `save_strategy` steps, epoch or best, got no.")
    if name == "average_best":
        _check_scored_checkpoints(recipe, save, strategy_name(recipe.eval_strategy))


def _check_scored_checkpoints(recipe: "Recipe", save: str, evaluate: str) -> None:
    """Refuse to save checkpoints, of which the best are averaged, at steps without evaluation."""
    if save == "best":
        return
    if save != evaluate:
        raise ValueError(
            f"`average_best` must come with a `save_strategy` that is best or the `eval_strategy`, got {save} and {evaluate}: "
            "a checkpoint that is not evaluated has no score."
        )
    if save == "steps" and not saves_evaluated_weights(recipe):
        raise ValueError(
            f"`save_steps` must be a multiple of `eval_steps` with `average_best`, got {recipe.save_steps} and "
            f"{recipe.eval_steps or recipe.logging_steps}: a checkpoint that is not evaluated has no score."
        )


def saves_evaluated_weights(recipe: "Recipe") -> bool:
    """Return True if each step that saves a checkpoint also evaluates it."""
    # `eval_steps` is `logging_steps` by default. Both may be shares of the run.
    steps = recipe.eval_steps or recipe.logging_steps or recipe.save_steps
    times = recipe.save_steps / steps
    return (recipe.save_steps < 1) == (steps < 1) and abs(times - round(times)) <= 1e-6


def _warn_of_no_effect(recipe: "Recipe") -> None:
    ineffective = {
        name: f"without `{needed}`" for name, needed in _NO_EFFECT_WITHOUT.items() if not recipe.is_set(needed)
    }
    if recipe.objective != "pairs":
        names = (*_NO_EFFECT_ON_TEXT, *_NO_EFFECT_ON_OBJECTIVE.get(recipe.objective, ()))
        ineffective |= dict.fromkeys(names, f"with `objective` {recipe.objective}")
    elif not decodes(recipe):
        ineffective["max_decoded_samples"] = "if nothing is decoded during training (`predict_with_generate`)"
    for split in ("validation", "test"):
        if getattr(recipe, f"num_{split}") > 0:
            ineffective[f"max_{split}_samples"] = f"with `num_{split}`"
    if recipe.task_mixing != "temperature":
        ineffective.setdefault("mixing_temperature", f"with `task_mixing` {recipe.task_mixing}")
    if recipe.task_mixing == "equal":
        ineffective.setdefault("mixing_limit", "with `task_mixing` equal")
    parts = [f"`{name}` {condition}" for name, condition in ineffective.items() if recipe.is_set(name)]
    if parts:
        logger.warning("These fields have no effect: %s.", ", ".join(parts))
