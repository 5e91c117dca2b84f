"""Runs that are killed and resumed end as the run that was never stopped, bit for bit."""

import json
import os
import random
import shutil

import numpy as np
import pytest
import torch
from killed_runs import CASES, Server
from small_runs import is_whole
from transformers.trainer_pt_utils import safe_globals

from metaphrase.training.checkpointing.folders import checkpoints_in

# Of two equal runs these differ: times, and what transformers notes when it loads a tokenizer.
DIFFERENT = ("runtime", "per_second", "seconds", "is_local", "local_files_only")


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="module")
def whole_run(server, tmp_path_factory):
    """Gives the folder of a case's run that was never stopped."""
    made = {}

    def make(case, **job):
        if case not in made:
            made[case] = tmp_path_factory.mktemp("whole") / "run"
            assert not server.run(made[case], case=case, **job)[0]
        return made[case]

    return make


def timeless(content, run):
    """What a JSON file says, but for times and for where the run lies."""
    if isinstance(content, dict):
        return {name: timeless(value, run) for name, value in content.items() if not name.endswith(DIFFERENT)}
    if isinstance(content, list):
        return [timeless(value, run) for value in content]
    return content.replace(str(run), "RUN") if isinstance(content, str) else content


def assert_same(first, second, where):
    """That two states of optimizers, schedules or generators are equal bit for bit."""
    assert type(first) is type(second), where
    if isinstance(first, dict):
        assert first.keys() == second.keys(), where
        for name in first:
            assert_same(first[name], second[name], f"{where} {name}")
    elif isinstance(first, list | tuple):
        assert len(first) == len(second), where
        for number, pair in enumerate(zip(first, second, strict=True)):
            assert_same(*pair, f"{where} {number}")
    elif isinstance(first, torch.Tensor):
        assert torch.equal(first, second), where
    elif isinstance(first, np.ndarray):
        assert np.array_equal(first, second), where
    else:
        assert first == second, where


def assert_same_run(whole, resumed):
    """That two runs left the same files with the same content: models, states of everything, history."""
    names = [
        sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()) for run in (whole, resumed)
    ]
    assert names[0] == names[1]
    for name in names[0]:
        first, second = whole / name, resumed / name
        if first.suffix == ".json":
            pair = [timeless(json.loads(path.read_text()), run) for path, run in ((first, whole), (second, resumed))]
            for content in pair:
                # Files that hold times or paths differ in size.
                content.pop("files", None)
                # An argument of the resumed run alone.
                content.pop("resume_from_checkpoint", None)
            assert_same(*pair, name)
        elif first.suffix in (".pt", ".pth"):
            with safe_globals():
                assert_same(*(torch.load(path, weights_only=True) for path in (first, second)), name)
        # The network's code is not of the run. The other two, of which the second is of a plain Trainer, name its folder.
        elif first.suffix != ".py" and first.name not in ("recipe.yaml", "training_args.bin"):
            assert first.read_bytes() == second.read_bytes(), name


def history(run):
    return json.loads((run / "trainer_state.json").read_text())["log_history"]


def test_killed_at_steps_and_while_saving(server, whole_run, tmp_path):
    whole = whole_run("accumulation")
    run = tmp_path / "run"
    # In the second of the batches of step 6, so in the second epoch.
    assert server.run(run, case="accumulation", at=("on_substep_end", 5))[0]
    assert [path.name for path in checkpoints_in(run)] == ["checkpoint-2", "checkpoint-4"]
    # Step 6 again, and then its optimizer is written by half.
    assert server.run(run, case="accumulation", resume=True, write=("optimizer.pt", 1))[0]
    assert [path.name for path in checkpoints_in(run)] == ["checkpoint-2", "checkpoint-4"]
    assert (run / "_unfinished" / "checkpoint-6" / "model.safetensors").is_file()
    # All of step 8 is written, but it has no name yet: that is the third time something moves, after step 6 and its rotation.
    killed, _ = server.run(run, case="accumulation", resume=True, access=("os.rename", 3))
    assert killed and not (run / "_unfinished" / "checkpoint-6").exists()
    assert [path.name for path in checkpoints_in(run)] == ["checkpoint-4", "checkpoint-6"]
    assert all(map(is_whole, checkpoints_in(run)))
    assert not server.run(run, case="accumulation", resume=True)[0]
    assert_same_run(whole, run)


def test_killed_while_rotating_and_after_patience_has_ended_the_run(server, whole_run, tmp_path):
    whole = whole_run("patience")
    assert [entry["step"] for entry in history(whole) if "eval_score" in entry] == [7, 14, 21, 28, 35]
    run = tmp_path / "run"
    assert server.run(run, case="patience", at=("on_step_begin", 18))[0]
    # The first to be deleted is checkpoint-7, after the third is there. Two of its files are gone.
    assert server.run(run, case="patience", resume=True, access=("os.remove", 3))[0]
    assert [path.name for path in checkpoints_in(run)] == ["checkpoint-14", "checkpoint-21"]
    assert (run / "_unfinished" / "discarded-checkpoint-7").is_dir()
    # The last evaluation has ended the run, but the model is not there yet.
    assert server.run(run, case="patience", resume=True, at=("on_train_end", 35))[0]
    assert [path.name for path in checkpoints_in(run)] == ["checkpoint-21", "checkpoint-35"]
    assert not server.run(run, case="patience", resume=True)[0]
    assert_same_run(whole, run)
    assert (run / "model.safetensors").read_bytes() == (run / "checkpoint-21" / "model.safetensors").read_bytes()


def test_killed_between_the_last_step_of_an_epoch_and_its_end(server, whole_run, tmp_path):
    whole = whole_run("ends_of_epochs")
    assert [entry["step"] for entry in history(whole) if "eval_loss" in entry] == [0, 7, 14, 21]
    assert [entry["step"] for entry in history(whole) if "loss" in entry] == [7, 14, 21]
    run = tmp_path / "run"
    for step in (7, 21):
        assert server.run(run, case="ends_of_epochs", resume=step > 7 or None, at=("on_epoch_end", step))[0]
        assert checkpoints_in(run)[-1].name == f"checkpoint-{step}"
    assert not server.run(run, case="ends_of_epochs", resume=True)[0]
    assert_same_run(whole, run)


def test_two_processes_killed_in_the_second_epoch(server, whole_run, tmp_path):
    whole, run = whole_run("processes", processes=2), tmp_path / "run"
    assert server.run(run, case="processes", processes=2, at=("on_step_end", 7))[0]
    assert {path.name for path in (run / "checkpoint-6").glob("rng_state*")} == {"rng_state_0.pth", "rng_state_1.pth"}
    # Both are there when it is saved, and both are killed when the name is about to be given.
    assert server.run(run, case="processes", processes=2, resume=True, access=("os.rename", 1))[0]
    assert [path.name for path in checkpoints_in(run)] == ["checkpoint-6"]
    assert not server.run(run, case="processes", processes=2, resume=True)[0]
    assert_same_run(whole, run)


def write_recipe(tmp_path, **changed):
    """Write pairs, and return the options of an experiment of seven steps."""
    texts = [f"{noun} {verb}" for noun in ("dog", "cat", "bird", "fish", "cow") for verb in ("runs", "sees", "eats")]
    fields = {"data_dir": tmp_path, "tokenizer_kind": "char", "preset": "metaphrase-tiny", "use_cpu": "true"}
    for name, pairs in (("train", texts), ("validation", texts[::4]), ("test", texts[::5])):
        lines = "".join(f"the {text}\t{text[::-1]}\n" for text in pairs)
        (tmp_path / f"{name}.tsv").write_text(lines, encoding="utf-8")
        fields[f"{name}_file"] = f"{name}.tsv"
    fields |= {f"model.{side}_layers": 1 for side in ("encoder", "decoder")} | {"model.hidden_size": 8}
    fields |= {f"model.{side}_attention_heads": 2 for side in ("encoder", "decoder")} | {"model.dropout": 0.1}
    fields |= {f"model.{side}_ffn_dim": 8 for side in ("encoder", "decoder")} | {"generation_max_length": 9}
    fields |= {"max_steps": 7, "per_device_train_batch_size": 4, "eval_steps": 2, "save_steps": 2, "logging_steps": 1}
    fields |= {"eval_strategy": "steps", "save_strategy": "steps", "disable_tqdm": "true", "early_stopping_patience": 3}
    fields |= {"load_best_model_at_end": "true", "metric_for_best_model": "chrf"}
    fields = {name: value for name, value in (fields | changed).items() if value is not None}
    return [word for name, value in fields.items() for word in (f"--{name}", str(value))]


def test_an_experiment_killed_while_it_saves(server, tmp_path):
    recipe = write_recipe(tmp_path)
    whole, run = tmp_path / "whole" / "run", tmp_path / "run"
    whole.parent.mkdir()
    assert not server.run(whole, recipe=recipe)[0]
    assert server.run(run, recipe=recipe, write=("model.safetensors", 3))[0]
    assert checkpoints_in(run)[-1].name == "checkpoint-4"
    assert not server.run(run, recipe=recipe, resume=True)[0]
    assert_same_run(whole, run)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_killed_anywhere(case, server, whole_run, tmp_path):
    """Runs are killed again and again, each time a random number of accesses to the disk after they began or went on."""
    processes = 2 if case == "processes" else 1
    whole, draw, kills = whole_run(case, processes=processes), random.Random(case), 0
    for number in range(6):
        run = tmp_path / f"run-{number}"
        for attempt in range(8):
            options = {"access": ("any", draw.randint(5, 150))} if attempt < 7 else {}
            resume = any(map(is_whole, checkpoints_in(run))) or None
            if not server.run(run, case=case, processes=processes, resume=resume, **options)[0]:
                break
            kills += 1
            assert all(map(is_whole, checkpoints_in(run)))
        assert_same_run(whole, run)
    assert kills >= 6


PLAIN = {"load_best_model_at_end": None, "early_stopping_patience": None}
RECIPES = {
    "plain": PLAIN,
    "token budget": PLAIN | {"per_device_train_batch_size": None, "max_tokens_per_batch": 120},
    "average of the best": PLAIN | {"average_best": 2},
}


BY_TOKENS = {
    "per_device_train_batch_size": None,
    "max_tokens_per_batch": 120,
    "tokenizer_kind": "bpe",
    "vocab_size": 60,
}
AUGMENTED = (
    PLAIN | BY_TOKENS | {"save_steps": 3, "subword_sampling": 0.4, "augmentation.typos": 0.3, "augmentation.terms": 0.3}
)
# 15 and 4 pairs, ten steps in two stages.
STAGES = AUGMENTED | {"train_file": None, "max_steps": None, "datasets": "{noisy: train.tsv, clean: validation.tsv}"}
STAGES |= {
    "stages": "{start: {shares: {noisy: 3, clean: 1}, until: {noisy: 2}}, end: {shares: {clean: 1}, until: {clean: 3}}}"
}


@pytest.mark.parametrize("fields", [AUGMENTED, STAGES], ids=["augmented", "stages"])
def test_an_experiment_on_changing_pairs_killed_in_an_epoch(fields, server, tmp_path):
    recipe = write_recipe(tmp_path, **fields)
    whole, run = tmp_path / "whole" / "run", tmp_path / "run"
    whole.parent.mkdir()
    assert not server.run(whole, recipe=recipe)[0]
    assert server.run(run, recipe=recipe, write=("model.safetensors", 3))[0]
    assert not server.run(run, recipe=recipe, resume=True)[0]
    assert_same_run(whole, run)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_killed_at_random(name, server, tmp_path):
    """`METAPHRASE_KILLS` sets the number of runs. Each is killed once, at a random access to its folder, and resumed."""
    recipe, whole = write_recipe(tmp_path, **RECIPES[name]), tmp_path / "whole" / "run"
    whole.parent.mkdir()
    assert not server.run(whole, recipe=recipe)[0]
    draw, kills = random.Random(os.environ.get("METAPHRASE_SEED", name)), 0
    while kills < int(os.environ.get("METAPHRASE_KILLS", 5)):
        run = tmp_path / "run"
        killed, _ = server.run(run, recipe=recipe, access=("any", draw.randint(1, 250)))
        if killed:
            kills += 1
            has_checkpoint = any(map(is_whole, checkpoints_in(run))) if run.exists() else False
            assert not server.run(run, recipe=recipe, resume=has_checkpoint)[0], kills
        assert_same_run(whole, run)
        shutil.rmtree(run)
