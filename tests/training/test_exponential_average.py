"""The exponential average: its values by hand, where it stands in for the weights, and a run that was interrupted."""

import logging
import shutil

import pytest
import small_trainers
import torch
from safetensors.torch import load_file
from small_trainers import small_pairs
from tiny_models import tiny_model
from torch import nn
from transformers import AutoModelForSeq2SeqLM, TrainerCallback

from metaphrase.data.collators import PairCollator
from metaphrase.training.checkpointing.folders import EXPONENTIAL_AVERAGE_NAME
from metaphrase.training.exponential_average import ExponentialAverage
from metaphrase.training.trainer import MetaphraseTrainer


def weights_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


# The highest loss counts as the best one, which is that of the first checkpoint.
FIRST_IS_BEST = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
FIRST_IS_BEST |= {"learning_rate": 0.02, "eval_steps": 1, "save_steps": 1}


class Recorder(TrainerCallback):
    """The model's weights after each optimizer step, and at each evaluation."""

    def __init__(self):
        self.steps, self.evaluations = [], []

    def on_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps.append(weights_of(model))

    def on_evaluate(self, args, state, control, model=None, **kwargs):
        self.evaluations.append(weights_of(model))


def make_trainer(folder, average=None, recorder=None, model=None, **options):
    settings = {
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
    }
    settings |= {f"{event}_strategy": "steps" for event in ("eval", "save")} | {"eval_steps": 3, "save_steps": 3}
    settings |= {"logging_steps": 1, "predict_with_generate": False}
    callbacks = [callback for callback in (average, recorder) if callback is not None]
    model = tiny_model(vocab_size=60, initializer_range=0.2, dropout=0.1) if model is None else model
    return small_trainers.make_trainer(model, small_pairs(), folder, callbacks=callbacks, **settings | options)


def average_by_hand(start, steps, decay, warmup):
    averages = {name: weight.double() for name, weight in start.items()}
    for number, weights in enumerate(steps):
        share = min(decay, (1 + number) / (10 + number)) if warmup else decay
        averages = {name: share * averages[name] + (1 - share) * weight for name, weight in weights.items()}
    return {name: average.float() for name, average in averages.items()}


def assert_close(first, second):
    torch.testing.assert_close(first, second, atol=1e-6, rtol=1e-5)


def assert_equal(first, second):
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


# Its values


@pytest.mark.parametrize(("accumulation", "warmup"), [(1, True), (3, False)])
def test_average_of_the_optimizer_steps_by_hand(accumulation, warmup, tmp_path):
    average, recorder = ExponentialAverage(0.3, warmup), Recorder()
    trainer = make_trainer(tmp_path, average, recorder, gradient_accumulation_steps=accumulation)
    start = weights_of(trainer.model)
    trainer.train()
    assert average.num_updates == len(recorder.steps) == 6
    expected = average_by_hand(start, recorder.steps, 0.3, warmup)
    assert_close(weights_of(trainer.model), expected)
    assert max((expected[name] - recorder.steps[-1][name]).abs().max().item() for name in expected) > 1e-3
    assert_close(load_file(tmp_path / "checkpoint-3" / EXPONENTIAL_AVERAGE_NAME), recorder.evaluations[0])
    assert_close(recorder.evaluations[0], average_by_hand(start, recorder.steps[:3], 0.3, warmup))


def test_steps_that_were_skipped_are_none():
    model, average = tiny_model(), ExponentialAverage(0.5)
    average.averages = {"lm_head.bias": torch.zeros(3)}

    class Optimizer:
        step_was_skipped = True

    average.on_optimizer_step(None, None, None, model=model, optimizer=Optimizer())
    assert average.num_updates == 0


def test_half_precision_is_averaged_in_float32_and_comes_back_unchanged():
    model = nn.Linear(5, 7).to(torch.bfloat16)
    average = ExponentialAverage(0.999, warmup=False)
    average.on_train_begin(None, None, None, model=model)
    before = weights_of(model)
    with torch.no_grad():
        model.weight.add_(0.5)
    after = weights_of(model)
    for _ in range(50):
        average.update(model)
    moved = average.averages["weight"] - before["weight"].float()
    # A step of a thousandth is lost in bfloat16.
    torch.testing.assert_close(moved, torch.full_like(moved, 0.5 * (1 - 0.999**50)), rtol=0.05, atol=0)
    with average.swapped_in(model):
        assert model.weight.dtype == torch.bfloat16
        assert torch.equal(model.weight, average.averages["weight"].bfloat16())
    assert_equal(weights_of(model), after)


def test_only_what_is_trained_is_averaged(tmp_path):
    model = tiny_model(vocab_size=60, initializer_range=0.2)
    model.get_encoder().requires_grad_(False)
    make_trainer(tmp_path, ExponentialAverage(0.5), model=model, max_steps=3).train()
    saved = load_file(tmp_path / "checkpoint-3" / EXPONENTIAL_AVERAGE_NAME)
    # The shared embedding is the encoder's too.
    assert saved.keys() == {name for name, parameter in model.named_parameters() if "decoder.layers" in name} | {
        "model.decoder.norm.weight"
    }
    assert_equal(saved, {name: weights_of(model)[name] for name in saved})


# Where it stands in


def test_training_goes_on_from_the_weights_under_it(tmp_path):
    """Evaluations and checkpoints in between change nothing, and a checkpoint's model is what the optimizer left."""
    make_trainer(tmp_path / "with", ExponentialAverage(0.9)).train()
    make_trainer(tmp_path / "without").train()
    for step in (3, 6):
        saved = [
            load_file(tmp_path / name / f"checkpoint-{step}" / "model.safetensors") for name in ("with", "without")
        ]
        assert_equal(*saved)
    assert not (tmp_path / "without" / "checkpoint-3" / EXPONENTIAL_AVERAGE_NAME).exists()


def test_evaluation_and_decoding_see_the_average(tmp_path):
    average, recorder, seen = ExponentialAverage(0.9), Recorder(), []

    def score(decoded, labels):
        seen.append(weights_of(trainer.model))
        return {"bleu": 1.0}

    trainer = make_trainer(
        tmp_path, average, recorder, score=score, predict_with_generate=True, generation_max_length=6
    )
    trainer.train()
    for step, decoding, evaluation in zip((3, 6), seen, recorder.evaluations, strict=True):
        saved = load_file(tmp_path / f"checkpoint-{step}" / EXPONENTIAL_AVERAGE_NAME)
        assert_equal(decoding, saved)
        assert_equal(evaluation, saved)
        assert any(not torch.equal(saved[name], recorder.steps[step - 1][name]) for name in saved)


def test_final_model_is_the_average_and_stays_it(tmp_path):
    trainer = make_trainer(tmp_path, ExponentialAverage(0.9))
    trainer.train()
    expected = load_file(tmp_path / "checkpoint-6" / EXPONENTIAL_AVERAGE_NAME)
    trainer.save_model()
    saved = load_file(tmp_path / "model.safetensors")
    for name, weight in saved.items():
        assert torch.equal(weight, expected[name]), name
    logged = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry][-1]
    assert trainer.evaluate()["eval_loss"] == logged
    assert trainer.predict(small_pairs()).metrics["test_loss"] == pytest.approx(logged)
    assert_equal(weights_of(trainer.model), expected)


def test_model_saved_and_predicting_in_the_middle_of_training_is_the_average(tmp_path):
    average, losses = ExponentialAverage(0.9), []

    class Saver(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 4:
                before = weights_of(trainer.model)
                trainer.save_model(str(tmp_path / "middle"))
                losses.append(trainer.predict(small_pairs()[:2]).metrics["test_loss"])
                assert_equal(weights_of(trainer.model), before)
                average.save(tmp_path / "middle")

    trainer = make_trainer(tmp_path, average, Saver())
    trainer.train()
    saved, expected = (
        load_file(tmp_path / "middle" / name) for name in ("model.safetensors", EXPONENTIAL_AVERAGE_NAME)
    )
    assert all(torch.equal(saved[name], expected[name]) for name in saved)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "middle").eval()
    assert losses == [pytest.approx(model(**PairCollator(0)(small_pairs()[:2])).loss.item(), rel=1e-5)]


def test_best_model_is_the_average_that_was_best(tmp_path):
    trainer = make_trainer(tmp_path, ExponentialAverage(0.5), **FIRST_IS_BEST)
    trainer.train()
    best = trainer.state.best_model_checkpoint
    assert best.endswith("checkpoint-1")
    expected = load_file(f"{best}/{EXPONENTIAL_AVERAGE_NAME}")
    assert_equal(weights_of(trainer.model), expected)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, rel=1e-5)


def test_weights_come_back_after_an_error_and_after_a_second_exchange():
    model = nn.Linear(2, 2)
    average = ExponentialAverage(0.5)
    average.averages = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    before = weights_of(model)
    with pytest.raises(RuntimeError, match="out of memory"), average.swapped_in(model):
        with average.swapped_in(model):
            assert not model.weight.any()
        assert not model.weight.any()
        raise RuntimeError("out of memory")
    assert_equal(weights_of(model), before)
    assert not average.averages["weight"].any()


# Interrupted and resumed


def test_run_that_was_stopped_ends_as_one_that_was_not(tmp_path):
    options = {"gradient_accumulation_steps": 2}
    whole = make_trainer(tmp_path / "whole", ExponentialAverage(0.9), **options)
    whole.train()
    make_trainer(tmp_path / "parts", ExponentialAverage(0.9), **options).train()
    shutil.rmtree(tmp_path / "parts" / "checkpoint-6")
    average = ExponentialAverage(0.9)
    resumed = make_trainer(tmp_path / "parts", average, model=tiny_model(vocab_size=60, seed=5, dropout=0.1), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-3"))
    assert average.num_updates == 6
    assert_equal(weights_of(resumed.model), weights_of(whole.model))
    for name in ("model.safetensors", EXPONENTIAL_AVERAGE_NAME):
        assert_equal(*(load_file(tmp_path / run / "checkpoint-6" / name) for run in ("whole", "parts")))


def test_second_training_starts_an_average_of_its_own(tmp_path):
    average, recorder = ExponentialAverage(0.9), Recorder()
    trainer = make_trainer(tmp_path, average, recorder)
    trainer.train()
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    start = weights_of(trainer.model)
    recorder.steps.clear()
    trainer.train()
    assert average.num_updates == 6
    assert_close(weights_of(trainer.model), average_by_hand(start, recorder.steps, 0.9, True))


def test_checkpoint_must_hold_the_same_average(tmp_path, caplog):
    make_trainer(tmp_path / "run", ExponentialAverage(0.9), max_steps=3).train()
    checkpoint = str(tmp_path / "run" / "checkpoint-3")

    other = ExponentialAverage(0.9)
    for averages, difference in (
        ({"model.decoder.norm.weight": torch.zeros(32)}, r"`model.decoder.layers.0.*got nothing and"),
        ({"a": torch.zeros(3)}, r"`a` must be trained and of the same shape .* got \[3\] and nothing"),
    ):
        other.averages = averages
        with pytest.raises(ValueError, match=difference):
            other.load(checkpoint)
    with caplog.at_level(logging.WARNING):
        make_trainer(tmp_path / "other", ExponentialAverage(0.8), max_steps=4).train(checkpoint)
    assert "another decay: 0.8, warm-up True, after 0.9, warm-up True" in caplog.text
    with caplog.at_level(logging.WARNING):
        make_trainer(tmp_path / "none", max_steps=4).train(checkpoint)
    assert "holds an exponential average, which this run leaves alone" in caplog.text

    (tmp_path / "run" / "checkpoint-3" / EXPONENTIAL_AVERAGE_NAME).unlink()
    with pytest.raises(ValueError, match=r"whole checkpoint, got .*: exponential_average\.safetensors is missing"):
        make_trainer(tmp_path / "run", ExponentialAverage(0.9), max_steps=4).train(checkpoint)


def test_an_average_begins_at_a_checkpoint_of_a_run_without(tmp_path, caplog):
    make_trainer(tmp_path, max_steps=3).train()
    average, recorder = ExponentialAverage(0.9), Recorder()
    trainer = make_trainer(tmp_path, average, recorder)
    start = load_file(tmp_path / "checkpoint-3" / "model.safetensors")
    trainer.train(resume_from_checkpoint=True)
    assert f"{tmp_path / 'checkpoint-3'} holds no exponential average: it begins with the weights there." in caplog.text
    assert average.num_updates == len(recorder.steps) == 3
    steps = [{name: step[name] for name in start} for step in recorder.steps]
    assert_close({name: weights_of(trainer.model)[name] for name in start}, average_by_hand(start, steps, 0.9, True))


def test_the_best_checkpoint_may_be_from_before_the_average(tmp_path):
    make_trainer(tmp_path, max_steps=1, **FIRST_IS_BEST).train()
    trainer = make_trainer(tmp_path, ExponentialAverage(0.0), **FIRST_IS_BEST, max_steps=3)
    trainer.train(resume_from_checkpoint=True)
    best = trainer.state.best_model_checkpoint
    assert best.endswith("checkpoint-1")
    expected = load_file(f"{best}/model.safetensors")
    assert all(torch.equal(weight, weights_of(trainer.model)[name]) for name, weight in expected.items())


def test_the_best_is_no_checkpoint_whose_averages_were_scored_if_they_are_left_alone(tmp_path, caplog):
    trainer = make_trainer(tmp_path, ExponentialAverage(0.5), **FIRST_IS_BEST, max_steps=3)
    trainer.train()
    assert trainer.state.best_global_step == 1
    trainer = make_trainer(tmp_path, **FIRST_IS_BEST, max_steps=5)
    trainer.train(resume_from_checkpoint=True)
    assert "or without the averages that were scored" in caplog.text and "no checkpoint is known" in caplog.text
    best = trainer.state.best_global_step
    assert best == 4
    scored = next(
        entry["eval_loss"] for entry in trainer.state.log_history if entry["step"] == best and "eval_loss" in entry
    )
    assert trainer.evaluate()["eval_loss"] == pytest.approx(scored, rel=1e-6)
    # Once more, by another direction: what the averages were scored is still not what would be loaded.
    trainer = make_trainer(tmp_path, **FIRST_IS_BEST | {"greater_is_better": False}, max_steps=5)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.best_global_step == 5


def test_average_goes_on_where_smaller_batches_are_tried(tmp_path, monkeypatch):
    make_trainer(tmp_path, ExponentialAverage(0.9), max_steps=3).train()
    average, compute_loss = ExponentialAverage(0.9), MetaphraseTrainer.compute_loss

    def lack_memory(*_, **__):
        monkeypatch.setattr(MetaphraseTrainer, "compute_loss", compute_loss)
        raise RuntimeError("CUDA out of memory.")

    monkeypatch.setattr(MetaphraseTrainer, "compute_loss", lack_memory)
    trainer = make_trainer(tmp_path, average, max_steps=4, auto_find_batch_size=True)
    trainer.train(resume_from_checkpoint=True)
    assert MetaphraseTrainer.compute_loss is compute_loss and average.num_updates == 4
    # The next training is one of its own.
    trainer.train()
    assert average.num_updates == 4 and average.resumed_folder is None


# Errors


def test_decay_out_of_range_is_refused():
    for decay in (-0.1, 1.0):
        with pytest.raises(ValueError, match=f"`decay` must be at least 0 and below 1, got {decay}"):
            ExponentialAverage(decay)


@pytest.mark.parametrize(("name", "kind"), [("is_fsdp_enabled", "FSDP"), ("is_deepspeed_enabled", "DeepSpeed")])
def test_sharded_model_is_refused(name, kind, tmp_path):
    trainer = make_trainer(tmp_path, ExponentialAverage(0.9))
    setattr(trainer, name, True)
    with pytest.raises(ValueError, match=f"needs the whole model on each device, got it sharded by {kind}"):
        trainer.train()
