"""All fields of a recipe, with type, range, default and help, and the rules between them.

A field without effect, because another one is missing, is only warned of.
"""

import enum
import functools
import itertools
import logging
import operator
import os
import re
import types
import typing
from collections.abc import Collection
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model
from transformers import Seq2SeqTrainingArguments

from metaphrase.data.pairs import AUGMENTATIONS, SPLITS
from metaphrase.data.token_budget import check_beside_budget
from metaphrase.errors import MetaphraseError, did_you_mean
from metaphrase.evaluation.metrics import DEFAULT_METRICS, METRICS
from metaphrase.modeling import MetaphraseConfig
from metaphrase.storage.generation_options import GENERATION_OPTIONS
from metaphrase.tokenization import TOKENIZER_KINDS
from metaphrase.tokenization.texts import MAX_LINE_CHARACTERS
from metaphrase.tokenization.tokenizer_trainer import SAMPLED_KINDS

logger = logging.getLogger(__name__)

# One text may hold several names.
Names = Annotated[
    list[str], BeforeValidator(lambda value: re.findall(r"[^,\s]+", value) if isinstance(value, str) else value)
]
_Index = Annotated[int | str | None, Field(union_mode="left_to_right")]
_Column = Annotated[int | str | list[int] | None, Field(union_mode="left_to_right")]
_Share = Annotated[float, Field(gt=0, le=1, strict=True)]


def _field(group: str, text: str, default: Any = None, effect_with: str | None = None, **limits: Any) -> Any:
    """Return a field. It has no effect without the field `effect_with`."""
    return Field(default, description=text, json_schema_extra={"group": group, "effect_with": effect_with}, **limits)


def _limits(option: str) -> dict[str, Any]:
    return {"ge": GENERATION_OPTIONS[option].low, "le": GENERATION_OPTIONS[option].high}


_GROUPS = ("data", "tasks", "stages", "tokenizer", "model", "batches", "technique", "evaluation", "search")
_FIELDS = (partial(_field, group) for group in _GROUPS)
_data, _tasks, _stages, _tokenizer, _model, _batches, _technique, _evaluation, _search = _FIELDS


class OwnFields(BaseModel):
    """The fields that transformers does not have, by group. `metaphrase train --help_fields` prints their help texts."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)

    data_dir: str | None = _data("Folder of relative data files. Give it on the command line.")
    train_file: str | None = _data("Training pairs: .tsv, .csv, .jsonl, .json (each also gzipped: .gz) or .parquet.")
    validation_file: str | None = _data("Validation pairs in one file.")
    test_file: str | None = _data("Test pairs in one file.")
    train_source_file: str | None = _data("Training sources, one per line; may be gzipped (.gz).")
    train_target_file: str | None = _data("Training targets, one per line.")
    validation_source_file: str | None = _data("Validation sources, one per line.")
    validation_target_file: str | None = _data("Validation targets, one per line.")
    test_source_file: str | None = _data("Test sources, one per line.")
    test_target_file: str | None = _data("Test targets, one per line.")
    dataset_name: str | None = _data("Data set on the Hub, or its folder, instead of files.")
    dataset_config_name: str | None = _data("Configuration of the data set.", effect_with="dataset_name")
    dataset_train_split: str = _data("Training split of the data set.", "train", effect_with="dataset_name")
    dataset_validation_split: str | None = _data("Validation split of the data set.", effect_with="dataset_name")
    dataset_test_split: str | None = _data("Test split of the data set.", effect_with="dataset_name")
    # Several indices are those of a text and its features.
    source_column: _Column = _data("Column of sources: a name [source], or indices in a .tsv file without header [0].")
    target_column: _Column = _data("Column of targets: a name [target] or indices [1].")
    weight_column: _Index = _data("Column with the factor of each training pair in the loss, at least 0 [none].")
    rejected_column: _Index = _data("Column of worse targets to learn preferences from, such as rejected [none].")
    source_language: str | None = _data("Language code of the sources, for the model card.")
    target_language: str | None = _data("Language code of the targets, for the model card.")
    source_prefix: str | None = _data("Text before each source, such as `summarize: `.")
    max_source_length: int = _data("Maximum tokens of a training source, eos included.", 256, ge=2)
    max_target_length: int = _data("Maximum tokens of a training target, eos included.", 256, ge=2)
    # Scored pairs that the model cannot read are an error, unless `too_long` is truncate.
    too_long: Literal["skip", "truncate", "error"] = _data("What to do with longer training pairs.", "skip")
    # Validation and test keep them, unless error.
    empty: Literal["skip", "error", "keep"] = _data("What to do with training pairs with an empty side.", "skip")
    malformed: Literal["error", "skip"] = _data("What to do with lines that hold no pair.", "error")
    invalid_utf8: Literal["error", "skip"] = _data("What to do with text that is not UTF-8.", "error")
    # Longer training pairs are skipped and counted, unless `too_long` is error. Other longer lines are an error.
    max_line_characters: int = _data("Maximum characters of a line.", MAX_LINE_CHARACTERS, ge=1)
    streaming: bool = _data("Read training pairs during training [true for many]. Needs `max_steps`.", False)
    pairs_in_buffer: int = _data("Pairs that a stream shuffles and sorts together.", 20000, "streaming", ge=1)
    objective: Literal["pairs", "span_corruption", "ul2", "text_infilling", "prefix_lm"] = _data(
        "Train on pairs, denoise plain text as T5, UL2 or BART, or continue it.", "pairs"
    )
    train_text_file: str | None = _data("Plain text, one document per line, may be gzipped (.gz).", None, "objective")
    validation_text_file: str | None = _data("Plain text to denoise, for validation.", None, "objective")
    noise_density: float | None = _data("Share of tokens to hide [that of the paper].", None, "objective", gt=0, lt=1)
    mean_span_length: float | None = _data("Mean tokens of a hidden span [that of the paper].", None, "objective", ge=1)
    num_sentinels: int = _data("Number of sentinel tokens of a new tokenizer.", 100, "objective", ge=1)
    max_train_samples: int | None = _data("Maximum number of training pairs.", ge=1)
    max_validation_samples: int | None = _data("Maximum number of validation pairs.", ge=1)
    max_test_samples: int | None = _data("Maximum number of test pairs.", ge=1)
    num_validation: int = _data("Number of training pairs to move to validation.", 0, ge=0)
    keep_rare_words: bool = _data("Move no pair whose source has a word that no other source has.", False)
    num_test: int = _data("Number of training pairs to move to the test.", 0, ge=0)

    tasks: dict[str, dict] = _tasks("Several tasks: for each name, fields such as `train_file`, and `weight`.", {})
    task_mixing: Literal["proportional", "temperature", "equal"] = _tasks(
        "Share of each task: in proportion to its pairs, to a root of their number, or equal.", "proportional", "tasks"
    )
    mixing_temperature: float = _tasks("Degree of the root.", 2.0, "tasks", ge=1)
    mixing_limit: int | None = _tasks("Maximum number of pairs that a task counts with.", None, "tasks", ge=1)

    monolingual_target: str | None = _stages(
        "Text in the target language, one sentence per line, may be gzipped (.gz). A reverse model writes its sources."
    )
    num_seeds: int = _stages("Models to train with a seed each, for an ensemble.", 1, ge=1)
    stages: dict[str, dict] = _stages(
        "Trainings in order: for each name fields of its own, `share` of the time, `start` from the weights of another.",
        {},
    )

    tokenizer_name_or_path: str | None = _tokenizer("Existing tokenizer. Without it, a new one is trained.")
    target_tokenizer_name_or_path: str | None = _tokenizer("Existing tokenizer for the targets.")
    source_lang: str | None = _tokenizer("The tokenizer's code of the source language, such as eng_Latn, en_XX or en.")
    target_lang: str | None = _tokenizer("The tokenizer's code of the target language, which starts decoding.")
    tokenizer_kind: str | None = _tokenizer(f"Kind of a new tokenizer: {', '.join(TOKENIZER_KINDS)} [byte_bpe].")
    target_tokenizer_kind: str | None = _tokenizer("Kind of a new, separate target tokenizer.")
    vocab_size: int | None = _tokenizer("Entries of a new tokenizer [8000 where pieces are learned, else all].", ge=1)
    target_vocab_size: int | None = _tokenizer("Entries of a new, separate target tokenizer.", ge=1)
    joint_vocabulary: bool | None = _tokenizer("True if one tokenizer serves both sides [true].")
    lowercase: bool = _tokenizer("Lower-case all text.", False)
    normalization: str | None = _tokenizer("Unicode normalization: nfc, nfd, nfkc or nfkd [none].")
    min_frequency: int | None = _tokenizer("Minimum frequency of a learned piece.", ge=1)
    joiner: str | None = _tokenizer("Mark of a split word in pretokenized text [@@].")
    additional_special_tokens: Names | None = _tokenizer("More special tokens, such as language codes.")

    model_name_or_path: str | None = _model("Model to fine-tune.")
    preset: str = _model(f"Dimensions of a new model: {', '.join(MetaphraseConfig.presets())}.", "metaphrase-small")
    model: dict[str, Any] = _model("Fields of MetaphraseConfig that replace the preset's: --model.dropout 0.2.", {})

    time_budget: str | None = _batches("Time for the whole run, with data and scores, such as 20m or 2h [no limit].")
    max_tokens_per_batch: int | None = _batches("Source, target and padding tokens of a batch on each device.", ge=2)

    r_drop_alpha: float = _technique("Weight of R-Drop's divergence, such as 5. Doubles the memory.", 0.0, ge=0, le=1e3)
    r_drop_start_step: int = _technique("Step at which R-Drop begins. Earlier ones cost half.", 0, "r_drop_alpha", ge=0)
    reward: str | None = _technique(
        f"Score of generated targets to train by: {', '.join(METRICS)}, the folder of a judge, or package.module:function."
    )
    reward_loss: Literal["risk", "rloo", "grpo"] = _technique(
        "Expected risk, or REINFORCE by the mean of other candidates, or by mean and deviation.", "rloo", "reward"
    )
    candidates: Literal["sample", "beam"] = _technique("How candidates are generated.", "sample", "reward")
    num_candidates: int = _technique("Candidates of each source.", 8, "reward", ge=2)
    preference_loss: Literal["dpo", "ipo", "simpo", "cpo"] = _technique(
        "Loss of chosen and rejected targets. Those of dpo and ipo know the first weights.", "cpo", "rejected_column"
    )
    preference_beta: float | None = _technique("Its beta [0.1, simpo 2].", None, "rejected_column", gt=0)
    simpo_gamma: float = _technique("Margin between mean log-probabilities times beta.", 1.0, "rejected_column", ge=0)
    cross_entropy_share: float = _technique("Share of the references in the loss [0.3; cpo 0.5].", 0.3, ge=0, lt=1)
    subword_sampling: float | None = _technique("Rate of BPE-dropout in each epoch, such as 0.1.", gt=0, lt=1)
    augmentation: dict[str, _Share] = _technique(
        f"Shares of training pairs to change in each epoch: {', '.join(AUGMENTATIONS)} (--augmentation.typos 0.05).", {}
    )
    average_last: int | None = _technique("Save the mean of the last N checkpoints.", ge=2)
    average_best: int | None = _technique("Save the mean of the N best by `metric_for_best_model`.", ge=2)
    freeze: Names | None = _technique("Parts not to train: encoder, decoder.layers.0-3, ...; !part excepts a part.")
    freeze_steps: int | None = _technique("Updates after which frozen parts are trained, too.", None, "freeze", ge=1)
    lora_rank: int | None = _technique("Rank of a LoRA adapter, which is trained instead of the weights.", ge=1)
    lora_alpha: float = _technique("Weight of the adapter before division by the rank.", 16.0, "lora_rank", gt=0)
    lora_dropout: float = _technique("Dropout probability of the adapter's input.", 0.0, "lora_rank", ge=0, lt=1)
    lora_target_modules: Names | None = _technique("Layers with an adapter, as q_proj [all linear].", None, "lora_rank")

    metrics: Names | None = _evaluation(f"Scores of the run: {', '.join(METRICS)} [{' '.join(DEFAULT_METRICS)}].")
    bleu_tokenize: str | None = _evaluation("sacreBLEU's tokenizer, such as 13a; none for tokenized text.")
    num_beams: int | None = _evaluation("Beams of the finished model.", **_limits("num_beams"))
    length_penalty: float | None = _evaluation("Exponent of the length in beam scores.", **_limits("length_penalty"))
    early_stopping: bool | None = _evaluation("End beams early: faster, and as CTranslate2 does.")
    usual_source_length: int | None = _evaluation("Source tokens beyond which targets get a longer limit, too.", ge=1)
    choose_decoding: bool = _evaluation("Compare beams and length penalties on validation pairs at the end.", False)
    no_repeat_ngram_size: int | None = _evaluation("N-grams that may not repeat.", **_limits("no_repeat_ngram_size"))
    repetition_penalty: float | None = _evaluation("Penalty of earlier tokens.", **_limits("repetition_penalty"))
    suppress_tokens: Names | None = _evaluation("Tokens that the model never generates, such as tags of sources.")
    max_decoded_samples: int | None = _evaluation("Validation pairs to decode during training [all].", ge=1)
    early_stopping_patience: int | None = _evaluation("Evaluations without a better score before training stops.", ge=1)

    search: dict[str, Any] = _search("Values for `metaphrase tune`: a list, or {low: 1e-4, high: 1e-2, log: true}.", {})


# All differences from transformers' own defaults.
TRAINING_DEFAULTS: dict[str, Any] = {
    "predict_with_generate": True,
    # The collator selects its columns, and batching reads the lengths.
    "remove_unused_columns": False,
    "report_to": "none",
    "save_total_limit": 3,
    # Seconds. One process reads the corpus and scores the model while the others wait, which may take over half an hour.
    "ddp_timeout": 6 * 3600,
}
# Values that transformers or torch would notice late, or not at all.
_TRAINING_LIMITS = {
    name: limits
    for names, limits in (
        ("gradient_accumulation_steps eval_accumulation_steps save_total_limit", {"ge": 1}),
        ("per_device_train_batch_size per_device_eval_batch_size", {"ge": 1}),
        ("warmup_steps eval_delay max_grad_norm neftune_noise_alpha", {"ge": 0}),
        ("num_train_epochs logging_steps eval_steps save_steps", {"gt": 0}),
        ("learning_rate weight_decay", {"ge": 0, "le": 100}),
        ("label_smoothing_factor adam_beta1 adam_beta2", {"ge": 0, "lt": 1}),
        ("seed data_seed", {"ge": 0, "lt": 2**32}),
        ("adam_epsilon", {"gt": 0, "le": 1}),
        ("max_steps", {"ge": -1}),
        ("generation_max_length", {"ge": 2, "le": 2**20}),
        ("generation_num_beams", _limits("num_beams")),
    )
    for name in names.split()
}
_HINTS = typing.get_type_hints(Seq2SeqTrainingArguments)
# Also true: resume from the last checkpoint.
_HINTS["resume_from_checkpoint"] = bool | str | None
_ORDER = (bool, int, float, str)
_TYPE_NAMES = {bool: "true or false", str: "text", list: "list of texts", list[int]: "list of int", dict: "mapping"}
TRAINING_FIELDS = {name: field for name, field in Seq2SeqTrainingArguments.__dataclass_fields__.items() if field.init}


def kinds_of(annotation: Any) -> set[Any]:
    """Return the types that a field accepts, such as `int` and `None`."""
    if typing.get_origin(annotation) is Annotated:
        return kinds_of(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return set().union(*map(kinds_of, typing.get_args(annotation)))
    return {annotation}


def _training_field(name: str) -> tuple[Any, Any]:
    """Return type and default of a field of transformers, with the names of an enum in place of the enum."""
    members, choices = kinds_of(_HINTS[name]), tuple(TRAINING_FIELDS[name].metadata.get("choices") or ())
    for member in members:
        if isinstance(member, type) and issubclass(member, enum.Enum):
            choices = tuple(item.value for item in member)
    if choices:
        members = {Literal[choices], *(members & {type(None)})}
    # A text such as "no" is a truth value first, and one text may be a list of names.
    order = [*(kind for kind in _ORDER if kind in members), *(members - {*_ORDER})]
    kind = functools.reduce(operator.or_, (Names if kind == list[str] else kind for kind in order))
    if len(members - {type(None)}) > 1:
        kind = Annotated[kind, Field(union_mode="left_to_right")]
    default = TRAINING_DEFAULTS.get(name, TRAINING_FIELDS[name].default)
    # Lists are made by a factory, and `None` stands for an empty one.
    default = getattr(default, "value", default) if isinstance(default, enum.Enum | str | int | float | dict) else None
    return kind, Field(default, **_TRAINING_LIMITS.get(name, {}))


# The fields alone: `Seq2SeqTrainingArguments.__post_init__` sets up devices and process groups.
_DEFINITIONS: dict[str, Any] = {name: _training_field(name) for name in TRAINING_FIELDS}
AllFields: Any = create_model("AllFields", __base__=OwnFields, **_DEFINITIONS)
OWN_FIELDS: dict[str, Any] = OwnFields.model_fields
# Fields that `choose_decoding` sets for the finished weights.
DECODING = ("num_beams", "length_penalty", "early_stopping")


def group_of(name: str, where: str = "a recipe") -> str:
    """Return the group of a field, `training` for the fields of transformers. `where` is its place, for the error."""
    if name not in OWN_FIELDS and name not in TRAINING_FIELDS:
        hint = did_you_mean(name, [*OWN_FIELDS, *TRAINING_FIELDS]) or " Fields of the network go below `model`."
        raise MetaphraseError(f"Every field must be one that a recipe has, got `{name}` in {where}.{hint}")
    return OWN_FIELDS[name].json_schema_extra["group"] if name in OWN_FIELDS else "training"


def type_name(annotation: Any) -> str:
    """Return a type as a reader of a recipe writes it: `int`, or the permitted words."""
    names = []
    for kind in kinds_of(annotation) - {type(None)}:
        origin, words = typing.get_origin(kind) or kind, ", ".join(map(str, typing.get_args(kind)))
        names.append(words if origin is Literal else _TYPE_NAMES.get(kind, _TYPE_NAMES.get(origin, origin.__name__)))
    return " or ".join(sorted(names))


# Rules: fields that contradict each other or need each other

# Fields of transformers that a recipe must not set.
LEFT_OUT = {
    "generation_config": "It would replace `num_beams`, `length_penalty`, `generation_max_length` and others. Set them instead.",
    "push_to_hub": "`metaphrase push` uploads a finished run.",
    "use_liger_kernel": "It has no kernels for encoder-decoder models.",
}
# Fields that must come together.
_NEEDS = {f"{split}_source_file": f"{split}_target_file" for split in SPLITS}
_NEEDS |= {target: source for source, target in _NEEDS.items()}
_NEEDS |= {"target_tokenizer_name_or_path": "tokenizer_name_or_path", "lora_rank": "model_name_or_path"}
_NEEDS |= {"reward": "model_name_or_path"}
_FILES = tuple(f"{split}{kind}" for split in SPLITS for kind in ("_file", "_source_file"))
_PAIR_SOURCES = (*_FILES, "dataset_name", "streaming", "num_validation", "num_test")
_OF_EACH_TASK: tuple[str, ...] = (*_PAIR_SOURCES, "source_prefix", "source_column", "target_column", "objective")
_THIRD_COLUMNS = ("weight_column", "rejected_column")
_OF_EACH_TASK += (*_THIRD_COLUMNS, *(f"max_{split}_samples" for split in SPLITS))
_OF_TWO_VOCABULARIES = ("target_tokenizer_kind", "target_vocab_size")
_OF_NEW_TOKENIZER: tuple[str, ...] = ("tokenizer_kind", "vocab_size", "joint_vocabulary", *_OF_TWO_VOCABULARIES)
_OF_NEW_TOKENIZER += ("lowercase", "normalization", "min_frequency", "joiner", "num_sentinels")
_CHANGING = ("streaming", "subword_sampling", "augmentation")
_EITHER = "its pairs are given or taken out of training"
# Pairs of one field, when it differs from its default and is not false, and fields that contradict it, with the reason.
_CONFLICTS = (
    *((f"{split}_file", (f"{split}_source_file",), "a split comes from one place") for split in SPLITS),
    ("dataset_name", _FILES, "pairs come from a data set or from files"),
    ("model_name_or_path", ("preset", "model"), "a model to fine-tune has its dimensions"),
    ("average_last", ("average_best",), "one mean is kept"),
    ("lora_rank", ("average_last", "average_best"), "a checkpoint does not hold the whole model that is kept"),
    ("lora_rank", ("freeze",), "all but the adapter is frozen"),
    ("num_validation", ("validation_file", "validation_source_file", "dataset_validation_split"), _EITHER),
    ("num_test", ("test_file", "test_source_file", "dataset_test_split"), _EITHER),
    ("objective", (*_PAIR_SOURCES, *_THIRD_COLUMNS, *_OF_TWO_VOCABULARIES), "it is learned from plain text"),
    ("objective", ("subword_sampling", "augmentation"), "it draws the noise of its pairs"),
    ("tasks", _OF_EACH_TASK, "each task has its own pairs, read as a whole"),
    ("weight_column", ("train_source_file",), "two files of text have no other columns"),
    ("rejected_column", ("train_source_file", "weight_column"), "rejected targets are the third column of a file"),
    *((name, ("rejected_column",), "the loss is that of preferences") for name in ("reward", "r_drop_alpha")),
    *((name, ("rejected_column",), "such pairs are read as a whole, and stay as they are") for name in _CHANGING),
    ("monolingual_target", ("tasks", "objective", *_THIRD_COLUMNS), "a model of plain pairs writes its sources"),
    ("num_seeds", ("objective",), "no scores join the models"),
    ("reward", ("r_drop_alpha", "objective", "weight_column"), "candidates of a model take the place of pairs"),
    ("joint_vocabulary", (*_OF_TWO_VOCABULARIES, "target_tokenizer_name_or_path"), "it has one tokenizer"),
    ("tokenizer_name_or_path", _OF_NEW_TOKENIZER, "a tokenizer that exists is as it was trained"),
    ("model_name_or_path", _OF_NEW_TOKENIZER, "the model has a tokenizer as it was trained"),
)
# Any of these gives a task validation pairs.
VALIDATION_FIELDS = ("validation_file", "validation_source_file", "dataset_validation_split", "num_validation")


def check_recipe(recipe: Any) -> None:
    """Refuse a recipe that contradicts itself by a `MetaphraseError` with the fields, and warn of fields without effect."""
    check_conflicts(recipe)
    require = partial(_require, recipe)
    for name, reason in LEFT_OUT.items():
        require(not getattr(recipe, name), name, f"be left out. {reason}")
    for name, needed in _NEEDS.items():
        require(not recipe.is_set(name) or recipe.is_set(needed), name, f"come with `{needed}`")
    require(recipe.max_steps != 0, "max_steps", "be above 0, or -1 for `num_train_epochs`")
    can_join = recipe.objective == "pairs" or recipe.joint_vocabulary is not False
    require(can_join, "joint_vocabulary", "be true with `objective`: both sides are one text")
    has_budget = recipe.max_tokens_per_batch is not None
    for strategy in ("save_strategy", "eval_strategy", "logging_strategy") if recipe.streaming else ():
        require(getattr(recipe, strategy) != "epoch", strategy, "be steps or no with `streaming`, which has no epochs")
    for name in recipe.augmentation:
        require(name in AUGMENTATIONS, f"augmentation.{name}", f"be one of {', '.join(AUGMENTATIONS)}")
    has_two = recipe.joint_vocabulary is False or recipe.target_tokenizer_kind or recipe.target_vocab_size
    rule = "be left out with two vocabularies. Its marks are tokens of a joint one"
    require("terms" not in recipe.augmentation or not has_two, "augmentation.terms", rule)
    for task, fields in recipe.tasks.items():
        for name, value in fields.items():
            path = f"tasks.{task}.{name}"
            if name == "weight":
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                require(is_number and 0 < value < float("inf"), path, "be a number above 0")
                continue
            is_data = group_of(name, f"`tasks.{task}`") == "data"
            is_of_run = name in ("data_dir", "streaming", "objective", "rejected_column")
            require(is_data and not is_of_run, path, "be a field of data")
    if recipe.subword_sampling is not None:
        for name in ("tokenizer_kind", "target_tokenizer_kind"):
            rule = f"be one of {', '.join(SAMPLED_KINDS)} with `subword_sampling`"
            require(getattr(recipe, name) in (None, *SAMPLED_KINDS), name, rule)
    # A wrong name would be noticed after the pairs are read.
    is_judge = recipe.reward is not None and (re.search("[:/]", recipe.reward) or os.path.exists(recipe.reward))
    rule = f"be one of {', '.join(METRICS)}, the folder of a judge, or package.module:function"
    require(recipe.reward in (None, *METRICS) or is_judge, "reward", rule)
    is_fair = recipe.candidates == "sample" or recipe.reward_loss == "risk"
    require(is_fair, "candidates", "be sample, unless `reward_loss` is risk")
    has_weights = recipe.reward is not None or recipe.rejected_column is not None
    rule = "be 0 with `reward` and `rejected_column`, whose targets have weights"
    require(not (has_weights and recipe.label_smoothing_factor), "label_smoothing_factor", rule)
    _check_selection(recipe)
    if has_budget:
        check_beside_budget(recipe, recipe.max_tokens_per_batch)
    needs = {name: OWN_FIELDS[name].json_schema_extra["effect_with"] for name in OWN_FIELDS if recipe.is_set(name)}
    idle = [f"`{name}` without `{needed}`" for name, needed in needs.items() if needed and recipe.is_open(needed)]
    if idle:
        logger.warning("These fields have no effect: %s.", ", ".join(idle))


def _require(recipe: Any, holds: Any, path: str, rule: str) -> None:
    """Refuse a recipe unless a rule holds for a field. A path such as `tasks.news.weight` names a field of a part."""
    if not holds:
        name, *keys = path.split(".")
        value = functools.reduce(operator.getitem, keys, getattr(recipe, name))
        raise MetaphraseError(f"`{path}` must {rule}, got {value!r}.")


def _check_selection(recipe: Any) -> None:
    """Check that the metric by which checkpoints are selected is evaluated during training, and each checkpoint has a score."""
    require, is_evaluated = partial(_require, recipe), recipe.eval_strategy != "no"
    for name in ("early_stopping_patience", "average_best"):
        require(is_evaluated or getattr(recipe, name) is None, name, "come with `eval_strategy` steps or epoch")
    metric = recipe.metric_for_best_model
    has_metric = metric or recipe.load_best_model_at_end or not recipe.early_stopping_patience
    require(has_metric, "early_stopping_patience", "come with `metric_for_best_model`")
    if is_evaluated and (metric is not None or recipe.average_best is not None):
        evaluated = ["loss", "perplexity"]
        if decodes(recipe):
            names = recipe.metrics or DEFAULT_METRICS
            tasks = [task for task, fields in recipe.tasks.items() if any(map(fields.get, VALIDATION_FIELDS))]
            evaluated += [*names, *(f"{task}_{name}" for task, name in itertools.product(tasks, names))]
        is_known = (metric or DEFAULT_METRICS[0]).removeprefix("eval_") in evaluated
        require(is_known, "metric_for_best_model", f"be evaluated while training: {', '.join(evaluated)}")
    for name in (name for name in ("average_last", "average_best") if getattr(recipe, name) is not None):
        limit = recipe.save_total_limit
        require(limit is None or getattr(recipe, name) <= limit, name, f"be at most `save_total_limit` {limit}")
        require(not recipe.load_best_model_at_end, "load_best_model_at_end", f"be false with `{name}`")
        require(recipe.save_strategy != "no", "save_strategy", f"be steps, epoch or best with `{name}`")
    if recipe.average_best is not None and recipe.save_strategy != "best":
        is_equal = recipe.save_strategy == recipe.eval_strategy
        require(is_equal, "save_strategy", "be best or the `eval_strategy` with `average_best`")
        # `eval_steps` is `logging_steps` by default. Both may be shares of the run.
        steps = recipe.eval_steps or recipe.logging_steps
        times = recipe.save_steps / steps
        is_multiple = (recipe.save_steps < 1) == (steps < 1) and abs(times - round(times)) <= 1e-6
        rule = "be a multiple of `eval_steps` with `average_best`"
        require(recipe.save_strategy != "steps" or is_multiple, "save_steps", rule)


def check_evaluated(recipe: Any) -> None:
    """Refuse an evaluation without data, which a Trainer would notice after reading the corpus."""
    fields_of_parts = recipe.tasks.values() or [{name: getattr(recipe, name) for name in VALIDATION_FIELDS}]
    has_pairs = any(fields.get(name) for fields in fields_of_parts for name in VALIDATION_FIELDS)
    has_any = has_pairs or (not recipe.tasks and recipe.validation_text_file)
    is_pairs = recipe.objective == "pairs"
    rule = f"come with {'`validation_file` or `num_validation`' if is_pairs else '`validation_text_file`'}"
    _require(recipe, (has_pairs and is_pairs) or not recipe.choose_decoding, "choose_decoding", rule)
    _require(recipe, has_any or recipe.eval_strategy == "no", "eval_strategy", rule)


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
                raise MetaphraseError(
                    f"`{first}` and `{other}` must not both be given, because {reason}, "
                    f"got {getattr(recipe, first)!r} and {getattr(recipe, other)!r}."
                )
