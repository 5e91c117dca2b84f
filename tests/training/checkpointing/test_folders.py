import json
import os

import pytest
import torch
from small_runs import is_whole, make_trainer, names, read

from metaphrase.training.checkpoints import (
    checkpoints_in,
    discard_surplus,
    last_whole_checkpoint,
    what_is_missing,
)

FILES = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "progress.json")


@pytest.mark.parametrize("name", FILES)
def test_a_checkpoint_without_all_of_a_file_is_not_whole(name, run, caplog):
    path = run / "checkpoint-3" / name
    content = path.read_bytes()
    assert is_whole(path.parent)
    for size in (0, len(content) // 2, len(content) - 2):
        path.write_bytes(content[:size])
        [problem] = what_is_missing(path.parent)
        assert problem.startswith(name) and last_whole_checkpoint(run) == str(run / "checkpoint-2")
    assert f"checkpoint-3 is not whole and is passed over: {name}" in caplog.text
    path.unlink()
    # Without its list, the checkpoint is as of a plain Trainer.
    assert what_is_missing(path.parent) == ([] if name == "progress.json" else [f"{name} is missing"])


def test_settings_may_be_edited_and_files_added(run):
    settings = run / "checkpoint-3" / "generation_config.json"
    settings.write_text(json.dumps({**read(settings), "num_beams": 4}))
    (run / "checkpoint-3" / "notes.txt").write_text("the best so far")
    assert is_whole(run / "checkpoint-3")


def test_a_plain_trainer_writes_its_state_last(plain_run, tmp_path):
    assert last_whole_checkpoint(plain_run) == str(plain_run / "checkpoint-3")
    (plain_run / "checkpoint-3" / "trainer_state.json").unlink()
    assert last_whole_checkpoint(plain_run) == str(plain_run / "checkpoint-2")
    assert last_whole_checkpoint(tmp_path / "nowhere") is None


@pytest.fixture
def watch(monkeypatch):
    """Looks at a run before each change on the disk: every checkpoint must be whole. Gives the names that were there."""

    def look_at(run):
        seen = []

        def looking(change):
            def changed(*args, **kwargs):
                assert all(map(is_whole, checkpoints_in(run)))
                if seen[-1:] != [names(run)]:
                    seen.append(names(run))
                return change(*args, **kwargs)

            return changed

        for module, name in ((torch, "save"), (os, "rename"), (os, "unlink"), (os, "rmdir"), (os, "fsync")):
            monkeypatch.setattr(module, name, looking(getattr(module, name)))
        return seen

    return look_at


def test_a_checkpoint_has_no_name_before_it_is_whole(run, watch):
    seen = watch(run)
    make_trainer(run, max_steps=5, save_total_limit=2).train(resume_from_checkpoint=True)
    assert seen == [
        ["checkpoint-1", "checkpoint-2", "checkpoint-3"],
        ["checkpoint-1", "checkpoint-2", "checkpoint-3", "checkpoint-4"],
        ["checkpoint-2", "checkpoint-3", "checkpoint-4"],
        ["checkpoint-3", "checkpoint-4"],
        ["checkpoint-3", "checkpoint-4", "checkpoint-5"],
        ["checkpoint-4", "checkpoint-5"],
    ]


def test_all_but_the_best_lose_their_names_at_the_end_if_one_is_to_stay(tmp_path, watch):
    seen = watch(tmp_path)
    # Nothing is learned: the first is the best.
    options = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "learning_rate": 0.0}
    make_trainer(tmp_path, save_total_limit=1, **options).train()
    # Until then the newest stays, too: a run that is killed resumes from there.
    newest = ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert seen[-3:] == [newest, ["checkpoint-1", "checkpoint-3"], ["checkpoint-1"]]


def test_all_of_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    done, fsync, rename = [], os.fsync, os.rename

    def flush(descriptor):
        done.append(os.path.realpath(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def move(source, target):
        done.append((str(source), str(target)))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "rename", move)
    make_trainer(tmp_path, max_steps=1).train()
    checkpoint, unfinished = tmp_path / "checkpoint-1", tmp_path / "_unfinished" / "checkpoint-1"
    move_at = done.index((str(unfinished), str(checkpoint)))
    written = {str(unfinished / path.relative_to(checkpoint)) for path in checkpoint.rglob("*")}
    assert len(written) > 5 and written | {str(unfinished)} == set(done[:move_at])
    assert done[move_at + 1 :] == [str(tmp_path)]


@pytest.mark.parametrize(
    ("limit", "best", "expected"),
    [
        (None, None, [1, 2, 3, 4, 5]),
        (0, None, [1, 2, 3, 4, 5]),
        (6, None, [1, 2, 3, 4, 5]),
        (3, None, [2, 3, 5]),
        (3, 1, [1, 3, 5]),
        (1, None, [3]),
        (1, 1, [1, 3]),
        (2, 3, [3, 5]),
    ],
)
def test_the_oldest_go_but_neither_the_best_nor_the_newest(limit, best, expected, tmp_path):
    # Number 3 was written last: the run was resumed from number 2.
    for time, step in enumerate((1, 4, 2, 5, 3)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        os.utime(tmp_path / f"checkpoint-{step}", (1e9 + time, 1e9 + time))
    best = best and tmp_path / f"checkpoint-{best}"
    discard_surplus(tmp_path, limit, [tmp_path / "checkpoint-3", best])
    assert names(tmp_path) == [f"checkpoint-{step}" for step in expected]
