import json
import random

import numpy as np
import pytest
import torch
from killed_runs import CASES, Server
from small_runs import SMALL, is_whole
from torch.utils._pytree import tree_flatten_with_path
from transformers.trainer_pt_utils import safe_globals

from metaphrase.training.checkpoints import checkpoints_in

# Values that differ between equal runs: times, and what transformers notes when it loads a tokenizer.
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
    (leaves, form), (others, other_form) = tree_flatten_with_path(first), tree_flatten_with_path(second)
    assert form == other_form, where
    for (path, one), (_, two) in zip(leaves, others, strict=True):
        assert type(one) is type(two) and np.array_equal(one, two), f"{where} {path}"


def assert_same_run(whole, resumed):
    """That two runs left the same files with the same content: models, states of everything, history."""
    names, others = ({path.relative_to(run) for path in run.rglob("*") if path.is_file()} for run in (whole, resumed))
    assert names == others
    for name in names:
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


def write_recipe(tmp_path):
    """Write 15 and 4 pairs, which change in each epoch, and return the options of an experiment of ten steps."""
    texts = [f"{noun} {verb}" for noun in ("dog", "cat", "bird", "fish", "cow") for verb in ("runs", "sees", "eats")]
    for name, pairs in (("noisy", texts), ("clean", texts[::4]), ("test", texts[::5])):
        lines = "".join(f"the {text}\t{text[::-1]}\n" for text in pairs)
        (tmp_path / f"{name}.tsv").write_text(lines, encoding="utf-8")
    fields = {"data_dir": tmp_path, "train_file": "noisy.tsv", "max_steps": 10, "preset": "metaphrase-tiny"}
    fields |= {"validation_file": "clean.tsv", "test_file": "test.tsv", "tokenizer_kind": "bpe", "vocab_size": 60}
    fields |= {"subword_sampling": 0.4, "augmentation.typos": 0.3, "augmentation.terms": 0.3, "use_cpu": "true"}
    fields |= {f"model.{name}": value for name, value in SMALL.items()} | {"model.dropout": 0.1, "model.hidden_size": 8}
    fields |= {"max_tokens_per_batch": 120, "generation_max_length": 9, "logging_steps": 1, "disable_tqdm": "true"}
    fields |= {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3, "average_best": 2}
    return [word for name, value in fields.items() for word in (f"--{name}", str(value))]


def test_an_experiment_on_changing_pairs_killed_while_it_saves(server, tmp_path):
    recipe = write_recipe(tmp_path)
    whole, run = tmp_path / "whole" / "run", tmp_path / "run"
    whole.parent.mkdir()
    assert not server.run(whole, recipe=recipe)[0]
    assert server.run(run, recipe=recipe, write=("model.safetensors", 3))[0]
    assert not server.run(run, recipe=recipe, resume=True)[0]
    assert_same_run(whole, run)


@pytest.mark.parametrize(("processes", "workers"), [(1, 0), (2, 0), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_a_stream_goes_on_at_its_place(server, tmp_path, processes, workers):
    # Each reader has blocks of its own.
    lines = "".join(f"dog {number:05}\t{number:05} god {'of many ' * 4}\n" for number in range(40_000))
    (tmp_path / "many.tsv").write_text(lines, encoding="utf-8")
    fields = {"validation_file": "null", "test_file": "null", "num_validation": 9}
    fields |= {"train_file": "many.tsv", "streaming": "true", "pairs_in_buffer": 300}
    fields |= {"max_steps": 10, "logging_steps": 2}
    fields |= {"max_source_length": 60, "max_target_length": 60, "dataloader_num_workers": workers, "vocab_size": 300}
    fields |= {"augmentation": "{typos: 0.3}", "tokenizer_kind": "byte_bpe", "max_tokens_per_batch": 4000}
    recipe = [*write_recipe(tmp_path), *(word for name, value in fields.items() for word in (f"--{name}", str(value)))]
    whole, run = tmp_path / "whole" / "run", tmp_path / "run"
    whole.parent.mkdir()
    assert not server.run(whole, recipe=recipe, processes=processes)[0]
    assert server.run(run, recipe=recipe, processes=processes, write=("model.safetensors", 3))[0]
    log = server.run(run, recipe=recipe, processes=processes, resume=True)[1]
    assert "another position" not in log
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
