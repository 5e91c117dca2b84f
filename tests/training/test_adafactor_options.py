"""Tests of Adafactor's own options: they reach the optimizer, and an update follows the size of what it changes."""

import pytest
import torch
from small_runs import make_trainer

from metaphrase.training.optimizer import adafactor_options
from metaphrase.training.trainer import MetaphraseTrainer


def make(folder, **options):
    return make_trainer(folder, MetaphraseTrainer, optim="adafactor", learning_rate=1e-2, **options)


def largest_changes(folder, **options):
    """Of each matrix, the root mean square of its first update, as a share of its own and by itself."""
    trainer = make(folder, lr_scheduler_type="constant", max_steps=1, save_strategy="no", **options)
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters() if weight.ndim == 2}
    trainer.train()
    after = dict(trainer.model.named_parameters())

    def size(states):
        return float(states.square().mean().sqrt())

    changes = {name: size(after[name].detach() - old) for name, old in before.items()}
    return {name: (change, change / size(before[name])) for name, change in changes.items() if change}


def test_update_is_in_proportion_to_the_weights(tmp_path):
    changes = largest_changes(tmp_path, optim_args="scale_parameter=true")
    assert len(changes) > 5
    # Adafactor clips an update to a root mean square of 1 before the learning rate.
    assert all(share == pytest.approx(1e-2, rel=0.1) for _, share in changes.values() if share > 5e-3)
    assert sum(share > 5e-3 for _, share in changes.values()) > 5


@pytest.mark.parametrize("options", [{}, {"layer_decay": 0.5}])
def test_options_reach_every_group(options, tmp_path):
    trainer = make(tmp_path, optim_args="scale_parameter=True, clip_threshold=0.5,decay_rate=-0.7")
    trainer.layer_decay = options.get("layer_decay", 1.0)
    groups = trainer.create_optimizer().param_groups
    expected = {"scale_parameter": True, "clip_threshold": 0.5, "decay_rate": -0.7, "relative_step": False}
    assert all({name: group[name] for name in expected} == expected for group in groups)
    assert (len(groups) > 2) is bool(options)


def test_options_of_another_optimizer_are_left_alone(tmp_path):
    trainer = make_trainer(tmp_path, MetaphraseTrainer, optim="sgd", optim_args="momentum=0.9")
    assert trainer.create_optimizer().param_groups[0]["momentum"] == 0.9
    assert type(trainer.optimizer) is torch.optim.SGD


@pytest.mark.parametrize("nothing", [None, "", " "])
def test_no_options(nothing):
    assert adafactor_options(nothing) == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("scale=true", "`optim_args` of adafactor must be some of scale_parameter, .*, got 'scale=true'"),
        ("scale_parameter", "`scale_parameter` in `optim_args` must be true or false, got ''"),
        ("scale_parameter=1", "`scale_parameter` in `optim_args` must be true or false, got '1'"),
        ("decay_rate=fast", "`decay_rate` in `optim_args` must be a number, got 'fast'"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        adafactor_options(options)
