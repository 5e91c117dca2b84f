import shutil
from functools import partial

import pytest
from cli_texts import contents
from small_runs import SMALL

from metaphrase.scripts import demo
from metaphrase.scripts.__main__ import run
from metaphrase.training.checkpoints import checkpoints_in

FIELDS = {"max_steps": 2, "save_steps": 1, "save_strategy": "steps", "eval_strategy": "no", "use_cpu": "true"}
FIELDS |= {"load_best_model_at_end": "false", "disable_tqdm": "true", "vocab_size": 300, "generation_max_length": 8}
FIELDS |= {f"model.{name}": value for name, value in SMALL.items()}
WORDS = [word for name, value in FIELDS.items() for word in (f"--{name}", str(value))]


@pytest.fixture(scope="module", autouse=True)
def few_pairs():
    with pytest.MonkeyPatch.context() as patch:
        for name in ("write_demo_corpus", "write_demo_summaries"):
            whole = getattr(demo, name)
            patch.setattr(demo, name, partial(whole, num_validation=4, num_test=6))
        yield


def call(folder, *words, num_train=2000):
    return run("demo", ["--output_dir", str(folder), "--num_train", str(num_train), *WORDS, *words])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "demo"
    assert call(folder) == 0
    return folder


MISTAKES = [(["--learning_rate", "fast"], "`learning_rate` must be"), (["--metrics", "blue"], "blue")]
MISTAKES += [(["--num_train", "5"], "The counts of pairs must be within the grammar")]


@pytest.mark.parametrize(("words", "said"), MISTAKES)
def test_mistakes_leave_an_earlier_demo(words, said, made, capsys):
    before = contents(made)
    assert call(made, *words) == 2
    assert said in capsys.readouterr().err and contents(made) == before


def test_demo_is_made_anew_and_a_stopped_one_goes_on(made, tmp_path, capsys):
    folder = tmp_path / "demo"
    shutil.copytree(made, folder)
    (folder / "checkpoint-7").mkdir()
    before = contents(folder)
    assert call(folder, num_train=1900) == 0
    assert "BLEU" in capsys.readouterr().out
    after = contents(folder)
    assert [path.name for path in checkpoints_in(folder)] == ["checkpoint-1", "checkpoint-2"]
    assert {path for path in before if before[path] != after[path]} >= {"data/train.tsv", "model.safetensors"}
    corpus = contents(folder / "data")
    assert call(folder, "--resume", "--max_steps", "3") == 0
    assert contents(folder / "data") == corpus
    assert [path.name for path in checkpoints_in(folder)][-1] == "checkpoint-3"


@pytest.mark.parametrize("name", ["data/train.tsv", "model.safetensors"])
def test_files_of_somebody_else_are_left(name, tmp_path, capsys):
    (tmp_path / "data").mkdir()
    (tmp_path / name).write_text("mine\tmeins\n", encoding="utf-8")
    before = contents(tmp_path)
    for words in ([], ["--resume"]):
        assert call(tmp_path, *words) == 2
        assert "`output_dir` must" in capsys.readouterr().err and contents(tmp_path) == before
