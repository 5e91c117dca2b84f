"""Checkpoints: which are whole, and how they are written, replaced and deleted."""

import json
import os
import shutil

import pytest
import torch
from small_runs import is_whole, make_trainer, names, read
from tiny_models import tiny_model
from transformers import Trainer

from metaphrase.training.checkpointing.folders import (
    checkpoints_in,
    discard_surplus,
    last_whole_checkpoint,
    publish_checkpoint,
    what_is_missing,
)

PLAIN = ("model.safetensors", "trainer_state.json")
WHOLE = (*PLAIN, "optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.json", "progress.json")


@pytest.mark.parametrize(("kind", "name"), [("plain", name) for name in PLAIN] + [("whole", name) for name in WHOLE])
def test_a_checkpoint_without_all_of_a_file_is_not_whole(kind, name, runs, tmp_path):
    run = shutil.copytree(runs[kind], tmp_path / "run")
    path = run / "checkpoint-3" / name
    content = path.read_bytes()
    assert is_whole(path.parent)
    # Without its last byte, JSON lacks a line feed alone.
    for size in (0, len(content) // 2, len(content) - 1 - name.endswith(".json")):
        path.write_bytes(content[:size])
        assert any(name in problem for problem in what_is_missing(path.parent)), size
    path.unlink()
    if name == "progress.json":
        # Then it is as of a plain Trainer.
        assert is_whole(path.parent)
        return
    expected = "the weights are missing" if (kind, name) == ("plain", "model.safetensors") else f"{name} is missing"
    assert what_is_missing(path.parent) == [expected]
    assert last_whole_checkpoint(run) == str(run / "checkpoint-2")


def test_files_of_another_size_or_without_a_list_are_named(run):
    extended = run / "checkpoint-3" / "rng_state.pth"
    shutil.copy(run / "checkpoint-3" / "optimizer.pt", extended)
    assert any(problem.startswith("rng_state.pth has") for problem in what_is_missing(extended.parent))
    # A file that loses bytes, such as one of a tokenizer, fails much later, or never.
    listed = read(run / "checkpoint-1" / "progress.json")
    (run / "checkpoint-1" / "spiece.model").write_bytes(b"1234")
    listed["files"]["spiece.model"] = 5
    (run / "checkpoint-1" / "progress.json").write_text(json.dumps(listed))
    assert what_is_missing(run / "checkpoint-1") == ["spiece.model has 4 bytes in place of 5"]
    (run / "checkpoint-2" / "progress.json").write_text("{}")
    assert what_is_missing(run / "checkpoint-2") == ["progress.json is cut short or damaged"]


def test_settings_may_be_edited_and_files_added(run):
    settings = run / "checkpoint-3" / "generation_config.json"
    settings.write_text(json.dumps({**read(settings), "num_beams": 4}))
    (run / "checkpoint-3" / "notes.txt").write_text("the best so far")
    assert is_whole(run / "checkpoint-3")


def test_shards_are_looked_for(plain_run):
    folder = plain_run / "checkpoint-3"
    (folder / "model.safetensors").unlink()
    tiny_model().save_pretrained(folder, max_shard_size="20KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2 and is_whole(folder)
    content = shards[1].read_bytes()
    shards[1].write_bytes(content[:-1])
    assert what_is_missing(folder) == [f"{shards[1].name} is cut short or damaged"]
    shards[1].unlink()
    assert what_is_missing(folder) == [f"model.safetensors.index.json names {shards[1].name}, which is missing"]


def test_states_of_deepspeed_are_looked_at(plain_run):
    folder = plain_run / "checkpoint-2"
    states = folder / "global_step2" / "mp_rank_00_model_states.pt"
    states.parent.mkdir()
    torch.save({"step": 2}, states)
    for name in ("model.safetensors", "optimizer.pt", "scheduler.pt"):
        (folder / name).unlink()
    assert is_whole(folder)
    os.truncate(states, 50)
    assert not is_whole(folder)


def test_what_is_not_whole_is_named_and_passed_over(run, caplog, tmp_path):
    os.truncate(run / "checkpoint-3" / "optimizer.pt", 100)
    (run / "checkpoint-2" / "model.safetensors").unlink()
    assert last_whole_checkpoint(run) == str(run / "checkpoint-1")
    assert "checkpoint-3 is not whole and is passed over: optimizer.pt is cut short or damaged" in caplog.text
    assert "checkpoint-2 is not whole and is passed over: model.safetensors is missing" in caplog.text
    shutil.rmtree(run / "checkpoint-1")
    assert last_whole_checkpoint(run) is None
    assert last_whole_checkpoint(tmp_path / "nowhere") is None
    assert what_is_missing(tmp_path / "nowhere") == ["there is no such folder"]


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


def test_the_hub_gets_a_checkpoint_under_its_name(tmp_path, monkeypatch):
    pushed = []
    monkeypatch.setattr(
        Trainer, "_push_from_checkpoint", lambda self, folder: pushed.append((folder, is_whole(folder)))
    )
    trainer = make_trainer(tmp_path / "run", max_steps=2)
    trainer.args.push_to_hub = True
    trainer.train()
    assert pushed == [(str(tmp_path / "run" / f"checkpoint-{step}"), True) for step in (1, 2)]


def test_a_checkpoint_that_is_being_replaced_survives_a_kill(run, monkeypatch):
    checkpoint, rename = run / "checkpoint-3", os.rename
    shutil.copytree(checkpoint, run / "_unfinished" / "checkpoint-3")

    def move(source, target):
        if target == checkpoint:
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "rename", move)
        publish_checkpoint(checkpoint, read(checkpoint / "progress.json"))
    assert not checkpoint.exists() and last_whole_checkpoint(run) == str(checkpoint)
    make_trainer(run, max_steps=4).train(resume_from_checkpoint=True)
    assert not (run / "_unfinished").exists()
