"""Two processes that train together, for tests. Each does the same work and writes a log of its own."""

import functools
import json
import os
import time

from job_server import JobServer, fork, free_port, serve

VARIABLES = {
    "torchrun": ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_STEP_ID"),
}


class Server(JobServer):
    def run(self, folder, work, *words, launcher="torchrun"):
        """Do a work of this file with some words in two processes. Return the exit status and the log of each."""
        job = {"folder": str(folder), "work": work, "words": words, "launcher": launcher, "port": free_port()}
        statuses = self.ask(job)
        return statuses, [(folder / f"log_{rank}").read_text(encoding="utf-8") for rank in range(2)]


def carry_out(job):
    children = [fork(functools.partial(begin, job, rank)) for rank in range(2)]
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def begin(job, rank):
    log = os.open(f"{job['folder']}/log_{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(job["folder"])
    values = dict(zip(VARIABLES[job["launcher"]], (rank, rank, 2, 0), strict=False))
    values |= {"MASTER_PORT": job["port"], "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {name: str(value) for name, value in values.items()}
    WORKS[job["work"]](rank, job["words"])


def train_by_another_clock(rank, words):
    """Run the command. The clock of the second process is minutes ahead. The log has the rate of each update."""
    from metaphrase.scripts.__main__ import run
    from metaphrase.training.callbacks import TimeBudget

    def log_rate(self, args, state, control, lr_scheduler, **kwargs):
        print(f"update {state.global_step}: {lr_scheduler.get_last_lr()}", flush=True)
        on_step_end(self, args, state, control, **kwargs)

    on_step_end, TimeBudget.on_step_end = TimeBudget.on_step_end, log_rate
    if rank == 1:
        clock = time.time
        time.time = lambda: clock() + 300
    assert run("train", words) == 0


def train_in_python(rank, words):
    """Run a recipe in a group that exists, as in a worker of Ray Train."""
    from torch import distributed

    from metaphrase.scripts.train import train
    from metaphrase.training.recipe.recipe import load_recipe

    distributed.init_process_group("gloo")
    experiment, result = train(load_recipe(None, words))
    assert distributed.get_world_size() == 2 and bool(result) == (rank == 0)
    tokenizer = experiment.prepare().tokenizers.source
    print(json.dumps({"recipe": experiment.recipe.to_dict(), "words": sorted(tokenizer.get_vocab())}))
    distributed.destroy_process_group()


def choose(rank, words):
    """Choose fields and write the recipe. The second process can choose nothing itself."""
    from metaphrase.choices import completion, rules
    from metaphrase.tokenization import TokenizerPair
    from metaphrase.training.recipe.recipe import load_recipe

    if rank == 1:
        rules.choose_from_text = completion.estimate_recipe = TokenizerPair.train = None
    experiment, choices = completion.complete(load_recipe(None, words), is_dry_run=True)
    data = experiment.prepare().encoded["train"]
    print(json.dumps({"recipe": experiment.recipe.to_dict(), "choices": choices, "ids": data["input_ids"][:]}))


def fail(rank, words):
    """Run the command, where the first process fails in its choices."""
    from metaphrase.choices import rules
    from metaphrase.scripts.__main__ import run

    def choose_from_text(recipe, profile):
        # Its class cannot be sent to another process.
        raise type("Unsendable", (OSError,), {})("the disk of the first machine is full")

    rules.choose_from_text = choose_from_text
    print("exit status", run("train", words))


WORKS = {work.__name__: work for work in (train_by_another_clock, train_in_python, choose, fail)}

if __name__ == "__main__":
    # Children find it imported.
    import metaphrase.scripts.train  # noqa: F401

    serve(carry_out)
