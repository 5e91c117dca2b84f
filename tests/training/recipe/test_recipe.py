import dataclasses
from pathlib import Path

import pytest
import yaml
from transformers import Seq2SeqTrainingArguments

from metaphrase.training.recipe.fields import OWN_FIELDS
from metaphrase.training.recipe.recipe import Recipe, describe_fields, load_recipe


@pytest.fixture
def recipe_file(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def values_of(recipe, names):
    return {name: getattr(recipe, name) for name in names}


def test_repr_shows_the_fields_that_were_set_and_no_token():
    recipe = load_recipe(
        None, ["--eval_strategy", "steps", "--preset", "metaphrase-tiny", "--hub_token", "hf_verysecret"]
    )
    assert repr(recipe) == "Recipe(preset='metaphrase-tiny', eval_strategy='steps', hub_token='...')"


def test_values_of_a_file_have_the_type_of_their_field(recipe_file):
    recipe = load_recipe(
        recipe_file(
            "learning_rate: 1e-3\nmax_steps: 1e4\nwarmup_steps: 2000\neval_strategy: no\nbf16: yes\nsave_total_limit: null\n"
            "train_file:\nsource_prefix: 'yes'\nbleu_tokenize: none\nmetrics: bleu, chrf\nlabel_names: [labels]\n"
            "source_column: 0\ntarget_column: de\nlr_scheduler_kwargs: {num_cycles: 2}\nmodel: {hidden_size: 64, dropout: 5E-1}\n"
            "source_language: no\nrun_name: 1:30\n"
        )
    )
    expected = {"learning_rate": 1e-3, "max_steps": 10_000, "warmup_steps": 2000, "eval_strategy": "no", "bf16": True}
    expected |= {"save_total_limit": None, "train_file": None, "source_prefix": "yes", "bleu_tokenize": "none"}
    expected |= {"metrics": ["bleu", "chrf"], "source_column": 0, "target_column": "de", "source_language": "no"}
    expected |= {"lr_scheduler_kwargs": {"num_cycles": 2}, "model": {"hidden_size": 64, "dropout": 0.5}}
    expected |= {"run_name": "1:30", "label_names": ["labels"]}
    assert values_of(recipe, expected) == expected and type(recipe.max_steps) is int


HIDDEN = ("sortish_sampler", "generation_config", "use_liger_kernel")


def test_every_training_argument_is_a_field():
    recipe, listed = Recipe(), describe_fields()
    for item in dataclasses.fields(Seq2SeqTrainingArguments):
        getattr(recipe, item.name)
        # Not offered: fields of `metaphrase push`, fields that are refused, and fields without effect.
        is_left_out = item.name.startswith(("push_to_hub", "hub_", "do_")) or item.name in HIDDEN
        assert (f"--{item.name} " in listed) is not is_left_out
        assert item.name not in OWN_FIELDS
    assert all(f"--{name}" in listed for name in OWN_FIELDS)


def test_overrides_by_type(recipe_file):
    path = recipe_file(
        "learning_rate: 5\nbf16: true\nmodel: {hidden_size: 8, rope: {theta: 1}}\ntokenizer_kind: bpe\nmax_train_samples: 9\n"
    )
    words = (
        "--learning_rate 1e-3 --no_bf16 --fp16 --max-steps -1 --label_smoothing_factor=1e-1 --metrics bleu chrf "
        "--model.hidden_size 256 --model.rope.theta 1e4 --model.gated_mlp --model.activation_function gelu "
        "--no_repeat_ngram_size 3 --max_train_samples null --source_column 1 --report_to tensorboard wandb "
        "--tokenizer_kind null --label_names a,b --bleu_tokenize none --seed 1 --seed 2 --tf32 no --output_dir 2024 "
        "--freeze *.bias"
    )
    recipe = load_recipe(path, [*words.split(), "--source_prefix=--to de: ", "--optim_target_modules", "[x, y]"])
    expected = {"learning_rate": 1e-3, "bf16": False, "fp16": True, "tf32": False, "max_steps": -1, "seed": 2}
    expected |= {"label_smoothing_factor": 0.1, "metrics": ["bleu", "chrf"], "no_repeat_ngram_size": 3}
    expected |= {"max_train_samples": None, "tokenizer_kind": None, "source_column": 1, "bleu_tokenize": "none"}
    expected |= {"report_to": ["tensorboard", "wandb"], "label_names": ["a", "b"], "optim_target_modules": ["x", "y"]}
    expected |= {"output_dir": "2024", "source_prefix": "--to de: ", "freeze": ["*.bias"]}
    model = {"hidden_size": 256, "rope": {"theta": 1e4}, "gated_mlp": True, "activation_function": "gelu"}
    assert values_of(recipe, expected) == expected and recipe.model == model


def test_an_empty_field_of_our_own_is_not_set(recipe_file):
    path = recipe_file("model:\n#  hidden_size: 8\nmetrics:\ntoo_long:\nmax_source_length: 9\nvocab_size: 99\n")
    recipe = load_recipe(path, ["--max_source_length", "null", "--vocab_size", "null"])
    unset = Recipe()
    for name in ("model", "metrics", "too_long", "max_source_length", "vocab_size"):
        assert getattr(recipe, name) == getattr(unset, name) and not recipe.is_set(name)
    assert load_recipe(path, ["--model.hidden_size", "16"]).model == {"hidden_size": 16}
    assert load_recipe(recipe_file("model: {hidden_size: 8}"), ["--model", "null"]).model == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learnin_rate: 1", r"`learnin_rate` in .*recipe\.yaml.*'learning_rate'"),
        ("seed: 1\nseed: 2", r"recipe\.yaml .*`seed` occurs twice"),
        ("- seed", "must be a mapping"),
        ("seed: [", r"recipe\.yaml must be valid YAML"),
        *((f"seed: {value}", "^`seed` must be .*, got") for value in (1.5, "true", "")),
        *((f"learning_rate: {value}", "^`learning_rate` must be .*, got") for value in (".nan", "fast")),
        ("output_dir: 2024", "`output_dir` must be .*, got 2024"),
        ("model: tiny", "`model` must be .*, got 'tiny'"),
        ("too_long: cut", "`too_long` must be 'skip', 'truncate' or 'error', got 'cut'"),
        ("lr_scheduler_type: triangle", "`lr_scheduler_type` must be 'linear', .*got 'triangle'"),
        ("eval_strategy: false", "`eval_strategy` must be 'no', 'steps' or 'epoch'"),
    ],
)
def test_refused_files(recipe_file, text, message):
    with pytest.raises(ValueError, match=message):
        load_recipe(recipe_file(text))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--learnin_rate", "1"], "`learnin_rate` in the command line.*'learning_rate'"),
        (["seed", "1"], "got 'seed'"),
        (["--seed"], "`seed` must be a number"),
        (["--seed", "1", "2"], "`seed` must have one value, got 1 2. A recipe or file stands before all options"),
        (["--no_seed"], "`seed` must be "),
        (["--seed.x", "1"], "`seed` must be "),
        (["--model.a", "1", "--model.a.b", "2"], "`model` must be a mapping"),
    ],
)
def test_refused_overrides(words, message):
    with pytest.raises(ValueError, match=message):
        load_recipe(None, words)


def test_values_reach_the_training_arguments(tmp_path):
    recipe = load_recipe(None, ["--learning_rate", "1e-3", "--use_cpu", "--warmup_steps", "7"])
    with pytest.raises(ValueError, match="`output_dir`"):
        recipe.training_arguments()
    changed = recipe.replace(seed=5)
    arguments = changed.training_arguments(output_dir=str(tmp_path), max_steps=3)
    assert (arguments.learning_rate, arguments.warmup_steps, arguments.seed, arguments.max_steps) == (1e-3, 7, 5, 3)
    assert arguments.predict_with_generate and not arguments.remove_unused_columns
    assert arguments.report_to == [] and arguments.run_name == tmp_path.name
    assert changed.is_set("seed") and not changed.is_set("max_steps") and not recipe.is_set("seed")


def test_a_recipe_does_not_change():
    with pytest.raises(ValueError, match="learning_rate"):
        Recipe().learning_rate = 1
    with pytest.raises(ValueError, match="`learning_rate` must be at least 0"):
        Recipe().replace(learning_rate=-1.0).checked()


@pytest.mark.parametrize(
    ("word", "expected"),
    [("true", True), ("Yes", True), ("no", False), ("false", False), ("null", None), ("runs/checkpoint-3",) * 2],
)
def test_whether_to_resume_is_decided_while_parsing(recipe_file, word, expected):
    assert load_recipe(None, ["--resume_from_checkpoint", word]).resume_from_checkpoint == expected
    assert load_recipe(recipe_file(f"resume_from_checkpoint: {word}")).resume_from_checkpoint == expected


def test_saved_recipe_loads_as_what_was_set(tmp_path, recipe_file):
    path = recipe_file(
        "train_file: a.tsv\nlearning_rate: 1e-5\ntoo_long: skip\neval_strategy: no\nsource_prefix: '1e-3'\nrun_name: '1:30'\n"
        "target_language: no\nsave_total_limit: null\nmodel: {hidden_size: 8, activation_function: 'null'}\nmetrics: [bleu]\n"
    )
    folder = tmp_path / "data"
    overrides = ["--data_dir", str(folder), "--hub_token", "secret", "--output_dir", str(tmp_path / "out")]
    recipe = load_recipe(path, overrides)
    recipe = recipe.replace(num_beams=4)
    recipe.save(tmp_path / "saved.yaml")
    text = (tmp_path / "saved.yaml").read_text(encoding="utf-8")
    assert str(tmp_path) not in text and "secret" not in text
    loaded = load_recipe(tmp_path / "saved.yaml")
    expected = dict(yaml.safe_load(path.read_text()), learning_rate=1e-5, eval_strategy="no", target_language="no")
    assert loaded.to_dict() == {**expected, "num_beams": 4}
    assert loaded.to_dict() == recipe.to_dict()
    # A reader of YAML 1.1 finds the same values.
    assert yaml.safe_load(text) == recipe.to_dict()


@pytest.mark.parametrize(
    ("metric", "given", "expected"),
    [("german_bleu", None, True), ("eval_ter", None, False), ("loss", None, False), ("ter", True, True)],
)
def test_the_better_direction_of_a_metric_is_known(metric, given, expected):
    recipe = Recipe(output_dir="run", use_cpu=True, metric_for_best_model=metric, greater_is_better=given)
    assert recipe.training_arguments().greater_is_better is expected


@pytest.mark.parametrize(
    ("metric", "given", "mode"), [("bleu", None, "max"), ("loss", None, None), ("bleu", {"mode": "min"}, "min")]
)
def test_the_rate_falls_where_the_metric_gets_no_better(metric, given, mode):
    fields = {"metric_for_best_model": metric, "eval_strategy": "steps", "lr_scheduler_type": "reduce_lr_on_plateau"}
    fields |= {} if given is None else {"lr_scheduler_kwargs": given}
    recipe = Recipe(output_dir="run", use_cpu=True, eval_steps=1, **fields)
    assert (recipe.training_arguments().lr_scheduler_kwargs or {}).get("mode") == mode
    assert recipe.to_dict().get("lr_scheduler_kwargs") == given


STREAM = {"train_file": "a", "streaming": True, "max_tokens_per_batch": 600}
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
        ({"objective": "ul2", "subword_sampling": 0.1}, ("objective", "subword_sampling")),
        ({"tokenizer_kind": "word", "subword_sampling": 0.1}, ("tokenizer_kind", "subword_sampling")),
        ({"augmentation": {"typo": 0.1}}, ("augmentation.typo",)),
        ({"augmentation": {"typos": 2}}, ("augmentation.typos",)),
        ({"augmentation": {"terms": 0.1}, "joint_vocabulary": False}, ("augmentation.terms",)),
        ({**TEXT, "num_seeds": 2}, ("num_seeds", "objective")),
        ({"tasks": {"a": {}}, "monolingual_target": "a"}, ("monolingual_target", "tasks")),
        ({"weight_column": 2, "train_source_file": "a"}, ("weight_column", "train_source_file")),
        ({"reward": "blue"}, ("reward",)),
        ({"reward": "bleu", "weight_column": "weight"}, ("reward", "weight_column")),
        ({"reward": "bleu", "model_name_or_path": "x", "label_smoothing_factor": 0.1}, ("label_smoothing_factor",)),
        ({"reward": "bleu", "model_name_or_path": "x", "candidates": "beam"}, ("candidates", "reward_loss")),
        ({"joint_vocabulary": True, "target_vocab_size": 9}, ("joint_vocabulary", "target_vocab_size")),
        ({"target_tokenizer_name_or_path": "x"}, ("target_tokenizer_name_or_path", "tokenizer_name_or_path")),
        ({"model_name_or_path": "x", "preset": "y"}, ("model_name_or_path", "preset")),
        ({"model_name_or_path": "x", "vocab_size": 9}, ("model_name_or_path", "vocab_size")),
        ({"early_stopping_patience": 2}, ("early_stopping_patience", "eval_strategy")),
        ({"early_stopping_patience": 2, "eval_strategy": "epoch"}, ("metric_for_best_model",)),
        ({**STREAM, "max_steps": 5, "logging_strategy": "epoch"}, ("logging_strategy", "streaming")),
        ({"max_tokens_per_batch": 9, "dataloader_drop_last": True}, ("dataloader_drop_last", "max_tokens_per_batch")),
        (BEST | {"average_last": 2, "save_strategy": "steps"}, ("average_last", "load_best_model_at_end")),
        (SAVED | {"average_last": 4, "save_total_limit": 2}, ("save_total_limit",)),
        (SAVED | {"average_last": 2, "save_strategy": "no"}, ("save_strategy",)),
        (SAVED | {"average_best": 2, "eval_strategy": "no"}, ("eval_strategy",)),
        (SAVED | {"average_best": 2, "save_strategy": "epoch"}, ("save_strategy",)),
        (SAVED | {"average_best": 2, "save_steps": 5, "eval_steps": 3}, ("save_steps",)),
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


@pytest.mark.parametrize(
    ("name", "good", "bad", "others"),
    [
        ("label_smoothing_factor", (0.0, 0.9), (1.0, 10.0, -0.1), {}),
        ("noise_density", (0.15,), (0.0, 1.0), {"objective": "span_corruption"}),
        *((f"{event}_steps", (0.5, 1), (0, -1, INF), {}) for event in ("save", "eval", "logging")),
        *((f"per_device_{phase}_batch_size", (1,), (0, -1), {}) for phase in ("train", "eval")),
        ("max_steps", (-1, 5), (-7, 0), {}),
        ("num_train_epochs", (0.5,), (INF, 0), {}),
        ("save_total_limit", (1, None), (0, -1), {}),
        ("learning_rate", (0.0,), (-1.0, INF, 1e30), {}),
        ("seed", (2**32 - 1,), (-1, 2**70, True), {}),
        ("num_beams", (1,), (0, 10**6), {}),
        ("repetition_penalty", (1.2,), (INF, 1e-320), {}),
        ("log_level", ("info",), ("junk",), {}),
    ],
)
def test_values_have_their_bounds_at_the_entrance(name, good, bad, others):
    for value in good:
        assert getattr(Recipe(**{name: value}, **others), name) == value
    for value in bad:
        with pytest.raises(ValueError, match=rf"^`{name}[.\w]*` must be "):
            Recipe(**{name: value}, **others)


def test_consistent_fields_are_accepted():
    Recipe(auto_find_batch_size=True, neftune_noise_alpha=5.0)
    Recipe(max_tokens_per_batch=9, per_device_train_batch_size=4, neftune_noise_alpha=None)
    Recipe(**STREAM, max_steps=5, save_strategy="steps", eval_strategy="no")
    Recipe(tasks={"a": {}}, mixing_temperature=3.0, task_mixing="temperature", mixing_limit=3)
    Recipe(max_tokens_per_batch=9, train_sampling_strategy="group_by_length")
    recipe = Recipe(num_validation=0, validation_file="a", predict_with_generate=False)
    assert recipe.validation_file == "a"
