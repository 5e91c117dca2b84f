from types import SimpleNamespace

import pytest
from small_experiments import make_recipe, train
from transformers import GenerationConfig, TrainerState

from metaphrase.choices.alerts import TrainingAlerts, run_alerts
from metaphrase.demo.corpus import make_demo_corpus
from metaphrase.training.experiment import Experiment


@pytest.fixture(scope="module")
def pairs():
    return make_demo_corpus(num_train=300, num_validation=60, num_test=60)


def alerts_of_data(folder, pairs, caplog, **fields):
    for split, rows in pairs.items():
        (folder / f"{split}.tsv").write_text("".join(f"{s}\t{t}\n" for s, t in rows), encoding="utf-8")
    caplog.clear()
    experiment = Experiment(make_recipe(folder, folder / "run", **fields), is_dry_run=True)
    experiment.prepare()
    experiment.make_model()
    return [record.getMessage() for record in caplog.records if record.name == "metaphrase.choices.alerts"]


def test_good_pairs_raise_no_alert(tmp_path, pairs, caplog):
    assert alerts_of_data(tmp_path, pairs, caplog) == []
    # Half of the pairs of a text normalizer are equal on both sides.
    rows = pairs["train"]
    normalization = {**pairs, "train": [(s, s if number % 2 else t) for number, (s, t) in enumerate(rows)]}
    assert alerts_of_data(tmp_path, normalization, caplog) == []
    # A classifier has few targets.
    classes = {split: [(s, ["bad", "good"][len(s) % 2]) for s, _ in rows] for split, rows in pairs.items()}
    assert alerts_of_data(tmp_path, classes, caplog) == []


@pytest.mark.parametrize(
    ("change", "alert"),
    [
        (lambda p: {"train": p["train"] * 10}, "train: 2,700 of 3,000 pairs repeat an earlier one"),
        (lambda p: {"train": [("English", "German"), *p["train"]]}, "train: the first pair is 'English' and 'German'."),
        (lambda p: {"train": [(f'"{s}"', f'"{t}"') for s, t in p["train"]]}, "train: quotes stand around nearly all"),
        (lambda p: {"train": [(s, s) for s, _ in p["train"]]}, "train: source and target are the same text in 100 %"),
        (
            lambda p: {"train": p["train"][:60] + [(s, "Nein.") for s, _ in p["train"][60:]]},
            "train: 80 % of the targets",
        ),
        (lambda p: {"validation": p["validation"][:48] + p["train"][:12]}, "validation: 12 of 60 sources occur in"),
    ],
)
def test_bad_pairs_raise_one_alert(change, alert, tmp_path, pairs, caplog):
    [message] = alerts_of_data(tmp_path, pairs | change(pairs), caplog)
    assert message.startswith(alert)


@pytest.mark.parametrize(
    ("fields", "width", "direction"),
    [
        ({"learning_rate": 5e-5}, 512, "low for a new network"),
        ({"learning_rate": 1e-2}, 128, "high for a new network"),
        ({"learning_rate": 1e-3}, 512, None),
        ({"learning_rate": 1e-2, "optim": "adafactor"}, 512, None),
        ({"learning_rate": 5e-3, "model_name_or_path": "base"}, 128, "high for fine-tuning"),
        ({"learning_rate": 5e-3, "model_name_or_path": "base", "lora_rank": 4}, 512, None),
    ],
)
def test_a_learning_rate_of_another_order_is_named(fields, width, direction, tmp_path):
    recipe = make_recipe(tmp_path, tmp_path, **fields)
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=width), generation_config=GenerationConfig())
    messages = list(run_alerts(recipe, recipe.training_arguments(), {}, model))
    assert len(messages) == (direction is not None)
    assert all(f"is far too {direction} of width {width}" in message for message in messages)


def test_a_run_that_deserves_them_gets_all_alerts(data, tmp_path, caplog):
    fields = {"max_steps": 6, "eval_steps": 2, "save_strategy": "no", "generation_max_length": 60}
    train(data, tmp_path / "run", **fields)
    for text in ("far too low for a new network", "Scores stay at zero: bleu 0.0", "met the length limit"):
        assert caplog.text.count(text) == 1


def test_references_beyond_the_limit_are_named(data, tmp_path, caplog):
    fields = {"max_steps": 1, "save_strategy": "no", "eval_strategy": "no", "generation_max_length": 3}
    train(data, tmp_path / "run", **fields)
    assert "validation: 8 of 8 references are longer than the length limit of outputs (2)" in caplog.text


def replay(scores, caplog, updates=1200):
    caplog.clear()
    callback, state = TrainingAlerts(list(scores)), TrainerState(max_steps=updates)
    for state.global_step in (300, 600, 900):
        state.log_history.append(
            {f"eval_{name}": score for name, score in scores.items()} | {"step": state.global_step}
        )
        callback.on_evaluate(None, state, None)
    return caplog.messages


def test_scores_that_stay_at_zero(caplog):
    [message] = replay({"bleu": 0.0, "chrf": 9.0}, caplog)
    assert message.startswith("Scores stay at zero: bleu 0.0, chrf 9.0 after 900 updates.")
    assert replay({"bleu": 0.0, "chrf": 30.0}, caplog) == []
    # Early evaluations do not count, and neither does a share of sentences that are right as a whole.
    assert replay({"bleu": 0.0, "chrf": 9.0}, caplog, updates=6000) == replay({"exact_match": 0.0}, caplog) == []
