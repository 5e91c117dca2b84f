"""Training of a recipe by Ray Train, on one machine or a cluster. Needs the extra `ray`."""

import logging
import os
from pathlib import Path

from metaphrase.errors import naming_extra
from metaphrase.scripts.train import train
from metaphrase.training.checkpoints import checkpoint_to_resume, checkpoints_in
from metaphrase.training.recipe.recipe import Recipe

with naming_extra("ray", "Ray"):
    import ray.train
    from ray.train.huggingface.transformers import RayTrainReportCallback
    from ray.train.torch import TorchConfig, TorchTrainer


def make_ray_trainer(recipe: Recipe, scaling: ray.train.ScalingConfig, run: ray.train.RunConfig) -> TorchTrainer:
    """Return Ray's trainer of a recipe, whose `fit()` trains as `metaphrase train` does in several processes.

    Ray gets the metrics of each checkpoint and a copy of it, and the content of `metrics.json` as `return_value`. After a
    failure, the workers go on from the last checkpoint in `output_dir`, so all machines must share that folder and the data.
    Relative paths are those of this process.

    Args:
        recipe: The recipe. Without `output_dir`, the run lies in `runs/train`.
        scaling: Number of workers, and the resources of each.
        run: Storage and name of the run in Ray, and the number of failures after which it ends.

    Raises:
        MetaphraseError: If `output_dir` holds another run or model, and the recipe does not resume it.
    """
    folder = Path(recipe.output_dir or "runs/train").resolve()
    if not recipe.resume_from_checkpoint:
        # The workers cannot tell such a folder from their own before a failure.
        checkpoint_to_resume(recipe, folder)
    return TorchTrainer(
        train_on_worker,
        train_loop_config={"recipe": recipe.replace(output_dir=str(folder)), "working_dir": os.getcwd()},
        scaling_config=scaling,
        run_config=run,
        torch_config=TorchConfig(backend=recipe.ddp_backend, timeout_s=recipe.ddp_timeout),
    )


def train_on_worker(values: dict) -> dict:
    """Train in a process of Ray, and return the content of `metrics.json`."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if Path(values["working_dir"]).is_dir():
        # Ray changes to a folder of its own.
        os.chdir(values["working_dir"])
    recipe: Recipe = values["recipe"]
    if recipe.resume_from_checkpoint in (None, False) or checkpoints_in(recipe.output_dir):
        # A failure may have ended an earlier attempt. A folder without checkpoints begins anew.
        recipe = recipe.replace(resume_from_checkpoint=True)
    return train(recipe, callbacks=[ReportCallback()])[1]


class ReportCallback(RayTrainReportCallback):
    """Callback that reports metrics and a copy of each checkpoint to Ray, as Ray's own does, but from the first process alone."""

    def on_save(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            super().on_save(args, state, control, **kwargs)
        else:
            # Ray's own copies the whole checkpoint here too. Ray waits for a report of every process.
            ray.train.report({})
