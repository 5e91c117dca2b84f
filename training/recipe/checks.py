"""Checks of a recipe's fields against their ranges and against each other."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from metaphrase.data.pairs import SPLITS
from metaphrase.data.token_budget import check_beside_budget
from metaphrase.evaluation.metrics import DEFAULT_METRICS, check_bleu_is_computed

if TYPE_CHECKING:
    from metaphrase.training.recipe.recipe import Recipe

_EXISTING_TOKENIZER = ("tokenizer_name_or_path", "model_name_or_path")
# What an existing one has already.
_OF_A_TRAINED_TOKENIZER = ("tokenizer_kind", "vocab_size", "target_vocab_size", "joint_vocabulary", "lowercase")
_OF_A_TRAINED_TOKENIZER += ("normalization", "min_frequency", "joiner", "num_sentinels")
# Shares, and which of 0 and 1 they may be.
_FROM_0, _ABOVE_0, _TO_1 = "at least 0 and below 1", "above 0 and below 1", "above 0 and at most 1"
_BOUNDS = {"label_smoothing_factor": _FROM_0, "exponential_average_decay": _FROM_0, "lora_dropout": _FROM_0}
_BOUNDS |= {"noise_density": _ABOVE_0, "layer_decay": _TO_1}
# What a training pair holds already that is no length.
_NO_LENGTHS = ("input_ids", "labels")
# What an objective has no use for.
_FOREIGN = {
    "ul2": (("noise_density", "mean_span_length"), "it mixes denoisers that have their own"),
    "text_infilling": (("spans_anywhere", "num_sentinels"), "its spans lie anywhere, behind one mask"),
}
# Any of these gives a task validation pairs.
_VALIDATION = ("validation_file", "validation_source_file", "dataset_validation_split", "num_validation")


def check_recipe(recipe: "Recipe", minimums: Mapping[str, float | None]) -> None:
    """Refuses a recipe that is out of range or contradicts itself.

    Raises:
        ValueError: Naming the fields, what must hold and what was given.
    """
    for name, minimum in minimums.items():
        value = getattr(recipe, name)
        if minimum is not None and value is not None and value < minimum:
            raise ValueError(f"`{name}` must be at least {minimum}, got {value}.")
    _check_shares(recipe)
    _check_places(recipe)
    _check_dataset(recipe)
    _check_streaming(recipe)
    _check_objective(recipe)
    _check_tasks(recipe)
    _check_batches(recipe)
    _check_tokenizer_and_model(recipe)
    _check_evaluation(recipe)
    _check_technique(recipe)
    if recipe.learning_rate < 0:
        raise ValueError(f"`learning_rate` must be at least 0, got {recipe.learning_rate}.")
    if recipe.max_steps == 0 or (recipe.max_steps < 0 and recipe.num_train_epochs <= 0):
        raise ValueError(
            f"`max_steps` or `num_train_epochs` must be above 0, got {recipe.max_steps} and {recipe.num_train_epochs}."
        )
    if recipe.generation_config is not None:
        raise ValueError(
            f"`generation_config` must be left out, got {recipe.generation_config!r}: it would take the place of all that a "
            "recipe says of decoding, by `num_beams`, `length_penalty`, `generation_max_length` and others."
        )
    if recipe.push_to_hub:
        raise ValueError(
            "`push_to_hub` must be left out, got true: `metaphrase push` uploads what a run has left, scores and all, without "
            "its states."
        )


def _refuse_together(recipe: "Recipe", first: str, second: str, why: str) -> None:
    if recipe.is_set(first) and recipe.is_set(second):
        raise ValueError(
            f"`{first}` and `{second}` must not both be given, because {why}, "
            f"got {getattr(recipe, first)!r} and {getattr(recipe, second)!r}."
        )


def _strategy(value: object) -> str:
    """The name of when something happens, which transformers may have made an enum of."""
    return str(getattr(value, "value", value))


def _require_with(recipe: "Recipe", name: str, needed: str) -> None:
    if recipe.is_set(name) and not recipe.is_set(needed):
        raise ValueError(f"`{name}` must come with `{needed}`, got {getattr(recipe, name)!r} without.")


def _check_shares(recipe: "Recipe") -> None:
    for name, bounds in _BOUNDS.items():
        if (value := getattr(recipe, name)) is None:
            continue
        may_be_0, may_be_1 = bounds == _FROM_0, bounds == _TO_1
        if not (0 < value < 1 or (value == 0 and may_be_0) or (value == 1 and may_be_1)):
            raise ValueError(f"`{name}` must be {bounds}, got {value}.")


def _check_batches(recipe: "Recipe") -> None:
    """What a budget of tokens decides by itself."""
    if recipe.length_column_name in _NO_LENGTHS:
        raise ValueError(
            f"`length_column_name` must not be one of {', '.join(_NO_LENGTHS)}, which are what a pair holds, "
            f"got {recipe.length_column_name}."
        )
    if recipe.max_tokens_per_batch is not None:
        check_beside_budget(recipe, recipe.max_tokens_per_batch)


def _check_places(recipe: "Recipe") -> None:
    for split in SPLITS:
        one, source, target = f"{split}_file", f"{split}_source_file", f"{split}_target_file"
        _require_with(recipe, source, target)
        _require_with(recipe, target, source)
        _refuse_together(recipe, one, source, "a split comes from one place")
        if split != "train" and getattr(recipe, f"num_{split}") > 0:
            _refuse_together(recipe, f"num_{split}", f"max_{split}_samples", "the first says how many there are")
            for name in (one, source, f"dataset_{split}_split"):
                _refuse_together(recipe, f"num_{split}", name, f"the {split} pairs are given or taken out of train")


def _check_dataset(recipe: "Recipe") -> None:
    for split in SPLITS:
        for name in (f"{split}_file", f"{split}_source_file"):
            _refuse_together(recipe, "dataset_name", name, "pairs come from a data set or from files")
        _require_with(recipe, f"dataset_{split}_split", "dataset_name")
    _require_with(recipe, "dataset_config_name", "dataset_name")


def _check_streaming(recipe: "Recipe") -> None:
    if not recipe.streaming:
        _require_with(recipe, "pairs_in_buffer", "streaming")
        return
    for name in ("max_tokens_per_batch", "max_steps"):
        if not (getattr(recipe, name) or 0) > 0:
            raise ValueError(
                f"`streaming` must come with `{name}`, since a stream has no length, got {getattr(recipe, name)}."
            )
    for name in ("num_validation", "num_test"):
        _refuse_together(recipe, "streaming", name, "pairs cannot be taken out of a stream")
    for name in ("save_strategy", "eval_strategy", "logging_strategy"):
        if _strategy(getattr(recipe, name)) == "epoch":
            raise ValueError(f"`{name}` must be steps or no with `streaming`, since a stream ends no epoch, got epoch.")


def _check_objective(recipe: "Recipe") -> None:
    of_text = ("train_text_file", "validation_text_file", "noise_density", "mean_span_length", "spans_anywhere")
    if recipe.objective == "pairs":
        for name in (*of_text, "end_documents", "remainder", "num_sentinels"):
            _require_with(recipe, name, "objective")
        return
    foreign, why = _FOREIGN.get(recipe.objective, ((), ""))
    for name in foreign:
        _refuse_together(recipe, "objective", name, why)
    of_pairs = [f"{split}{kind}" for split in SPLITS for kind in ("_file", "_source_file")]
    of_pairs += ["dataset_name", "streaming", "metrics", "target_vocab_size", "num_validation", "num_test"]
    of_pairs += ["source_prefix", "source_column", "target_column", "too_long", "empty", "malformed"]
    of_pairs += ["max_test_samples", "bleu_tokenize", "max_decoded_samples"]
    for name in of_pairs:
        _refuse_together(recipe, "objective", name, "it is learned from plain text")
    if recipe.is_set("joint_vocabulary") and not recipe.joint_vocabulary:
        raise ValueError(
            f"`joint_vocabulary` must not be false for `objective` {recipe.objective}: both sides are one text."
        )


def _check_tasks(recipe: "Recipe") -> None:
    if not recipe.tasks:
        for name in ("task_mixing", "mixing_temperature", "mixing_limit"):
            _require_with(recipe, name, "tasks")
        return
    mixing = recipe.task_mixing
    if recipe.mixing_temperature != 2 and mixing != "temperature":
        raise ValueError(
            f"`mixing_temperature` must come with `task_mixing` temperature, got {recipe.mixing_temperature} and {mixing}."
        )
    if recipe.mixing_limit is not None and mixing == "equal":
        raise ValueError(
            f"`mixing_limit` must come with `task_mixing` proportional or temperature, got {recipe.mixing_limit} and equal."
        )
    of_one = [f"{split}{kind}" for split in SPLITS for kind in ("_file", "_source_file")]
    of_one += ["dataset_name", "source_prefix", "source_column", "target_column", "num_validation", "num_test"]
    of_one += ["streaming", "objective", *(f"max_{split}_samples" for split in SPLITS)]
    for name in of_one:
        _refuse_together(recipe, "tasks", name, "each task has its own pairs, read as a whole")
    for task, fields in recipe.tasks.items():
        if not isinstance(fields, dict):
            raise ValueError(f"`tasks.{task}` must hold fields with values, got {fields!r}.")
        for name in fields:
            if name != "weight" and recipe.group_of(name, f"`tasks.{task}`") != "data":
                raise ValueError(f"`tasks.{task}` must hold a `weight` and fields of data, got `{name}`.")
        for name in ("data_dir", "streaming", "objective"):
            if name in fields:
                raise ValueError(f"`tasks.{task}` must not hold `{name}`, which is that of the recipe.")
        weight = fields.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight > 0:
            raise ValueError(f"`tasks.{task}.weight` must be a number above 0, got {weight!r}.")


def _check_tokenizer_and_model(recipe: "Recipe") -> None:
    if recipe.joint_vocabulary:
        for name in ("target_vocab_size", "target_tokenizer_name_or_path"):
            _refuse_together(recipe, "joint_vocabulary", name, "a joint vocabulary has one tokenizer")
    _require_with(recipe, "target_tokenizer_name_or_path", "tokenizer_name_or_path")
    for name in ("source_lang", "target_lang"):
        if recipe.is_set(name) and not (recipe.tokenizer_name_or_path or recipe.model_name_or_path):
            raise ValueError(f"`{name}` must come with a tokenizer that exists, got {getattr(recipe, name)!r} without.")
    for name in ("preset", "model"):
        _refuse_together(recipe, "model_name_or_path", name, "a model to fine-tune has its dimensions")
    existing = next((name for name in _EXISTING_TOKENIZER if recipe.is_set(name)), None)
    for name in _OF_A_TRAINED_TOKENIZER if existing is not None else ():
        # `null` unsets what another recipe says.
        if getattr(recipe, name) is not None:
            _refuse_together(recipe, existing, name, "a tokenizer that exists is as it was trained")


def _check_evaluation(recipe: "Recipe") -> None:
    if recipe.max_decoded_samples is not None and (field := _hindrance(recipe)) is not None:
        given = str(bool(getattr(recipe, field))).lower()
        raise ValueError(
            f"`max_decoded_samples` must be left out with {given} `{field}`, by which nothing is decoded while training, got "
            f"{recipe.max_decoded_samples}."
        )
    check_bleu_is_computed(recipe.metrics or DEFAULT_METRICS, recipe.bleu_tokenize)
    if recipe.repetition_penalty is not None and recipe.repetition_penalty <= 0:
        # transformers finds that when it decodes, at the first evaluation.
        raise ValueError(f"`repetition_penalty` must be above 0, got {recipe.repetition_penalty}.")
    penalty = recipe.length_penalty
    # A model to fine-tune may bring its beams along.
    has_beams = (recipe.num_beams or 1) > 1 or (recipe.num_beams is None and recipe.model_name_or_path is not None)
    if penalty not in (None, 1) and not has_beams:
        raise ValueError(
            f"`length_penalty` must come with `num_beams` above 1, got {penalty} and {recipe.num_beams or 1}."
        )
    _check_best(recipe)
    _require_with(recipe, "early_stopping_threshold", "early_stopping_patience")
    if recipe.early_stopping_patience is None:
        return
    if _strategy(recipe.eval_strategy) == "no":
        raise ValueError("`early_stopping_patience` must come with `eval_strategy` steps or epoch, got no.")
    if not recipe.metric_for_best_model and not recipe.load_best_model_at_end:
        raise ValueError("`early_stopping_patience` must come with `metric_for_best_model`, got null.")


def check_evaluated(recipe: "Recipe") -> None:
    """Refuses an evaluation of nothing, which a Trainer would tell of when all data are read.

    Raises:
        ValueError: If there is neither a file nor a number of pairs to evaluate.
    """
    strategy = _strategy(recipe.eval_strategy)
    if recipe.tasks:
        has_any = any(fields.get(name) for fields in recipe.tasks.values() for name in _VALIDATION)
    else:
        has_any = any(getattr(recipe, name) for name in (*_VALIDATION, "validation_text_file"))
    if strategy != "no" and not has_any:
        names = "`validation_text_file`" if recipe.objective != "pairs" else "`validation_file` or `num_validation`"
        raise ValueError(f"`eval_strategy` must come with {names}, got {strategy} and nothing to evaluate.")


def _hindrance(recipe: "Recipe") -> str | None:
    """What keeps validation pairs from being decoded while training; the finished model is scored all the same."""
    needed = {"predict_with_generate": True, "prediction_loss_only": False}
    return next((name for name, value in needed.items() if bool(getattr(recipe, name)) is not value), None)


def _check_best(recipe: "Recipe") -> None:
    """What tells the best checkpoint must be among what is evaluated while training."""
    given = recipe.metric_for_best_model
    if _strategy(recipe.eval_strategy) == "no" or (given is None and recipe.average_best is None):
        return
    evaluated = ["loss", "perplexity"]
    if recipe.objective == "pairs" and _hindrance(recipe) is None:
        names = recipe.metrics or DEFAULT_METRICS
        tasks = [task for task, fields in recipe.tasks.items() if any(fields.get(name) for name in _VALIDATION)]
        evaluated += [*names, *(f"{task}_{name}" for task in tasks for name in names)]
    if (given or DEFAULT_METRICS[0]).removeprefix("eval_") in evaluated:
        return
    what = repr(given) if given is not None else f"{DEFAULT_METRICS[0]!r}, by which `average_best` chooses by default"
    raise ValueError(
        f"`metric_for_best_model` must be evaluated while training, one of {', '.join(evaluated)}, got {what}."
    )


def _check_technique(recipe: "Recipe") -> None:
    for part, factor in recipe.learning_rate_factors.items():
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < math.inf:
            raise ValueError(
                f"`learning_rate_factors` must hold numbers above 0, got {factor!r} for {part!r}; `freeze` names what shall "
                "not be trained."
            )
    _require_with(recipe, "r_drop_start_step", "r_drop_alpha")
    if 0 < recipe.max_steps <= recipe.r_drop_start_step:
        raise ValueError(
            f"`r_drop_start_step` must be below `max_steps` {recipe.max_steps}, got {recipe.r_drop_start_step}."
        )
    _require_with(recipe, "exponential_average_warmup", "exponential_average_decay")
    _refuse_together(recipe, "average_last", "average_best", "one mean is kept")
    for name in ("average_last", "average_best"):
        for other in ("exponential_average_decay", "lora_rank"):
            _refuse_together(recipe, name, other, "a checkpoint does not hold the whole model that is kept")
        limit = recipe.save_total_limit
        if limit is not None and (getattr(recipe, name) or 0) > limit:
            raise ValueError(f"`{name}` must be at most `save_total_limit`, got {getattr(recipe, name)} and {limit}.")
        if getattr(recipe, name) is not None and recipe.load_best_model_at_end:
            raise ValueError(f"`load_best_model_at_end` must be false with `{name}`, the finished model, got true.")
        if getattr(recipe, name) is not None and _strategy(recipe.save_strategy) == "no":
            raise ValueError(f"`{name}` must come with `save_strategy` steps, epoch or best, got no.")
    if recipe.average_best is not None and _strategy(recipe.eval_strategy) == "no":
        raise ValueError("`average_best` must come with `eval_strategy` steps or epoch, got no.")
    if recipe.average_best is not None:
        _check_scored_checkpoints(recipe)
    for name in ("lora_alpha", "lora_dropout", "lora_target_modules"):
        _require_with(recipe, name, "lora_rank")
    _require_with(recipe, "lora_rank", "model_name_or_path")
    _refuse_together(recipe, "lora_rank", "freeze", "all but the adapter is frozen")


def _check_scored_checkpoints(recipe: "Recipe") -> None:
    """Checkpoints among which the best are taken must be saved where the model is evaluated."""
    save, evaluate = _strategy(recipe.save_strategy), _strategy(recipe.eval_strategy)
    if save == "best":
        return
    if save != evaluate:
        raise ValueError(
            f"`average_best` must come with a `save_strategy` that is best or the `eval_strategy`, got {save} and {evaluate}: "
            "a checkpoint that is not evaluated has no score."
        )
    # Without its own number, an evaluation comes with each log. Both may be shares of the run.
    steps = recipe.eval_steps or recipe.logging_steps
    if save != "steps" or not steps:
        return
    times = recipe.save_steps / steps
    if (recipe.save_steps < 1) != (steps < 1) or abs(times - round(times)) > 1e-6:
        raise ValueError(
            f"`save_steps` must be a multiple of `eval_steps` with `average_best`, got {recipe.save_steps} and {steps}: a "
            "checkpoint that is not evaluated has no score."
        )
