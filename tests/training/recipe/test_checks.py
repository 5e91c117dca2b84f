import pytest

from metaphrase.training.recipe.recipe import Recipe

STREAM = {"train_file": "a", "streaming": True, "max_tokens_per_batch": 600}
STAGES = {"max_tokens_per_batch": 600, "datasets": {"a": {"train_file": "a.tsv"}}}
STAGES |= {"stages": {"start": {"shares": {"a": 1}, "until": {"a": 2}}}}
TEXT = {"objective": "ul2", "train_text_file": "a"}
SAVED = {"validation_file": "a", "save_strategy": "steps", "eval_strategy": "steps"}
BEST = {"load_best_model_at_end": True, "eval_strategy": "steps", "metric_for_best_model": "bleu"}


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"train_file": "a", "train_source_file": "b", "train_target_file": "c"}, ("train_file", "train_source_file")),
        ({"test_source_file": "b"}, ("test_source_file", "test_target_file")),
        ({"dataset_name": "x", "validation_file": "a"}, ("dataset_name", "validation_file")),
        ({"num_validation": 5, "validation_file": "a"}, ("num_validation", "validation_file")),
        ({"num_test": 5, "dataset_name": "x", "dataset_test_split": "test"}, ("num_test", "dataset_test_split")),
        ({"objective": "ul2", "subword_sampling": 0.1}, ("objective", "subword_sampling")),
        ({"tokenizer_kind": "word", "subword_sampling": 0.1}, ("tokenizer_kind", "subword_sampling")),
        ({"augmentation": {"typo": 0.1}}, ("augmentation.typo",)),
        ({"augmentation": {"typos": 2}}, ("augmentation.typos",)),
        ({"augmentation": {"terms": 0.1}, "joint_vocabulary": False}, ("augmentation.terms",)),
        ({"datasets": {"a": {}}}, ("datasets", "stages")),
        (STAGES | {"max_tokens_per_batch": None}, ("stages", "max_tokens_per_batch")),
        (STAGES | {"train_file": "a.tsv"}, ("stages", "train_file")),
        (STAGES | {"num_train_epochs": 2.0}, ("stages", "num_train_epochs")),
        (STAGES | {"eval_strategy": "epoch", "validation_file": "a"}, ("eval_strategy", "stages")),
        (STAGES | {"datasets": {"a": {"test_file": "a.tsv"}}}, ("datasets.a.test_file",)),
        (STAGES | {"datasets": {"a": {"weight": 2}}}, ("datasets.a", "weight")),
        (STAGES | {"datasets": {"a": {"vocab_size": 2}}}, ("datasets.a.vocab_size",)),
        (STAGES | {"datasets": {"a": {}, "b": {}}}, ("datasets",)),
        ({"joint_vocabulary": True, "target_vocab_size": 9}, ("joint_vocabulary", "target_vocab_size")),
        ({"target_tokenizer_name_or_path": "x"}, ("target_tokenizer_name_or_path", "tokenizer_name_or_path")),
        ({"model_name_or_path": "x", "preset": "y"}, ("model_name_or_path", "preset")),
        ({"model_name_or_path": "x", "vocab_size": 9}, ("model_name_or_path", "vocab_size")),
        ({"tokenizer_name_or_path": "x", "lowercase": True}, ("tokenizer_name_or_path", "lowercase")),
        ({"early_stopping_patience": 2}, ("early_stopping_patience", "eval_strategy")),
        ({"early_stopping_patience": 2, "eval_strategy": "epoch"}, ("metric_for_best_model",)),
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
        ({"push_to_hub": True}, ("push_to_hub",)),
        ({**STREAM, "max_steps": 5, "max_tokens_per_batch": None}, ("streaming", "max_tokens_per_batch")),
        (STREAM, ("streaming", "max_steps")),
        ({"objective": "ul2", "train_file": "a"}, ("objective", "train_file")),
        *(
            ({**BEST, name: 2, "save_strategy": "steps"}, (name, "load_best_model_at_end"))
            for name in ("average_last", "average_best")
        ),
        *(
            (SAVED | fields, (name,))
            for fields, name in (
                ({"average_last": 4, "save_total_limit": 2}, "save_total_limit"),
                ({"average_last": 2, "save_strategy": "no"}, "save_strategy"),
                ({"average_best": 2, "eval_strategy": "no"}, "eval_strategy"),
                ({"average_best": 2, "save_strategy": "epoch"}, "save_strategy"),
                ({"average_best": 2, "save_steps": 5, "eval_steps": 3}, "save_steps"),
            )
        ),
        ({"max_steps": 0}, ("max_steps", "num_train_epochs")),
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
        ({"dataset_test_split": "test"}, "`dataset_test_split` without `dataset_name`"),
        ({"noise_density": 0.2, "seed": 3}, "`noise_density` without `objective`"),
    ],
)
def test_fields_without_effect_are_named_in_one_warning(fields, warning, caplog):
    Recipe(**fields)
    assert caplog.messages == [f"These fields have no effect: {warning}."]


INF = float("inf")
LORA = {"lora_rank": 2, "model_name_or_path": "x"}


@pytest.mark.parametrize(
    ("name", "good", "bad", "others"),
    [
        ("label_smoothing_factor", (0.0, 0.9), (1.0, 10.0, -0.1), {}),
        ("noise_density", (0.15,), (0.0, 1.0), {"objective": "span_corruption"}),
        ("subword_sampling", (0.1,), (0.0, 1.0), {}),
        ("lora_alpha", (1.0,), (0.0, INF), LORA),
        *((f"{event}_steps", (0.5, 1), (0, -1, INF), {}) for event in ("save", "eval", "logging")),
        *((f"per_device_{phase}_batch_size", (1,), (0, -1), {}) for phase in ("train", "eval")),
        ("gradient_accumulation_steps", (1,), (0, -1, True), {}),
        ("max_steps", (-1, 5), (-7, 0), {}),
        ("num_train_epochs", (0.5,), (INF, 0), {}),
        ("save_total_limit", (1, None), (0, -1), {}),
        ("learning_rate", (0.0,), (-1.0, INF, 1e30), {}),
        ("warmup_steps", (0.1, 9), (INF, -1), {}),
        ("seed", (2**32 - 1,), (-1, 2**70, True), {}),
        ("max_source_length", (2,), (1,), {}),
        ("generation_max_length", (2,), (1, 2**40), {}),
        ("num_beams", (1,), (0, 10**6), {}),
        ("repetition_penalty", (1.2,), (INF, 1e-320), {}),
        ("length_penalty", (0.6, -1.0), (INF, 1000.0), {}),
        ("log_level", ("info",), ("junk",), {}),
    ],
)
def test_values_have_their_bounds_at_the_entrance(name, good, bad, others):
    for value in good:
        assert getattr(Recipe(**{name: value}, **others), name) == value
    for value in bad:
        with pytest.raises(ValueError, match=rf"^`{name}[.\w]*` must be "):
            Recipe(**{name: value}, **others)


def test_consistent_fields_are_accepted(caplog):
    Recipe(bleu_tokenize="none", max_decoded_samples=3)
    Recipe(auto_find_batch_size=True, neftune_noise_alpha=5.0)
    Recipe(max_tokens_per_batch=9, per_device_train_batch_size=4, neftune_noise_alpha=None)
    Recipe(**STREAM, max_steps=5, save_strategy="steps", eval_strategy="no")
    Recipe(tasks={"a": {}}, mixing_temperature=3.0, task_mixing="temperature", mixing_limit=3)
    Recipe(train_sampling_strategy="sequential", dataloader_drop_last=True)
    Recipe(max_tokens_per_batch=9, train_sampling_strategy="group_by_length")
    recipe = Recipe(num_validation=0, validation_file="a", predict_with_generate=False)
    assert recipe.validation_file == "a"
