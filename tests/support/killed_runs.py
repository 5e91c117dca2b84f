"""Trainings that are killed, for the tests of what is resumed."""

import functools
import os
import signal
import sys
from pathlib import Path

import torch
from job_server import JobServer, fork, free_port, serve
from safetensors import torch as safetensors_torch
from small_trainers import make_trainer, small_pairs
from transformers import EarlyStoppingCallback, TrainerCallback, modeling_utils
from transformers.trainer_callback import ExportableState

BASE = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 8, "logging_steps": 3, "seed": 5}
BASE |= {"learning_rate": 0.01, "weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 2}
BY_STEPS = {"save_strategy": "steps", "eval_strategy": "steps"}
BY_EPOCHS = {"save_strategy": "epoch", "eval_strategy": "epoch"}
BY_SCORE = {"metric_for_best_model": "score", "greater_is_better": True}
# 26 pairs are 7 batches of 4.
CASES = {
    # Steps of two batches, 4 to an epoch; saving, logging and evaluation do not coincide.
    "accumulation": BY_STEPS
    | {"gradient_accumulation_steps": 2, "max_steps": 10, "save_steps": 2, "eval_steps": 4, "save_total_limit": 2}
    | {"train_sampling_strategy": "group_by_length", "label_smoothing_factor": 0.1},
    # The best checkpoint is kept and loaded at the end, which patience brings on early. Workers outlive an epoch.
    "patience": BY_EPOCHS
    | BY_SCORE
    | {"num_train_epochs": 9, "load_best_model_at_end": True, "save_total_limit": 2}
    | {"dataloader_num_workers": 1, "dataloader_persistent_workers": True},
    # The checkpoint of an epoch's last step is older than the epoch's evaluation, which the schedule follows, and its log.
    "ends_of_epochs": BY_EPOCHS
    | {"num_train_epochs": 3, "save_strategy": "steps", "save_steps": 7, "eval_on_start": True}
    | {"logging_strategy": "epoch"}
    | {"lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "loss", "greater_is_better": False},
    # With several processes, neither transformers nor accelerate tells a sampler of ours the epoch in which a run is resumed.
    "processes": BY_STEPS
    | {"max_steps": 9, "logging_steps": 4, "save_steps": 2, "save_total_limit": 1, "eval_steps": 3}
    | {"train_sampling_strategy": "group_by_length"},
}


class RunningMean(TrainerCallback, ExportableState):
    """Follows the steps as an average of the weights would, and stands in the log."""

    def __init__(self):
        self.mean = 0.0

    def on_step_end(self, args, state, control, **kwargs):
        self.mean = 0.9 * self.mean + 0.1 * state.global_step

    def on_log(self, args, state, control, **kwargs):
        state.log_history[-1]["mean"] = self.mean

    def state(self):
        return {"args": {}, "attributes": {"mean": self.mean}}


class RisesThenStays(TrainerCallback, ExportableState):
    """A score that does not depend on the weights: the third evaluation is the best."""

    def __init__(self):
        self.count = 0

    def __call__(self, decoded, labels):
        self.count += 1
        return {"score": min(self.count, 3) + 0.0}

    def state(self):
        return {"args": {}, "attributes": {"count": self.count}}


class KilledAt(TrainerCallback):
    """Ends the process at an event of a step, such as `on_substep_end` in the middle of accumulation."""

    def __init__(self, event, step):
        def die(args, state, control, **kwargs):
            if state.global_step == step:
                kill()

        setattr(self, event, die)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at_write(name, number):
    """Ends the process when half of a file of that name has been written for the `number`-th time."""
    count = 0

    def cut_short(write):
        def written(content, path, *args, **kwargs):
            nonlocal count
            result = write(content, path, *args, **kwargs)
            if Path(path).name == name:
                count += 1
                if count == number:
                    os.truncate(path, Path(path).stat().st_size // 2)
                    kill()
            return result

        return written

    torch.save = cut_short(torch.save)
    modeling_utils.safe_save_file = cut_short(safetensors_torch.save_file)


def kill_at_access(folder, event, number):
    """Ends the process just before Python opens, moves or deletes something below a folder for the `number`-th time.

    What counts is an event, as `sys.addaudithook` names it, or "any".
    """
    count = 0
    events = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir") if event == "any" else (event,)

    def hook(name, arguments):
        nonlocal count
        # What `rmtree` deletes it names by the name in its folder alone.
        if name in events and (name == "os.remove" or str(arguments[0]).startswith(folder)):
            count += 1
            if count == number:
                kill()

    sys.addaudithook(hook)


def trainer_of(case, output, callbacks):
    import datasets
    from tiny_models import tiny_model

    sizes = {"hidden_size": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    model = tiny_model(dropout=0.1, encoder_attention_heads=2, decoder_attention_heads=2, **sizes)
    pairs = small_pairs(26, vocab_size=37)
    pairs = datasets.Dataset.from_list([pair | {"length": sum(map(len, pair.values()))} for pair in pairs])
    options = {"eval_dataset": pairs.select(range(6)), "callbacks": [RunningMean(), *callbacks]}
    if case == "patience":
        score = RisesThenStays()
        options["callbacks"] += [score, EarlyStoppingCallback(2)]
        options |= {"score": score, "generation_options": {"max_new_tokens": 3, "do_sample": True}}
    return make_trainer(model, pairs, output, **BASE | CASES[case] | options)


class Server(JobServer):
    def run(self, output, *, resume=None, processes=1, **job):
        """Carries out a job. Returns whether it was killed, and what it wrote."""
        job |= {"output": str(output), "resume": resume, "processes": processes, "port": free_port()}
        Path(job["output"] + ".log").unlink(missing_ok=True)
        ends, log = self.ask(job)
        # Where one of several is killed, the others fail.
        assert not any(ends) or -signal.SIGKILL in ends, log
        return any(ends), log


def carry_out(job):
    children = [fork(functools.partial(train, job, rank)) for rank in range(job["processes"])]
    statuses = {}
    while len(statuses) < len(children):
        child, status = os.waitpid(-1, 0)
        statuses[child] = os.waitstatus_to_exitcode(status)
        if statuses[child] != 0:
            # As torchrun does: the others would wait for it for ever.
            for other in set(children) - set(statuses):
                os.kill(other, signal.SIGKILL)
    return [statuses[child] for child in children], Path(job["output"] + ".log").read_text(encoding="utf-8")


def train(job, rank):
    """Trains a case, or carries out a recipe, up to where the job says that it is killed."""
    log = os.open(job["output"] + ".log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if job["processes"] > 1:
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job["processes"], "MASTER_PORT": job["port"]}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in ranks.items()}}
    callbacks = [KilledAt(*job["at"])] if "at" in job else []
    if "write" in job:
        kill_at_write(*job["write"])
    if "access" in job:
        kill_at_access(job["output"], *job["access"])
    if "recipe" in job:
        from metaphrase.training.experiment import Experiment
        from metaphrase.training.recipe.recipe import load_recipe

        words = ["--output_dir", job["output"], "--resume_from_checkpoint", str(bool(job["resume"])).lower()]
        Experiment(load_recipe(None, [*job["recipe"], *words])).train()
        return
    trainer = trainer_of(job["case"], job["output"], callbacks)
    trainer.train(resume_from_checkpoint=job["resume"])
    trainer.save_model()
    trainer.save_state()


if __name__ == "__main__":
    # Children find them imported.
    import datasets  # noqa: F401
    import tiny_models  # noqa: F401

    import metaphrase.training.experiment  # noqa: F401

    serve(carry_out)
