"""The command line: `metaphrase demo` replaces its own earlier work, nothing else, and only for a run that can be."""

import shutil

import pytest
from cli_texts import contents
from small_runs import SMALL

from metaphrase.scripts import demo
from metaphrase.scripts.__main__ import run
from metaphrase.training.checkpointing.folders import checkpoints_in

SPLITS = ("train", "validation", "test")
FIELDS = {"max_steps": 2, "save_steps": 1, "save_strategy": "steps", "eval_strategy": "no", "use_cpu": "true"}
FIELDS |= {"load_best_model_at_end": "false", "disable_tqdm": "true", "vocab_size": 300, "generation_max_length": 8}
FIELDS |= {f"model.{name}": value for name, value in SMALL.items()}
WORDS = [word for name, value in FIELDS.items() for word in (f"--{name}", str(value))]


@pytest.fixture(autouse=True)
def few_pairs(monkeypatch):
    """Few pairs of the other splits than training."""
    for name in ("write_demo_corpus", "write_demo_summaries"):
        whole = getattr(demo, name)
        monkeypatch.setattr(
            demo,
            name,
            lambda folder, num_train, whole=whole: whole(folder, num_train=num_train, num_validation=4, num_test=6),
        )


def call(folder, *words, num_train=2000):
    return run("demo", ["--output_dir", str(folder), "--num_train", str(num_train), *WORDS, *words])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of a demo, which tests leave as it is."""
    folder = tmp_path_factory.mktemp("made") / "demo"
    with pytest.MonkeyPatch.context() as patch:
        few_pairs.__wrapped__(patch)
        assert call(folder) == 0
    return folder


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--num_train_epochss", "2"], "`num_train_epochss`"),
        (["--learning_rate", "fast"], "`learning_rate` must be"),
        (["--metrics", "blue"], "blue"),
        (["--num_train", "0"], "`num_train` must be at least 1, got 0"),
        (["--num_train", "5"], "The counts of pairs must be within what the grammar gives"),
    ],
)
def test_mistakes_leave_an_earlier_demo(words, said, made, capsys):
    before = contents(made)
    assert call(made, *words) == 2
    assert said in capsys.readouterr().err and contents(made) == before


def test_demo_is_made_anew(made, tmp_path, capsys):
    shutil.copytree(made, tmp_path / "demo")
    (tmp_path / "demo" / "checkpoint-7").mkdir()
    before = contents(tmp_path / "demo")
    assert call(tmp_path / "demo", num_train=1900) == 0
    assert "BLEU" in capsys.readouterr().out
    after = contents(tmp_path / "demo")
    assert [path.name for path in checkpoints_in(tmp_path / "demo")] == ["checkpoint-1", "checkpoint-2"]
    assert {path for path in before if before[path] != after[path]} >= {"data/train.tsv", "model.safetensors"}


def test_demo_that_was_stopped_goes_on(made, tmp_path, caplog):
    shutil.copytree(made, tmp_path / "demo")
    before = contents(tmp_path / "demo" / "data")
    caplog.set_level("INFO")
    assert call(tmp_path / "demo", "--resume", "--max_steps", "3", num_train=1900) == 0
    assert "Making the corpus" not in caplog.text and contents(tmp_path / "demo" / "data") == before
    assert [path.name for path in checkpoints_in(tmp_path / "demo")][-1] == "checkpoint-3"


@pytest.mark.parametrize("words", [[], ["--resume"]], ids=str)
@pytest.mark.parametrize("splits", [("train",), SPLITS], ids=str)
def test_data_of_somebody_else_are_left(splits, words, tmp_path, capsys):
    (tmp_path / "data").mkdir()
    for split in splits:
        (tmp_path / "data" / f"{split}.tsv").write_text("mine\tmeins\n", encoding="utf-8")
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes(b"mine")
    before = contents(tmp_path)
    assert call(tmp_path, *words) == 2
    said = capsys.readouterr().err
    assert f"`output_dir` must be a new folder or that of an earlier demo, got {tmp_path}" in said
    assert ".tsv" in said and contents(tmp_path) == before


def test_model_of_somebody_else_is_left_however_often_the_demo_is_called(tmp_path, capsys):
    (tmp_path / "model.safetensors").write_bytes(b"mine")
    before = contents(tmp_path)
    for _ in range(2):
        assert call(tmp_path) == 2
        assert "`output_dir` must not hold a model" in capsys.readouterr().err
        assert contents(tmp_path) == before and not (tmp_path / "data").exists()
