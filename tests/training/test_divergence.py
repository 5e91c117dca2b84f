import math

import pytest
from safetensors.torch import load_file
from small_experiments import ONE_STEP, make_recipe
from small_runs import make_trainer, names

from metaphrase.training.experiment import Experiment
from metaphrase.training.trainer import MetaphraseTrainer

DIVERGING = {"learning_rate": 1e30, "max_steps": 9, "lr_scheduler_type": "constant"}


class Spoiled(MetaphraseTrainer):
    """A trainer whose loss is infinite in some updates, without a change of the gradients."""

    updates: tuple[int, ...] = ()

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        return loss + (math.inf if self.state.global_step + 1 in self.updates else 0)


@pytest.mark.parametrize("is_filtered", [True, False])
def test_training_stops_when_the_loss_stays_nan(tmp_path, is_filtered):
    """The filter of transformers logs other losses in place of NaN."""
    options = DIVERGING | {"save_strategy": "no", "logging_nan_inf_filter": is_filtered}
    trainer = make_trainer(tmp_path, MetaphraseTrainer, **options)
    message = r"must be finite, got NaN or infinity since update 2 of 9\. Start .* a lower `learning_rate`, got 1e\+30"
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert trainer.state.global_step == 4


def test_no_checkpoint_of_nan_weights_is_saved(tmp_path):
    trainer = make_trainer(tmp_path, MetaphraseTrainer, **DIVERGING, save_total_limit=1)
    message = r"weights must be finite, got NaN or infinity after update 2 of 9\. .*checkpoint-1 holds the last weights"
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert names(tmp_path) == ["checkpoint-1"]
    kept = load_file(tmp_path / "checkpoint-1" / "model.safetensors")
    assert all(weight.isfinite().all() for weight in kept.values())


def test_a_run_that_diverges_at_its_end_leaves_no_model(data, tmp_path):
    # Decay multiplies the weights by 10,000 in each update.
    fields = ONE_STEP | {"learning_rate": 100, "weight_decay": 100, "max_steps": 11, "save_strategy": "no"}
    fields |= {"lr_scheduler_type": "constant", "logging_steps": 100}
    with pytest.raises(ValueError, match="must be finite, got NaN or infinity"):
        Experiment(make_recipe(data, tmp_path / "run", **fields)).train()
    assert not (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("updates", "fp16", "stops"),
    [((2, 3), False, None), ((2, 3, 5, 6), False, None), ((2, 3, 4), False, 4), ((2, 3, 4), True, None)],
)
def test_a_loss_that_recovers_ends_no_training(updates, fp16, stops, tmp_path):
    trainer = make_trainer(tmp_path, Spoiled, max_steps=7, save_strategy="no")
    # Only a GPU trains in float16. There, updates that overflow are skipped.
    trainer.args.fp16, trainer.updates = fp16, updates
    if stops is None:
        assert trainer.train().global_step == 7
    else:
        with pytest.raises(ValueError, match="must be finite, got NaN or infinity since update 2"):
            trainer.train()
        assert trainer.state.global_step == stops
