import json
import shutil
import subprocess
import sys

import pytest
from safetensors.torch import load_file
from small_runs import SMALL
from subcommands import execute

from metaphrase.hub_card.card import FIGURE_NAME, is_own_card
from metaphrase.inference import Generator, progress
from metaphrase.scripts import train
from metaphrase.scripts.__main__ import run
from metaphrase.storage.folders import members_of
from metaphrase.training.callbacks import EndOnInterrupt
from metaphrase.training.experiment import Experiment
from metaphrase.training.recipe.recipe import load_recipe

TEXTS = [f"{noun} {verb}" for noun in ("dog", "cat", "bird", "fish") for verb in ("runs", "sees", "eats")]


@pytest.fixture
def words(tmp_path):
    (tmp_path / "train.tsv").write_text("".join(f"{text}\t{text[::-1]}\n" for text in TEXTS), encoding="utf-8")
    (tmp_path / "train.txt").write_text("".join(f"{text}\n" for text in TEXTS * 4), encoding="utf-8")
    fields = {"data_dir": tmp_path, "output_dir": tmp_path / "run", "train_file": "train.tsv"}
    fields |= {"tokenizer_kind": "char", "preset": "metaphrase-tiny", "max_steps": 2, "save_steps": 1}
    fields |= {"logging_steps": 1, "per_device_train_batch_size": 4, "use_cpu": "true", "disable_tqdm": "true"}
    fields |= {f"model.{name}": value for name, value in SMALL.items()}
    return [word for name, value in fields.items() for word in (f"--{name}", str(value))]


def test_a_dry_run_may_look_at_a_folder_that_holds_a_run(words, tmp_path, capsys):
    assert run("train", words) == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    assert run("train", [*words, "--dry_run"]) == 0
    assert "parameters" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before
    with pytest.raises(ValueError, match=r"`output_dir` must not hold .* with checkpoint-2"):
        Experiment(load_recipe(None, words), is_dry_run=True).train()


def test_without_a_terminal_progress_is_lines_and_the_end_names_next_steps(words, tmp_path, monkeypatch, capfd, caplog):
    monkeypatch.setattr(progress, "_LEAST_SECONDS", 0)
    words += ["--validation_file", "train.tsv", "--eval_strategy", "steps", "--eval_steps", "2", "--metrics", "bleu"]
    words += ["--generation_max_length", "9", "--disable_tqdm", "false"]
    with caplog.at_level("INFO"):
        assert run("train", words) == 0
    [first, second] = [line for line in caplog.messages if "  update " in line]
    assert first.startswith(" 50 %  update 1/2  ") and "  loss " in second
    assert any(line.startswith("update 2, validation: loss ") and "bleu 0" in line for line in caplog.messages)
    said = "".join(capfd.readouterr())
    assert "%|" not in said and "{'loss'" not in said and "\r" not in said
    end = caplog.messages[-1]
    assert end.startswith(f"The model lies in {tmp_path / 'run'}\nNext:\n")
    commands = [line.split() for line in end.splitlines() if line.startswith("  metaphrase ")]
    assert [words[1] for words in commands] == ["generate", "evaluate", "push"]
    assert {words[2] for words in commands} == {str(tmp_path / "run")}


def test_an_interruption_names_the_checkpoint(words, tmp_path, monkeypatch, capsys):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("metaphrase.training.experiment.save_final", interrupt)
    assert run("train", words) == 130
    checkpoint = tmp_path / "run" / "checkpoint-2"
    said = capsys.readouterr().err
    assert f"interrupted. The same command with --resume goes on from {checkpoint}." in said
    shutil.rmtree(tmp_path / "run")
    assert run("train", [*words, "--save_strategy", "no"]) == 130
    assert "interrupted. There is no checkpoint yet to go on from." in capsys.readouterr().err


def test_a_run_that_ctrl_c_has_ended_is_no_success(words, tmp_path, monkeypatch, capsys):
    def end(callback, args, state, control, **kwargs):
        callback.has_ended = control.should_training_stop = True

    monkeypatch.setattr(EndOnInterrupt, "on_step_end", end)
    assert run("train", words) == 130
    assert "interrupted. The model of this update is saved; --resume goes on" in capsys.readouterr().err
    assert (tmp_path / "run" / "model.safetensors").is_file()


@pytest.mark.parametrize("objective", ["pairs", "span_corruption"])
def test_a_run_without_scores_has_a_card_and_a_curve_and_says_where_it_lies(objective, words, tmp_path, caplog):
    if objective != "pairs":
        words += ["--objective", objective, "--train_file", "null", "--train_text_file", "train.txt"]
        words += ["--num_sentinels", "20", "--max_source_length", "40", "--max_target_length", "40"]
    else:
        words += ["--num_validation", "0"]
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.json").write_text('{"scores": {"bleu": {"score": 1.0}}}', encoding="utf-8")
    (folder / "data_report.json").write_text("{}", encoding="utf-8")
    with caplog.at_level("INFO"):
        assert run("train", words) == 0
    assert f"The model lies in {folder}" in caplog.text
    assert ("metaphrase generate" in caplog.text) == (objective == "pairs")
    assert is_own_card(folder / "README.md") and (folder / FIGURE_NAME).is_file()
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "No scores are known" in card and f"({FIGURE_NAME})" in card
    # Earlier scores belong to other weights.
    assert not (folder / "metrics.json").exists() and (folder / "metrics_of_earlier_weights.json").is_file()


def test_help_is_short_and_the_fields_have_a_list_of_their_own(capsys):
    with pytest.raises(SystemExit):
        execute(train, ["--help"])
    assert "--help_fields" in capsys.readouterr().out
    execute(train, ["--help_fields"])
    listed = capsys.readouterr().out
    assert "--max_tokens_per_batch" in listed and "--learning_rate [5e-05]" in listed


@pytest.mark.slow
def test_script_runs_as_a_file():
    """It must still find the modules `evaluate` and `tokenize`, which are files beside it."""
    listed = subprocess.run([sys.executable, train.__file__, "--help_fields"], capture_output=True, text=True)
    assert "--max_tokens_per_batch" in listed.stdout and "--learning_rate [5e-05]" in listed.stdout, listed.stderr


def test_several_seeds_leave_one_folder_that_is_an_ensemble(words, tmp_path, capsys, caplog):
    folder = tmp_path / "run"
    words += ["--num_validation", "2", "--num_test", "3", "--metrics", "bleu", "--generation_max_length", "9"]
    words += ["--seed", "5"]
    with caplog.at_level("INFO"):
        assert run("train", [*words, "--num_seeds", "2"]) == 0
    members = [folder / "stages" / "seed_5", folder / "stages" / "seed_6"]
    metrics = [json.loads((path / "metrics.json").read_text("utf-8")) for path in (folder, *members)]
    assert metrics[0]["models"] == {path.name: part["scores"] for path, part in zip(members, metrics[1:], strict=True)}
    weights = [load_file(path / "model.safetensors")["model.decoder.norm.weight"] for path in members]
    assert not weights[0].equal(weights[1])
    # The test pairs of one model are no training pairs of another.
    corpora = [Experiment(load_recipe(path / "recipe.yaml", words[:4]), is_dry_run=True).corpus for path in members]
    for corpus in corpora:
        corpus.load()
    assert corpora[0].splits["test"]["source"][:] == corpora[1].splits["test"]["source"][:]

    generators = [Generator.from_pretrained(name) for name in (folder, members)]
    texts, options = TEXTS[:3], {"max_new_tokens": 6, "show_progress": False}
    assert generators[0].generate(texts, **options) == generators[1].generate(texts, **options)
    assert len(generators[0].members) == 1
    for seeds in ("1", "2"):
        with pytest.raises(ValueError, match=r"`output_dir` must not hold .* with ensemble\.json"):
            train.train(load_recipe(None, [*words, "--num_seeds", seeds]), False, 0.0)


def test_an_ensemble_replaces_no_single_model(words, tmp_path, capsys):
    assert run("train", words) == 0
    for resume in ([], ["--resume"]):
        assert run("train", [*words, *resume, "--num_seeds", "2"]) == 2
        assert "`output_dir` must not hold a model" in capsys.readouterr().err


def test_a_stopped_ensemble_is_resumed(words, tmp_path, monkeypatch):
    words += ["--seed", "5", "--num_seeds", "2", "--time_budget", "1h"]
    train_all, budgets = Experiment.train, []

    def train_first(experiment, callbacks):
        budgets.append(experiment.recipe.time_budget)
        return train_all(experiment, callbacks) if experiment.arguments.seed == 5 else 1 / 0

    monkeypatch.setattr(Experiment, "train", train_first)
    with pytest.raises(ZeroDivisionError):
        run("train", words)
    assert [round(int(budget[:-1]) / 1800) for budget in budgets] == [1, 2]
    before = (tmp_path / "run" / "stages" / "seed_5" / "model.safetensors").read_bytes()
    monkeypatch.setattr(Experiment, "train", train_all)
    assert run("train", [*words, "--resume"]) == 0
    assert (tmp_path / "run" / "stages" / "seed_5" / "model.safetensors").read_bytes() == before
    assert members_of(tmp_path / "run") == [tmp_path / "run" / "stages" / name for name in ("seed_5", "seed_6")]
