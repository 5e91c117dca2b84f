import csv
import time
from unittest.mock import DEFAULT, Mock

import pytest
from pronunciations import PRONUNCIATIONS
from small_experiments import make_recipe
from small_runs import write_pairs
from subcommands import execute

from metaphrase.choices import tuning
from metaphrase.choices.tuning import Tuning, search_space
from metaphrase.errors import MetaphraseError
from metaphrase.scripts import tune
from metaphrase.training.callbacks import TimeBudget
from metaphrase.training.experiment import Experiment
from metaphrase.training.recipe.recipe import Recipe, load_recipe

optuna = pytest.importorskip("optuna", reason="The search needs optuna: pip install metaphrase[tune].")

# A trial of four steps takes about 0.1 seconds.
FIELDS = {"max_steps": 4, "vocab_size": None, "tokenizer_kind": "char", "metric_for_best_model": "loss"}
FIELDS |= {"predict_with_generate": "false", "learning_rate": 0.01, "test_file": None}
RANGE = {"low": 1e-4, "high": 1e-2, "log": True}


def search(data, folder, trials, is_resumed=False, **fields):
    fields = {**FIELDS, "time_budget": "1h", "search.learning_rate": "[0.0, 0.001]", **fields}
    result = Tuning(make_recipe(data, folder, **fields), trials, is_resumed, time.time())
    result.run()
    return result


def space_of(**search):
    return search_space(Recipe(set_names=("search",), search=search, learning_rate=1e-3))


@pytest.fixture
def data(data, monkeypatch):
    """The pairs, for recipes that are complete: the choice of open fields takes longer than a search."""
    monkeypatch.setattr(tuning, "complete", lambda recipe, **_: (Experiment(recipe, is_dry_run=True), []))
    return data


def test_a_range_holds_the_value_of_the_recipe_and_whole_numbers_stay_whole():
    space, start = space_of(
        learning_rate={"low": 1e-2, "high": 1e-1, "log": True},
        label_smoothing_factor=[0.1, 0.2],
        **{"model.hidden_size": {"low": 128, "high": 512}, "weight_decay": {"low": 0, "high": 1}},
    )
    assert (space["learning_rate"].low, space["learning_rate"].high, space["learning_rate"].log) == (1e-3, 0.1, True)
    assert space["label_smoothing_factor"].choices == (0.0, 0.1, 0.2) and start["label_smoothing_factor"] == 0.0
    kinds = [type(space[name]).__name__ for name in ("model.hidden_size", "weight_decay")]
    assert kinds == ["IntDistribution", "FloatDistribution"]


def test_the_default_search_is_around_the_rule():
    space, start = search_space(Recipe(preset="metaphrase-tiny", model={"hidden_size": 256}, max_tokens_per_batch=1024))
    rate = space["learning_rate"]
    # The rule's rate is 2e-3 at this width; the default of transformers lies below the range, which is extended.
    assert rate.low == start["learning_rate"] == 5e-5 and rate.high == pytest.approx(2e-3 * 30**0.5)
    assert space["max_tokens_per_batch"].choices == (512, 1024, 2048)
    assert set(space) == {"learning_rate", "label_smoothing_factor", "model.dropout", "max_tokens_per_batch"}
    assert "label_smoothing_factor" not in search_space(Recipe(preset="metaphrase-tiny", rejected_column=2))[0]


@pytest.mark.parametrize(
    ("search", "message"),
    [
        ({"learning_rat": RANGE}, "got `learning_rat` in `search`. Did you mean 'learning_rate'"),
        ({"model.dropuot": [0.1]}, "`dropuot` is not a field of MetaphraseConfig"),
        ({"vocab_size": [500]}, "`search` must name .* got `vocab_size`"),
        ({"subword_sampling": [0.1]}, "`search` must name .* got `subword_sampling`"),
        ({"model": {"dropout": [0.1]}}, "`search` must name values"),
        ({"learning_rate": {"low": 2, "high": 1}}, "`search.learning_rate` must be a list"),
        ({"label_smoothing_factor": [0.1, 1.5]}, "`label_smoothing_factor` must be below 1, got 1.5"),
        ({"model.hidden_size": [30]}, "hidden_size"),
    ],
)
def test_a_search_that_cannot_be_is_refused(search, message):
    with pytest.raises(ValueError, match=message):
        space_of(**search)


def test_trials_differ_and_the_best_recipe_is_complete(data, tmp_path):
    result = search(data, tmp_path / "run", 3, **{"search.label_smoothing_factor": "{low: 0.0, high: 0.3}"})
    rows = result.rows
    assert [row["trial"] for row in rows] == [0, 1, 2]
    # The first trial is the recipe as it stands.
    assert rows[0]["learning_rate"] == 0.01 and rows[0]["label_smoothing_factor"] == 0.1
    assert result.best_rows[0]["loss"] == pytest.approx(result.study.best_value, rel=1e-4)
    with (tmp_path / "run" / "trials.tsv").open(encoding="utf-8") as file:
        table = list(csv.DictReader(file, delimiter="\t"))
    assert [float(row["loss"]) for row in table] == [row["loss"] for row in rows]
    best = load_recipe(tmp_path / "run" / "recipe.yaml")
    assert best.learning_rate == result.best_rows[0]["learning_rate"]
    assert best.max_steps == 4 and best.eval_steps == 3
    assert "Trial" in (tmp_path / "run" / "recipe.yaml").read_text(encoding="utf-8").splitlines()[0]
    assert not list((tmp_path / "run").rglob("checkpoint-*")) and not list((tmp_path / "run").rglob("*.safetensors"))


def test_a_trial_that_is_refused_fails_alone(data, tmp_path, monkeypatch):
    effects = [MetaphraseError("The batch is too small"), DEFAULT, MetaphraseError("The loss must be finite"), DEFAULT]
    monkeypatch.setattr(tuning, "make_trainer", Mock(wraps=tuning.make_trainer, side_effect=effects))
    with pytest.raises(MetaphraseError, match="too small"):
        search(data, tmp_path / "refused", 2)
    assert [row["state"] for row in search(data, tmp_path / "run", 2).rows] == ["complete", "fail", "complete"]


def test_bad_trials_are_pruned(data, tmp_path):
    result = search(data, tmp_path / "run", 5, max_steps=5)
    states = {(row["learning_rate"], row["state"]) for row in result.rows}
    # Pruning begins after two complete trials. Other rates than the first train worse or not at all.
    assert {state for _, state in states} == {"complete", "pruned"} and (0.01, "pruned") not in states
    assert result.best_rows[0]["learning_rate"] == 0.01


def test_trials_are_shortened_to_fit_into_the_time(data, tmp_path, monkeypatch):
    result = Tuning(
        make_recipe(data, tmp_path / "run", **FIELDS, time_budget="1h", warmup_steps=2), 2, False, time.time()
    )
    monkeypatch.setattr(Tuning, "_plan", lambda self: {"share": 0.5, "updates": 2, "seconds": 600.0})
    result.run()
    assert [max(trial.intermediate_values) for trial in result.study.trials] == [2, 2]
    assert result._trial_recipe({}).warmup_steps == 1
    assert load_recipe(tmp_path / "run" / "recipe.yaml").max_steps == 4


def test_a_killed_search_is_resumed(data, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tuning, "make_trainer", Mock(side_effect=KeyboardInterrupt))
        search(data, folder, 2)
    with pytest.raises(ValueError, match=r"`output_dir` must not hold another search, got .* Pass --resume"):
        search(data, folder, 2)
    rows = search(data, folder, 2, is_resumed=True).rows
    # The recipe is tried although its trial was killed.
    assert [(row["trial"], row["state"]) for row in rows] == [(1, "complete"), (2, "complete")]
    assert rows[0]["learning_rate"] == 0.01


STREAM = {"streaming": "true", "max_tokens_per_batch": 64, "per_device_train_batch_size": None}


@pytest.mark.parametrize(
    ("fields", "message"), [(STREAM, "`streaming`, `tasks`"), ({"model.hidden_size": 15}, "hidden_size")]
)
def test_what_cannot_be_tuned_is_refused(fields, message, data, tmp_path):
    with pytest.raises(ValueError, match=message):
        search(data, tmp_path / "run", 1, **fields)


def test_a_file_of_pairs_is_tuned(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_pairs(tmp_path / "pairs.tsv", PRONUNCIATIONS[:300])
    sizes = "--model.hidden_size 16 --model.encoder_layers 1 --model.decoder_layers 1 --max_steps 2"
    execute(tune, ["pairs.tsv", "--trials", "2", *sizes.split(), "--time_budget", "1h"])
    lines = capsys.readouterr().out.splitlines()
    fields = ["learning_rate", "label_smoothing_factor", "model.dropout", "max_tokens_per_batch"]
    assert lines[0].split() == ["trial", "state", "wer", "seconds", *fields]
    assert len(lines) == 6 and lines[-1] == "metaphrase train runs/pairs_tune/recipe.yaml"
    folder = tmp_path / "runs" / "pairs_tune"
    best = load_recipe(folder / "recipe.yaml")
    assert best.tokenizer_kind == "char" and best.output_dir == "runs/pairs_tune/best" and best.time_budget is None


def test_a_slow_trial_ends_by_the_clock_and_leaves_no_checkpoint(data, tmp_path, monkeypatch):
    monkeypatch.setattr(Tuning, "_plan", lambda self: {"share": 1.0, "updates": 4, "seconds": 0.0})
    [trial] = search(data, tmp_path / "run", 1).study.trials
    assert list(trial.intermediate_values) == [1] and not list((tmp_path / "run").rglob("checkpoint-*"))


def test_no_trial_outlives_the_time_of_the_search(data, tmp_path, monkeypatch):
    deadlines = []

    def time_budget(deadline, **options):
        deadlines.append(deadline)
        return TimeBudget(deadline, **options)

    monkeypatch.setattr(Tuning, "_plan", lambda self: {"share": 1.0, "updates": 4, "seconds": 7200.0})
    monkeypatch.setattr(Tuning, "_has_time", lambda self: not self.rows)
    monkeypatch.setattr(tuning, "TimeBudget", time_budget)
    result = search(data, tmp_path / "run", 1, time_budget="1h")
    assert deadlines == [result.deadline]
