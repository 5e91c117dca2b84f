"""What a recipe refuses: fields out of range, and fields that contradict each other."""

import re

import pytest

from metaphrase.training.recipe.recipe import Recipe

STREAM = {"train_file": "a", "streaming": True, "max_tokens_per_batch": 600}
STAGES = {"max_tokens_per_batch": 600, "datasets": {"a": {"train_file": "a.tsv"}}}
STAGES |= {"stages": {"start": {"shares": {"a": 1}, "until": {"a": 2}}}}
TEXT = {"objective": "ul2", "train_text_file": "a"}
BEST = {"load_best_model_at_end": True, "eval_strategy": "steps", "metric_for_best_model": "bleu"}


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"train_file": "a", "train_source_file": "b", "train_target_file": "c"}, ("train_file", "train_source_file")),
        ({"test_source_file": "b"}, ("test_source_file", "test_target_file")),
        ({"test_target_file": "b"}, ("test_source_file", "test_target_file")),
        ({"dataset_name": "x", "validation_file": "a"}, ("dataset_name", "validation_file")),
        ({"dataset_name": "x", "test_source_file": "a", "test_target_file": "b"}, ("dataset_name", "test_source_file")),
        ({"num_validation": 5, "validation_file": "a"}, ("num_validation", "validation_file")),
        ({"num_test": 5, "dataset_name": "x", "dataset_test_split": "test"}, ("num_test", "dataset_test_split")),
        ({"num_test": -1}, ("num_test",)),
        ({"objective": "ul2", "subword_sampling": 0.1}, ("objective", "subword_sampling")),
        ({"tokenizer_kind": "wordpiece", "subword_sampling": 0.1}, ("tokenizer_kind", "subword_sampling")),
        ({"augmentation": {"typo": 0.1}}, ("augmentation",)),
        ({"augmentation": {"typos": 2}}, ("augmentation.typos",)),
        ({"augmentation": {"terms": 0.1}, "joint_vocabulary": False}, ("augmentation.terms",)),
        ({"augmentation": {"uppercase": 0.6, "titlecase": 0.6}}, ("augmentation.uppercase", "augmentation.titlecase")),
        ({"datasets": {"a": {}}}, ("datasets", "stages")),
        (STAGES | {"max_tokens_per_batch": None}, ("stages", "max_tokens_per_batch")),
        (STAGES | {"train_file": "a.tsv"}, ("stages", "train_file")),
        (STAGES | {"num_train_epochs": 2.0}, ("stages", "num_train_epochs")),
        (STAGES | {"eval_strategy": "epoch", "validation_file": "a"}, ("eval_strategy", "stages")),
        (STAGES | {"datasets": {"a": {"test_file": "a.tsv"}}}, ("datasets.a", "test_file")),
        (STAGES | {"datasets": {"a": {"weight": 2}}}, ("datasets.a", "weight")),
        (STAGES | {"datasets": {"a": {"vocab_size": 2}}}, ("datasets.a", "vocab_size")),
        (STAGES | {"datasets": {"a": {}, "b": {}}}, ("datasets",)),
        ({"repetition_penalty": 0.0}, ("repetition_penalty",)),
        ({"max_source_length": 1}, ("max_source_length",)),
        ({"vocab_size": 0}, ("vocab_size",)),
        ({"joint_vocabulary": True, "target_vocab_size": 9}, ("joint_vocabulary", "target_vocab_size")),
        ({"joint_vocabulary": True, "target_tokenizer_kind": "word"}, ("joint_vocabulary", "target_tokenizer_kind")),
        ({"target_tokenizer_name_or_path": "x"}, ("target_tokenizer_name_or_path", "tokenizer_name_or_path")),
        ({"model_name_or_path": "x", "preset": "y"}, ("model_name_or_path", "preset")),
        ({"model_name_or_path": "x", "vocab_size": 9}, ("model_name_or_path", "vocab_size")),
        ({"tokenizer_name_or_path": "x", "lowercase": True}, ("tokenizer_name_or_path", "lowercase")),
        ({"tokenizer_name_or_path": "x", "joint_vocabulary": False}, ("tokenizer_name_or_path", "joint_vocabulary")),
        ({"early_stopping_patience": 2}, ("early_stopping_patience", "eval_strategy")),
        ({"early_stopping_patience": 2, "eval_strategy": "epoch"}, ("metric_for_best_model",)),
        ({"save_strategy": "best", "eval_strategy": "epoch"}, ("save_strategy", "metric_for_best_model")),
        ({"r_drop_alpha": 1.0, "r_drop_start_step": 5, "max_steps": 5}, ("r_drop_start_step", "max_steps")),
        *(
            ({**STREAM, "max_steps": 5, name: "epoch"}, (name, "streaming"))
            for name in ("save_strategy", "eval_strategy", "logging_strategy")
        ),
        *(
            ({"max_tokens_per_batch": 9, name: value}, (name, "max_tokens_per_batch"))
            for name, value in (
                *(("dataloader_drop_last", True), ("auto_find_batch_size", True), ("neftune_noise_alpha", 5.0)),
                *(("train_sampling_strategy", "batch_rebalance"), ("train_sampling_strategy", "sequential")),
            )
        ),
        ({"length_column_name": "labels"}, ("length_column_name",)),
        ({"generation_config": "folder"}, ("generation_config",)),
        ({"learning_rate": -1e-3}, ("learning_rate",)),
        ({"push_to_hub": True}, ("push_to_hub",)),
        ({"use_liger_kernel": True}, ("use_liger_kernel",)),
        ({**STREAM, "max_steps": 5, "max_tokens_per_batch": None}, ("streaming", "max_tokens_per_batch")),
        (STREAM, ("streaming", "max_steps")),
        ({"objective": "ul2", "train_file": "a"}, ("objective", "train_file")),
        *(
            ({**BEST, name: 2, "save_strategy": "steps"}, (name, "load_best_model_at_end"))
            for name in ("average_last", "average_best")
        ),
        ({"max_steps": 0}, ("max_steps", "num_train_epochs")),
        ({"num_train_epochs": 0}, ("max_steps", "num_train_epochs")),
        ({"model_name_or_path": "a", "model": {"dropout": 0.1}}, ("model_name_or_path", "model")),
        ({**TEXT, "num_sentinels": 7, "tokenizer_name_or_path": "b"}, ("num_sentinels", "tokenizer_name_or_path")),
    ],
)
def test_contradictions_are_refused(fields, names):
    with pytest.raises(ValueError) as caught:
        Recipe(**fields)
    assert all(f"`{name}`" in str(caught.value) for name in names)


@pytest.mark.parametrize(
    ("fields", "warning"),
    [
        ({"lora_alpha": 3.0}, "`lora_alpha` without `lora_rank`"),
        ({"dataset_test_split": "test"}, "`dataset_test_split` without `dataset_name`"),
        ({"num_validation": 5, "max_validation_samples": 3}, "`max_validation_samples` with `num_validation`"),
        ({"objective": "ul2", "source_prefix": "x "}, "`source_prefix` with `objective` ul2"),
        ({"objective": "ul2", "noise_density": 0.2}, "`noise_density` with `objective` ul2"),
        ({"noise_density": 0.2}, "`noise_density` without `objective`"),
        ({"mixing_limit": 3}, "`mixing_limit` without `tasks`"),
        ({"tasks": {"a": {}}, "mixing_limit": 3, "task_mixing": "equal"}, "`mixing_limit` with `task_mixing` equal"),
        ({"tasks": {"a": {}}, "mixing_temperature": 3.0}, "`mixing_temperature` with `task_mixing` proportional"),
        ({"max_decoded_samples": 5, "prediction_loss_only": True}, "`max_decoded_samples` if nothing is decoded"),
        ({"early_stopping_threshold": 0.1, "r_drop_start_step": 5}, "`early_stopping_patience`, `r_drop_start_"),
    ],
)
def test_fields_without_effect_are_named_in_one_warning(fields, warning, caplog):
    Recipe(**fields)
    [message] = caplog.messages
    assert message.startswith("These fields have no effect: ") and warning in message


@pytest.mark.parametrize(
    ("name", "good", "bad", "others"),
    [
        ("label_smoothing_factor", (0.0, 0.9), (1.0, 10.0, -0.1), {}),
        ("exponential_average_decay", (0.0, 0.999), (1.0, 2.0), {}),
        ("layer_decay", (0.5, 1.0), (0.0, 1.1, -1.0), {}),
        ("noise_density", (0.15,), (0.0, 1.0), {"objective": "span_corruption"}),
        ("subword_sampling", (0.1,), (0.0, 1.0), {}),
        ("lora_dropout", (0.0, 0.1), (1.0,), {"lora_rank": 2, "model_name_or_path": "x"}),
        ("lora_alpha", (1.0,), (0.0,), {"lora_rank": 2, "model_name_or_path": "x"}),
    ],
)
def test_shares_have_their_bounds_at_the_entrance(name, good, bad, others):
    for value in good:
        assert getattr(Recipe(**{name: value}, **others), name) == value
    for value in bad:
        with pytest.raises(ValueError, match=rf"`{name}` must be (at least|above) 0.*, got {value}"):
            Recipe(**{name: value}, **others)


INF = float("inf")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        *((f"{event}_steps", (0, -1, INF)) for event in ("save", "eval", "logging")),
        *((f"per_device_{phase}_batch_size", (0, -1)) for phase in ("train", "eval")),
        ("gradient_accumulation_steps", (0, -1)),
        ("eval_accumulation_steps", (0, -1)),
        ("max_steps", (-7, 2**70)),
        ("num_train_epochs", (INF, 1e300)),
        ("max_grad_norm", (-1.0, INF)),
        ("adam_epsilon", (0.0, -1.0, INF)),
        ("adam_beta1", (1.0, -0.1)),
        ("adam_beta2", (1.5,)),
        ("save_total_limit", (0, -1)),
        ("dataloader_num_workers", (-1, 1_000_000)),
        ("dataloader_prefetch_factor", (0, -1)),
        ("learning_rate", (INF, 1e30)),
        ("weight_decay", (INF, -1.0)),
        ("r_drop_alpha", (INF, 1e38)),
        ("warmup_steps", (INF, -1)),
        ("neftune_noise_alpha", (INF, -1.0)),
        ("lora_alpha", (INF,)),
        ("early_stopping_threshold", (INF,)),
        ("seed", (-1, 2**70)),
        ("data_seed", (-1, 2**70)),
        ("max_source_length", (2**70,)),
        ("generation_max_length", (1, 0, -1, 2**40)),
        ("generation_num_beams", (0, 10**6)),
        ("num_beams", (0, 10**6)),
        ("repetition_penalty", (INF, 1e-320)),
        ("length_penalty", (INF, 1000.0)),
        ("no_repeat_ngram_size", (-1, 2**70)),
        ("log_level", ("junk",)),
        ("log_level_replica", ("junk",)),
        ("train_sampling_strategy", ("junk",)),
    ],
)
def test_numbers_and_names_out_of_range_are_refused_at_the_entrance(name, values):
    for value in values:
        with pytest.raises(ValueError, match=rf"^`{name}` must be .*, got {value!r}\.$".replace("+", r"\+")):
            Recipe(**{name: value})


@pytest.mark.parametrize(
    "fields",
    [{"source_language": "\ud800"}, {"additional_special_tokens": ["a", "b\udcff"]}, {"tasks": {"\ud800": {}}}],
    ids=["text", "list", "key"],
)
def test_names_that_no_file_could_hold_are_refused_before_training(fields):
    with pytest.raises(ValueError, match=r"^`\w+` must be text that UTF-8 can hold, got '.*\\ud.*'\.$"):
        Recipe(**fields)
    Recipe(source_language="Übung \U0001f600", additional_special_tokens=["\n", "日本"])


def test_usual_numbers_are_in_range():
    fields = {"save_steps": 0.5, "logging_steps": 1, "max_grad_norm": 0.0, "warmup_steps": 0.1, "adam_beta1": 0.0}
    fields |= {"dataloader_num_workers": 8, "seed": 2**32 - 1, "learning_rate": 0.0, "generation_max_length": 2}
    recipe = Recipe(**fields)
    assert {name: getattr(recipe, name) for name in fields} == fields


@pytest.mark.parametrize("value", ["fast", None, True, 0, -1.0, INF, 1e38, {"layers": 0.5}], ids=repr)
def test_factors_of_the_rate_are_numbers_above_0(value):
    given = re.escape(repr(value))
    with pytest.raises(
        ValueError, match=f"`learning_rate_factors` must hold numbers above 0 and at most 1000, got {given} for 'enc"
    ):
        Recipe(learning_rate_factors={"decoder": 1, "encoder": value})


def test_consistent_fields_are_accepted(caplog):
    Recipe(learning_rate_factors={"decoder": 1, "encoder": 0.1}, bleu_tokenize="none", max_decoded_samples=3)
    Recipe(auto_find_batch_size=True, neftune_noise_alpha=5.0, length_column_name="source_length")
    Recipe(max_tokens_per_batch=9, per_device_train_batch_size=4, neftune_noise_alpha=None)
    Recipe(**STREAM, max_steps=5, save_strategy="steps", eval_strategy="no")
    Recipe(tasks={"a": {}}, mixing_temperature=3.0, task_mixing="temperature", mixing_limit=3)
    Recipe(tasks={"a": {}}, mixing_temperature=2.0)
    Recipe(train_sampling_strategy="sequential", dataloader_drop_last=True)
    Recipe(max_tokens_per_batch=9, train_sampling_strategy="group_by_length")
    recipe = Recipe(
        dataset_name="x",
        dataset_config_name="y",
        num_validation=5,
        joint_vocabulary=False,
        target_vocab_size=9,
        metrics=["bleu"],
        early_stopping_patience=2,
        early_stopping_threshold=0.0,
        eval_strategy="epoch",
        metric_for_best_model="bleu",
    )
    assert recipe.target_vocab_size == 9 and recipe.metric_for_best_model == "bleu"
    recipe = Recipe(num_validation=0, validation_file="a", predict_with_generate=False)
    assert recipe.validation_file == "a"
