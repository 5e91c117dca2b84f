import json

import pytest
from small_experiments import read_log
from small_runs import SMALL, write_pairs
from transformers import M2M100Config, MarianConfig

from metaphrase.modeling import MetaphraseConfig
from metaphrase.training.experiment import Experiment
from metaphrase.training.model_setup import longest_sequences
from metaphrase.training.recipe.recipe import Recipe

SHORT = [("a cat", "eine Katze"), ("the dog", "der Hund"), ("a dog", "ein Hund"), ("the cat", "die Katze")]
LONG = ("the dog and the cat and a cat", "der Hund und die Katze und eine Katze und noch eine")
LEARNED = {"position_embedding_type": "learned", "max_position_embeddings": 20}


@pytest.fixture
def make(tmp_path):
    for name, pairs in {"train": SHORT, "scored": [SHORT[0], LONG, SHORT[1]]}.items():
        write_pairs(tmp_path / f"{name}.tsv", pairs)

    def experiment(model=None, **fields):
        base = {"data_dir": str(tmp_path), "output_dir": str(tmp_path / "run"), "train_file": "train.tsv"}
        base |= {"tokenizer_kind": "byte", "model": SMALL | (model or {}), "metrics": ["chrf"]}
        base |= {"max_source_length": 20, "max_target_length": 20, "per_device_train_batch_size": 2, "max_steps": 2}
        base |= {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "no"}
        base |= {"disable_tqdm": True, "use_cpu": True}
        fields = {name: value for name, value in (base | fields).items() if value is not None}
        return Experiment(Recipe.from_mapping(fields, "the test"))

    experiment.folder = tmp_path
    return experiment


def report_of(make, split):
    return json.loads((make.folder / "run" / "data_report.json").read_text(encoding="utf-8"))[split]


def last_evaluation(make):
    return read_log(make.folder / "run")[-1]


@pytest.mark.parametrize(("split", "too_long"), [("validation", "skip"), ("test", "error")])
def test_what_the_model_cannot_read_is_refused_before_training(make, split, too_long, monkeypatch):
    strategy = {"eval_strategy": "no"} if split == "test" else {}
    experiment = make(LEARNED, too_long=too_long, **{f"{split}_file": "scored.tsv"}, **strategy)
    monkeypatch.setattr(experiment, "make_model", lambda: pytest.fail("The model must not be made."))
    message = f"The {split} pairs must be within the 20 tokens .*, got 1 sources and 1 targets .* `too_long: truncate`"
    with pytest.raises(ValueError, match=message):
        experiment.train()


def test_what_the_model_cannot_read_is_truncated_counted_and_scored_against_the_whole_reference(make):
    result = make(LEARNED, too_long="truncate", validation_file="scored.tsv", max_tokens_per_batch=40).train()
    report = report_of(make, "validation")
    assert (report["kept"], report["source_truncated"], report["target_truncated"]) == (3, 1, 1)
    assert result["num_examples"] == 3
    assert (result["num_truncated"], result["num_truncated_references"]) == (1, 1)
    # The long pair has 20 labels. All labels of the others count, with their ends.
    assert result["num_target_tokens"] == 20 + len(SHORT[0][1]) + len(SHORT[1][1]) + 2
    assert last_evaluation(make)["eval_loss"] == pytest.approx(result["loss"], rel=1e-4)
    assert last_evaluation(make)["eval_chrf"] == pytest.approx(result["scores"]["chrf"]["score"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_source_length": 21}, "`max_source_length` must be at most 20, .* got 21"),
        ({"max_target_length": 30}, "`max_target_length` must be at most 20, .* got 30"),
        ({"generation_max_length": 22}, "`generation_max_length` must be at most 21, .* got 22"),
        (
            {"tasks": {"a": {"train_file": "train.tsv", "max_source_length": 30}}, "train_file": None},
            "Task 'a': `max_sou",
        ),
    ],
)
def test_limits_beyond_the_positions_are_refused_at_once(make, fields, message):
    with pytest.raises(ValueError, match=message):
        make(LEARNED, **fields)
    make({"position_embedding_type": "relative", "max_position_embeddings": 20}, **fields, eval_strategy="no")


def test_limits_that_were_not_given_are_what_the_model_can_read(make):
    write_pairs(make.folder / "train.tsv", [*SHORT, LONG])
    make(LEARNED, max_source_length=None, max_target_length=None, eval_strategy="no").train()
    report = report_of(make, "train")
    assert (report["read"], report["source_too_long"]) == (5, 1)
    expected = "# the model reads no more\nmax_source_length: 20\nmax_target_length: 20\n"
    assert expected in (make.folder / "run" / "recipe.yaml").read_text()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (MetaphraseConfig(position_embedding_type="rotary", max_position_embeddings=30), (30, 30)),
        (MetaphraseConfig(**LEARNED, decoder_max_position_embeddings=30), (20, 30)),
        (MetaphraseConfig(position_embedding_type="relative", max_position_embeddings=30), (None, None)),
        (MarianConfig(max_position_embeddings=30), (30, 30)),
        (M2M100Config(max_position_embeddings=30), (None, None)),
    ],
)
def test_the_model_to_fine_tune_says_what_it_can_read(config, expected, tmp_path):
    config.save_pretrained(tmp_path)
    assert longest_sequences(Recipe(model_name_or_path=str(tmp_path))) == expected
