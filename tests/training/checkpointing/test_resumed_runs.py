import json
import os
import random
import re
import shutil

import datasets
import numpy as np
import pytest
import torch
from small_runs import PAIRS, is_whole, make_trainer, names, read
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from metaphrase.training.checkpoints import (
    checkpoints_in,
    discard_surplus,
    last_whole_checkpoint,
    read_progress,
    what_is_missing,
)


def test_only_a_whole_checkpoint_is_resumed(run, tmp_path):
    os.truncate(run / "checkpoint-3" / "model.safetensors", 100)
    with pytest.raises(ValueError, match=r"checkpoint-3: model.safetensors has 100 bytes in place of"):
        make_trainer(run).train(resume_from_checkpoint=str(run / "checkpoint-3"))
    with pytest.raises(ValueError, match="`output_dir` must hold a whole checkpoint to resume from"):
        make_trainer(tmp_path / "empty").train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="must be the last checkpoint of its run, got checkpoint-1"):
        make_trainer(run).train(resume_from_checkpoint=str(run / "checkpoint-1"))
    trainer = make_trainer(run)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 3 and is_whole(run / "checkpoint-3")
    # A checkpoint of another run may be of an earlier step.
    shutil.copytree(run / "checkpoint-1", tmp_path / "other" / "checkpoint-1")
    make_trainer(run, max_steps=2).train(resume_from_checkpoint=str(tmp_path / "other" / "checkpoint-1"))
    assert names(run) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]


@pytest.mark.parametrize(
    ("intervals", "evaluated", "logged", "saved"),
    [
        ({"eval_steps": 1, "save_steps": 2, "logging_steps": 3}, [4, 5, 6, 7, 8], [4, 6], [4, 6, 8]),
        ({"eval_steps": 0.75, "save_steps": 0.5, "logging_steps": 4}, [4, 6, 8], [4, 8], [4, 8]),
    ],
)
def test_other_intervals_hold_from_where_a_run_goes_on(intervals, evaluated, logged, saved, tmp_path):
    options = {"eval_strategy": "steps", "max_steps": 4, "eval_steps": 4, "save_steps": 4, "logging_steps": 4}
    make_trainer(tmp_path, **options).train()
    trainer = make_trainer(tmp_path, **options | {"max_steps": 8} | intervals)
    trainer.train(resume_from_checkpoint=True)
    history = trainer.state.log_history
    assert [entry["step"] for entry in history if "eval_loss" in entry] == evaluated
    assert [entry["step"] for entry in history if "loss" in entry] == logged
    assert names(tmp_path) == [f"checkpoint-{step}" for step in saved]


def test_a_run_that_is_done_ends_with_the_same_loss_and_random_states(tmp_path):
    options = {"save_strategy": "epoch", "max_steps": -1, "num_train_epochs": 2, "logging_steps": 5}
    results = []
    for resume in (None, True):
        result = make_trainer(tmp_path, **options).train(resume_from_checkpoint=resume)
        results.append((result.training_loss, random.random(), np.random.rand(), torch.rand(1).item()))  # noqa: NPY002
    assert results[0] == results[1]


def test_a_checkpoint_that_a_killed_run_had_still_to_delete_goes(tmp_path):
    make_trainer(tmp_path, max_steps=3).train()
    make_trainer(tmp_path, max_steps=3, save_total_limit=1).train(resume_from_checkpoint=True)
    assert names(tmp_path) == ["checkpoint-3"]


def test_a_plain_checkpoint_is_resumed_with_a_warning(plain_run, caplog):
    assert make_trainer(plain_run, max_steps=3).train(resume_from_checkpoint=True).global_step == 3
    assert make_trainer(plain_run, max_steps=4).train(resume_from_checkpoint=True).global_step == 4
    assert "holds no progress.json: the run goes on, but not bit for bit" in caplog.text
    # A plain Trainer writes its state last.
    (plain_run / "checkpoint-3" / "trainer_state.json").unlink()
    assert what_is_missing(plain_run / "checkpoint-3") == ["trainer_state.json is missing"]


def test_other_batches_are_pointed_out(run, caplog):
    options = {"per_device_train_batch_size": 7, "train_sampling_strategy": "sequential", "dataloader_drop_last": True}
    make_trainer(run, max_steps=4, **options).train(resume_from_checkpoint=True)
    for field, value in options.items():
        assert re.search(rf"at another position in the data: .*{field} \w+, now {value}", caplog.text)
    assert "holds no optimizer" not in caplog.text
    (run / "checkpoint-3" / "scheduler.pt").unlink()
    read_progress(run / "checkpoint-3", {}, {})
    assert "holds no optimizer" in caplog.text


def test_other_pairs_are_refused_when_a_run_goes_on(tmp_path):
    pairs = [{**pair, "source_length": 3, "target_length": 3} for pair in PAIRS]
    # One token differs, and one pair is missing.
    others = ([*pairs[:-1], {**pairs[-1], "labels": [9, 13, 2]}], pairs[:-1])

    def train(pairs, resume=True, **options):
        trainer = make_trainer(tmp_path, **{"max_steps": 4, **options})
        trainer.train_dataset = datasets.Dataset.from_list(pairs)
        return trainer.train(resume_from_checkpoint=resume).global_step

    train(pairs, resume=None, max_steps=2)
    before = (tmp_path / "checkpoint-2" / "progress.json").read_bytes()
    for other in others:
        with pytest.raises(ValueError, match=f"`data` must stay .* got .*'num_pairs': {len(other)}, .* before .* 8,"):
            train(other)
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2"]
    assert (tmp_path / "checkpoint-2" / "progress.json").read_bytes() == before
    assert train(others[0], ignore_data_skip=True) == 4


def test_the_best_checkpoint_is_found_where_the_run_was_moved(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "learning_rate": 0.1}
    make_trainer(tmp_path / "before", max_steps=2, **options).train()
    (tmp_path / "before").rename(tmp_path / "after")
    trainer = make_trainer(tmp_path / "after", max_steps=2, **options)
    trainer.train(resume_from_checkpoint=True)
    best = tmp_path / "after" / f"checkpoint-{trainer.state.best_global_step}"
    assert trainer.state.best_model_checkpoint == str(best)


def test_another_metric_of_the_best_checkpoint_is_refused(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss", "greater_is_better": False}
    make_trainer(tmp_path, max_steps=1, **options).train()
    for other in ({"metric_for_best_model": "eval_perplexity"}, {"greater_is_better": True}):
        with pytest.raises(ValueError, match=f"`{next(iter(other))}` must stay as before"):
            make_trainer(tmp_path, **options | other).train(resume_from_checkpoint=True)
    assert make_trainer(tmp_path, **options | {"metric_for_best_model": "eval_loss"}).train(True).global_step == 3


class Counter(TrainerCallback, ExportableState):
    def __init__(self, step=1):
        self.step = step
        self.total = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.total += self.step

    def state(self):
        return {"args": {"step": self.step}, "attributes": {"total": self.total}}


class Newcomer(Counter):
    pass


def test_callbacks_get_back_what_they_keep_and_stay_what_they_are(tmp_path):
    first, second = Counter(1), Counter(10)
    make_trainer(tmp_path, callbacks=[first, second], max_steps=2).train()
    first, second, newcomer = Counter(1), Counter(100), Newcomer()
    trainer = make_trainer(tmp_path, callbacks=[first, second, newcomer])
    order = list(trainer.callback_handler.callbacks)
    trainer.train(resume_from_checkpoint=True)
    assert (first.total, second.total, newcomer.total) == (3, 120, 1)
    assert trainer.callback_handler.callbacks == order


FILES = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "progress.json")


@pytest.mark.parametrize("name", FILES)
def test_a_checkpoint_without_all_of_a_file_is_not_whole(name, run, caplog):
    path = run / "checkpoint-3" / name
    content = path.read_bytes()
    # Settings may be edited, and files added.
    settings = run / "checkpoint-3" / "generation_config.json"
    settings.write_text(json.dumps({**read(settings), "num_beams": 4}))
    (run / "checkpoint-3" / "notes.txt").write_text("the best so far")
    assert is_whole(path.parent)
    for size in (0, len(content) // 2, len(content) - 2):
        path.write_bytes(content[:size])
        [problem] = what_is_missing(path.parent)
        assert problem.startswith(name) and last_whole_checkpoint(run) == str(run / "checkpoint-2")
    assert f"checkpoint-3 is not whole and is passed over: {name}" in caplog.text
    path.unlink()
    # Without its list, the checkpoint is as of a plain Trainer.
    assert what_is_missing(path.parent) == ([] if name == "progress.json" else [f"{name} is missing"])


@pytest.fixture
def watch(monkeypatch):
    """Look at a run before each change on the disk: every checkpoint must be whole. Returns the names that were there."""

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
    [(None, None, [1, 2, 3, 4, 5]), (0, None, [1, 2, 3, 4, 5]), (3, 1, [1, 3, 5]), (1, None, [3]), (2, 3, [3, 5])],
)
def test_the_oldest_go_but_neither_the_best_nor_the_newest(limit, best, expected, tmp_path):
    # Number 3 was written last: the run was resumed from number 2.
    for time, step in enumerate((1, 4, 2, 5, 3)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        os.utime(tmp_path / f"checkpoint-{step}", (1e9 + time, 1e9 + time))
    best = best and tmp_path / f"checkpoint-{best}"
    discard_surplus(tmp_path, limit, [tmp_path / "checkpoint-3", best])
    assert names(tmp_path) == [f"checkpoint-{step}" for step in expected]
