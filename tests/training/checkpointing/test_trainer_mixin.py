"""How checkpoints are written, replaced and deleted: none has its name before it is whole."""

import os
import shutil

import pytest
import torch
from small_runs import is_whole, make_trainer, names
from transformers import Trainer
from transformers.trainer_utils import get_last_checkpoint

from metaphrase.training.checkpointing.folders import (
    checkpoints_in,
    discard_surplus,
)


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
    assert get_last_checkpoint(str(run)) == str(run / "checkpoint-5")
    assert not (run / "_unfinished").exists()


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


def test_a_run_in_float16_goes_on_in_another_precision(run):
    """Only a run in float16 has a scaler of its gradients."""
    torch.save(torch.amp.GradScaler("cpu").state_dict(), run / "checkpoint-3" / "scaler.pt")
    trainer = make_trainer(run, max_steps=4)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 4
    assert not (run / "checkpoint-4" / "scaler.pt").exists()


@pytest.mark.parametrize(
    ("free", "kind", "message"), [(4096, OSError, "No space left on device"), (2**30, RuntimeError, "pos 1")]
)
def test_a_full_disk_is_called_so(free, kind, message, run, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 1 vs 0")

    monkeypatch.setattr(torch, "save", fail)
    usage = type(shutil.disk_usage(run))(2**30, 2**30 - free, free)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(kind, match=message):
        make_trainer(run, max_steps=4).train(resume_from_checkpoint=True)
