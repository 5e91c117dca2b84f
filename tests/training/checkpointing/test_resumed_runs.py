"""What a resumed run takes from its checkpoint."""

import json
import logging
import os
import random
import re
import shutil

import datasets
import numpy as np
import pytest
import torch
from small_runs import PAIRS, MetaphraseTrainer, is_whole, make_trainer, names
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import ExportableState

from metaphrase.data.collators import PairCollator
from metaphrase.training.checkpointing.folders import last_whole_checkpoint
from metaphrase.training.checkpointing.trainer_mixin import are_equal_states, get_random_states


def test_only_a_whole_checkpoint_is_resumed(run, tmp_path):
    os.truncate(run / "checkpoint-3" / "model.safetensors", 100)
    with pytest.raises(ValueError, match=r"checkpoint-3: model.safetensors is cut short or damaged"):
        make_trainer(run).train(resume_from_checkpoint=str(run / "checkpoint-3"))
    with pytest.raises(ValueError, match="`output_dir` must hold a whole checkpoint to resume from"):
        make_trainer(tmp_path / "empty").train(resume_from_checkpoint=True)
    trainer = make_trainer(run)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 3 and is_whole(run / "checkpoint-3")


def test_later_checkpoints_are_set_aside(run, caplog):
    (run / "trainer_state.json").write_text('{"global_step": 3}', encoding="utf-8")
    os.truncate(run / "checkpoint-2" / "optimizer.pt", 100)
    later = (run / "checkpoint-3" / "model.safetensors").read_bytes()
    make_trainer(run, max_steps=2).train(resume_from_checkpoint=str(run / "checkpoint-1"))
    assert names(run) == ["checkpoint-1", "checkpoint-2"] and is_whole(run / "checkpoint-2")
    assert last_whole_checkpoint(run) == str(run / "checkpoint-2")
    aside = run / "_abandoned-1"
    assert f"from step 1: what was later, checkpoint-2, checkpoint-3, now lies in {aside}." in caplog.text
    assert (aside / "checkpoint-3" / "model.safetensors").read_bytes() == later
    assert not (run / "trainer_state.json").exists() and (aside / "trainer_state.json").is_file()
    # Again, and then on from the last.
    make_trainer(run).train(resume_from_checkpoint=str(run / "checkpoint-1"))
    make_trainer(run, max_steps=4).train(resume_from_checkpoint=True)
    assert names(run) == [f"checkpoint-{step}" for step in (1, 2, 3, 4)]
    assert (names(aside), names(run / "_abandoned-2")) == (["checkpoint-2", "checkpoint-3"], ["checkpoint-2"])
    assert not (run / "_abandoned-3").exists()


def test_a_checkpoint_of_another_run_sets_nothing_aside(run, tmp_path):
    shutil.copytree(run / "checkpoint-1", tmp_path / "other" / "checkpoint-1")
    make_trainer(run, max_steps=2).train(resume_from_checkpoint=str(tmp_path / "other" / "checkpoint-1"))
    assert names(run) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"] and len(list(run.iterdir())) == 3


def test_a_run_that_is_done_makes_no_further_step_and_more_steps_can_be_asked_for(run):
    before = (run / "checkpoint-3" / "model.safetensors").read_bytes()
    trainer = make_trainer(run)
    result = trainer.train(resume_from_checkpoint=True)
    assert result.global_step == 3 and (run / "checkpoint-3" / "model.safetensors").read_bytes() == before
    assert make_trainer(run, max_steps=5).train(resume_from_checkpoint=True).global_step == 5


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
    """Its last epoch is reported, so that no epoch is left to begin."""
    options = {"save_strategy": "epoch", "max_steps": -1, "num_train_epochs": 2, "logging_steps": 5}
    results = []
    for resume in (None, True):
        result = make_trainer(tmp_path, **options).train(resume_from_checkpoint=resume)
        results.append((result.training_loss, random.random(), np.random.rand(), torch.rand(1).item()))  # noqa: NPY002
    assert results[0] == results[1]


def test_a_plain_checkpoint_and_weights_alone_are_resumed_with_a_warning(plain_run, tmp_path, caplog):
    assert make_trainer(plain_run, max_steps=3).train(resume_from_checkpoint=True).global_step == 3
    assert make_trainer(plain_run, max_steps=4).train(resume_from_checkpoint=True).global_step == 4
    assert "holds no progress.json: the run goes on, but not bit for bit" in caplog.text
    make_trainer(tmp_path, save_only_model=True).train()
    assert make_trainer(tmp_path, max_steps=4).train(resume_from_checkpoint=True).global_step == 4
    assert f"{tmp_path / 'checkpoint-3'} holds no optimizer" in caplog.text


@pytest.mark.parametrize(
    ("field", "value"),
    [("per_device_train_batch_size", 7), ("train_sampling_strategy", "sequential"), ("dataloader_drop_last", True)],
)
def test_other_batches_are_pointed_out(field, value, tmp_path, caplog):
    make_trainer(tmp_path, max_steps=1).train()
    make_trainer(tmp_path, **{"max_steps": 2, field: value}).train(resume_from_checkpoint=True)
    assert re.search(rf"at another position in the data: .*{field} \w+, now {value}", caplog.text)


class Stream(torch.utils.data.IterableDataset):
    """Another order in each pass."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        yield from PAIRS[self.epoch :] + PAIRS[: self.epoch]


class EndsEpochs(TrainerCallback):
    """Ends each epoch after three of its four steps."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_epoch_stop = state.global_step % 3 == 0


class Stopped(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 7:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("kind", "saving"),
    [
        ("stream", {"save_steps": 5}),
        ("shuffled stream", {"save_steps": 3}),
        ("epochs that end early", {"save_steps": 5}),
        ("epochs that end early", {"save_strategy": "epoch"}),
    ],
)
def test_the_place_in_the_data_is_not_counted_from_the_steps_alone(kind, saving, tmp_path):
    def train(folder, callbacks=(), resume=None):
        seen = []

        def collate(pairs):
            seen.append([pair["input_ids"][0] for pair in pairs])
            return PairCollator(0)(pairs)

        callbacks = [*callbacks, *([EndsEpochs()] if kind.startswith("epochs") else [])]
        trainer = make_trainer(folder, max_steps=10, callbacks=callbacks, collator=collate, **saving)
        if kind.endswith("stream"):
            trainer.train_dataset = Stream()
        if kind.startswith("shuffled"):
            pairs = datasets.Dataset.from_list(PAIRS).to_iterable_dataset()
            trainer.train_dataset = pairs.shuffle(seed=3, buffer_size=4)
        trainer.train(resume_from_checkpoint=resume)
        return seen, {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}

    seen, whole = train(tmp_path / "whole")
    assert len({str(batch) for batch in seen}) > 4
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "parts", [Stopped()])
    _, parts = train(tmp_path / "parts", resume=True)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


# A pass has four steps.
@pytest.mark.parametrize("steps", [3, 8])
def test_a_stream_whose_run_is_made_longer_keeps_its_place(steps, tmp_path):
    weights = []
    for folder, last, resume in (("whole", 10, None), ("parts", steps, None), ("parts", 10, True)):
        trainer = make_trainer(tmp_path / folder, max_steps=last, lr_scheduler_type="constant")
        trainer.train_dataset = Stream()
        trainer.train(resume_from_checkpoint=resume)
        weights.append(trainer.model.state_dict())
    whole, _, parts = weights
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


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
        with pytest.raises(
            ValueError, match=f"training pairs must stay as they were .* got {len(other)} pairs, .* before, 8"
        ):
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
    assert trainer.state.best_model_checkpoint == str(
        tmp_path / "after" / f"checkpoint-{trainer.state.best_global_step}"
    )


def test_more_patience_lets_a_run_train(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "learning_rate": 0.0}
    options |= {"max_steps": 6, "metric_for_best_model": "loss"}

    def steps(patience, resume):
        trainer = make_trainer(tmp_path, callbacks=[EarlyStoppingCallback(patience)], **options)
        return trainer.train(resume_from_checkpoint=resume).global_step

    assert [steps(2, None), steps(2, True), steps(3, True)] == [3, 3, 4]


def test_evaluation_leaves_the_random_states_alone(tmp_path):
    states = []

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            states.append(get_random_states())

        def on_save(self, args, state, control, **kwargs):
            assert are_equal_states(get_random_states(), states[-1])

    class Drawing(MetaphraseTrainer):
        def evaluation_loop(self, *args, **kwargs):
            random.random(), np.random.rand(), torch.rand(1)  # noqa: NPY002
            return super().evaluation_loop(*args, **kwargs)

    make_trainer(tmp_path, Drawing, callbacks=[Watch()], eval_strategy="steps", eval_steps=1).train()
    assert len(states) == 3


@pytest.mark.parametrize(
    "draw", [random.random, np.random.rand, lambda: torch.rand(1)], ids=["python", "numpy", "torch"]
)
def test_a_collator_that_draws_from_the_process_is_pointed_out(draw, tmp_path, caplog):
    def collate(pairs):
        draw()
        return PairCollator(0)(pairs)

    make_trainer(tmp_path, collator=collate, save_strategy="no").train()
    assert caplog.text.count("draws from the random generators of this process") == 1


def test_nothing_is_pointed_out_where_nothing_is_wrong(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "metaphrase"):
        make_trainer(tmp_path).train()
        make_trainer(tmp_path, max_steps=5).train(resume_from_checkpoint=True)
    assert [record for record in caplog.records if record.name.startswith("metaphrase")] == []


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


def test_callbacks_get_back_what_they_keep_and_stay_what_they_are(tmp_path, caplog):
    first, second = Counter(1), Counter(10)
    make_trainer(tmp_path, callbacks=[first, second], max_steps=2).train()
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text(encoding="utf-8"))
    assert len(state["stateful_callbacks"]["Counter"]) == 2
    first, second, newcomer = Counter(1), Counter(100), Newcomer()
    trainer = make_trainer(tmp_path, callbacks=[first, second, newcomer])
    order = list(trainer.callback_handler.callbacks)
    trainer.train(resume_from_checkpoint=True)
    assert (first.total, second.total, newcomer.total) == (3, 120, 1)
    assert trainer.callback_handler.callbacks == order
    assert "Counter goes on with other settings: {'step': 100}, before {'step': 10}" in caplog.text
