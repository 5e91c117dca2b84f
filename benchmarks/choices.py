"""Trains one configuration after another on many tasks, to show which choices suit a task.

    python benchmarks/choices.py --data_dir CORPORA --processes 13 --seconds 520 --output choices.json

Tokenizer, network size, dropout, learning rate, batch and number of updates are changed one at a time around the base of
each task (`results/choices_jobs.json`). Several processes share the device. A job at the deadline is stopped and scored;
the result says so. Finished jobs in the output file are skipped, so that the command can be repeated.

`results/combinations_jobs.json` changes what may help with new combinations; its task has a file of test pairs for each kind.

A configuration holds `width`, `layers` of each stack, `dropout`, and the following; everything else is a field of a recipe:

- `evaluations`: number of evaluations during training
- `test_pairs`, `kind_pairs`: number of pairs of each test file, and of each kind of new combinations
- `beams`: a list of beam sizes for the test pairs
"""

import argparse
import json
import multiprocessing
import os
import tempfile
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from machine import describe_machine
from tasks import write_task
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from metaphrase.evaluation.evaluate import evaluate_generator
from metaphrase.inference import Generator
from metaphrase.ops.cpu_setup import keep_few_kernels
from metaphrase.training.experiment import Experiment
from metaphrase.training.recipe.recipe import Recipe

RESULTS = Path(__file__).parent / "results"
BASE = {"width": 256, "layers": 3, "dropout": 0.2, "tokenizer_kind": "byte_bpe", "joint_vocabulary": True}
BASE |= {"learning_rate": 2e-3, "lr_scheduler_type": "cosine", "max_tokens_per_batch": 4096, "max_steps": 3000}
BASE |= {"label_smoothing_factor": 0.1, "weight_decay": 0.01, "adam_beta2": 0.98, "max_grad_norm": 1.0, "seed": 1}
BASE |= {"evaluations": 6, "max_decoded_samples": 300, "test_pairs": 1000, "kind_pairs": 0, "beams": [1, 4]}
METRICS = ("exact_match", "bleu", "chrf", "wer")
CURVE = ("updates", "train_loss", "loss", "exact_match", "bleu")
MAX_LENGTH = 300  # tokens of a side in training


# Jobs


def read_jobs(path: Path) -> tuple[dict[str, dict], dict[str, dict]]:
    """Return for each job its changes to the base of its task, and the whole configuration. Null removes a value.

    Raises:
        ValueError: If a job names a task that the file lacks.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    changes, configurations = content["jobs"], {}
    for name, values in changes.items():
        task = name.partition(":")[0]
        if task not in content["tasks"]:
            raise ValueError(f"`jobs` must name tasks of `tasks`, got {name}.")
        configurations[name] = BASE | content["tasks"][task] | values
    return changes, configurations


def make_recipe(configuration: dict[str, Any], data: Path, output_dir: Path) -> Recipe:
    """Return the recipe of a job."""
    fields = {name: value for name, value in configuration.items() if value is not None}
    width, layers, dropout = (fields.pop(name) for name in ("width", "layers", "dropout"))
    evaluations, changed = fields.pop("evaluations"), fields.pop("model", {})
    for name in ("test_pairs", "kind_pairs", "beams"):
        del fields[name]
    heads, ffn_dim = max(width // 64, 4), round(2.5 * width)
    stacks = {"layers": layers, "ffn_dim": ffn_dim, "attention_heads": heads}
    model = {f"{stack}_{name}": value for stack in ("encoder", "decoder") for name, value in stacks.items()}
    updates, budget = fields["max_steps"], fields["max_tokens_per_batch"]
    steps = max(1, updates // evaluations)
    max_length = min(MAX_LENGTH, budget // 2 - 1)
    files = {f"{split}_file": f"{split}.tsv" for split in ("train", "validation", "test")}
    fields |= {
        **files,
        "data_dir": str(data),
        "output_dir": str(output_dir),
        "max_source_length": max_length,
        "max_target_length": max_length,
        "too_long": "skip",
        "preset": "metaphrase-tiny",
        "model": {"hidden_size": width, "dropout": dropout, "max_position_embeddings": 4096, **model, **changed},
        "warmup_steps": updates // 10,
        "per_device_eval_batch_size": 128,
        "eval_strategy": "steps",
        "eval_steps": steps,
        "logging_steps": steps,
        "save_strategy": "no",
        "generation_num_beams": 1,
        "num_beams": 1,
        "metrics": list(METRICS),
        "logging_nan_inf_filter": False,
        "disable_tqdm": True,
        "bf16": torch.cuda.is_available(),
    }
    return Recipe.from_mapping(fields, "the job")


# One job


class Clock(TrainerCallback):
    """Seconds of training without evaluation, scores of the evaluations, and a stop at the deadline."""

    def __init__(self, deadline: float):
        self.deadline, self.seconds, self.curve, self.is_stopped = deadline, 0.0, [], False
        self.start: float | None = None

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        self.start = time.monotonic() if self.start is None else self.start

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        if time.time() > self.deadline and state.global_step < state.max_steps:
            self.is_stopped = control.should_training_stop = control.should_evaluate = True
        if control.should_evaluate or state.global_step >= state.max_steps:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.seconds += time.monotonic() - self.start
            self.start = None

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
        scores = {name.removeprefix("eval_"): value for name, value in kwargs["metrics"].items()}
        scores |= {"updates": state.global_step, "train_loss": losses[-1] if losses else None}
        self.curve.append([None if scores[name] is None else round(scores[name], 3) for name in CURVE])


class MeasuredExperiment(Experiment):
    """Experiment that counts tokens, parameters and seconds, and scores all test files of a task."""

    def __init__(self, recipe: Recipe, configuration: dict[str, Any], deadline: float):
        super().__init__(recipe)
        self.configuration, self.clock, self.sizes = configuration, Clock(deadline), {}

    def make_model(self) -> PreTrainedModel:
        model, tokenizers = super().make_model(), self.prepare().tokenizers
        # Early, bad models would write to the limit.
        longest = self.corpus.reports["train"].target_lengths["longest"]
        model.generation_config.max_length = round(1.1 * longest) + 8
        self.sizes["parameters"] = model.num_parameters()
        self.sizes["vocabulary"] = [len(tokenizers.source), len(tokenizers.target)]
        return model

    def make_trainer(self, model: PreTrainedModel):
        train = self.prepare().encoded["train"]
        self.sizes["pairs"] = len(train)
        self.sizes["tokens"] = [int(sum(train[f"{side}_length"][:])) for side in ("source", "target")]
        trainer = super().make_trainer(model)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(self.clock)
        return trainer

    def evaluate(self, generator: Generator, folder: Path | None = None) -> dict:
        data, scores = Path(self.recipe.data_dir), {}
        for path in sorted(data.glob("test*.tsv")):
            for beams in self.configuration["beams"][: 1 if self.clock.is_stopped else None]:
                scores[f"{path.stem}_beam{beams}"] = self.score(
                    generator, path, self.configuration["test_pairs"], beams
                )
        if self.configuration["kind_pairs"]:
            kinds = sorted(data.glob("systematic/*.tsv"))
            values = {path.stem: self.score(generator, path, self.configuration["kind_pairs"], 1) for path in kinds}
            scores["kinds"] = {name: score["exact_match"] for name, score in values.items()}
        return scores

    def score(self, generator: Generator, path: Path, pairs: int, beams: int) -> dict:
        """Return the scores of the first pairs of a file."""
        lines = path.read_text(encoding="utf-8").split("\n")[:-1][:pairs]
        sources, targets = map(list, zip(*(line.split("\t") for line in lines), strict=True))
        # The systematic tests may have longer targets than training.
        limit = generator.model.generation_config.max_length * (1 if path.stem == "test" else 2)
        result, _ = evaluate_generator(
            generator,
            sources,
            targets,
            metrics=self.scores.metrics,
            metric_options=self.scores.options,
            generation_options={"num_beams": beams, "max_length": limit},
            show_progress=False,
        )
        values = {name: round(score["score"], 2) for name, score in result["scores"].items()}
        return values | {"unfinished": result["num_unfinished"]}


def run_job(name: str, configuration: dict[str, Any], folder: Path, deadline: float) -> dict | None:
    """Carry out a job and return its measurement, or None after the deadline."""
    if time.time() > deadline:
        return None
    begin = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="choices_") as output_dir:
            recipe = make_recipe(configuration, folder / name.partition(":")[0], Path(output_dir) / "run")
            experiment = MeasuredExperiment(recipe, configuration, deadline)
            scores = experiment.train()
    except Exception as error:
        traceback.print_exc()
        return {"name": name, "error": f"{type(error).__name__}: {error}"[:600]}
    clock, sizes = experiment.clock, experiment.sizes
    updates = clock.curve[-1][0]
    return {
        "name": name,
        **sizes,
        "updates": updates,
        "epochs": round(updates * configuration["max_tokens_per_batch"] / sum(sizes["tokens"]), 1),
        "train_seconds": round(clock.seconds, 1),
        "all_seconds": round(time.monotonic() - begin, 1),
        "is_stopped": clock.is_stopped,
        "curve": clock.curve,
        "test": scores,
    }


# All jobs


def prepare_process() -> None:
    """Set up a process that trains."""
    torch.set_num_threads(1)
    keep_few_kernels()
    datasets.disable_progress_bars()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def read_results(path: Path, machine: dict) -> list[dict]:
    """Return the results in the output file.

    Raises:
        ValueError: If they were measured on another machine, or by another commit.
    """
    if not path.is_file():
        return []
    report = json.loads(path.read_text(encoding="utf-8"))
    if report["machine"] != machine:
        raise ValueError(f"{path} holds results of another machine or commit: remove it, or name another --output.")
    return report["results"]


def write_report(path: Path, machine: dict, processes: int, results: list[dict]) -> None:
    """Write a JSON file with one line for each result."""
    head = {"machine": machine, "processes": processes, "curve": CURVE, "tokens": ["source", "target"]}
    lines = ",\n".join(json.dumps(result, ensure_ascii=False) for result in results)
    path.write_text(json.dumps(head)[:-1] + f', "results": [\n{lines}\n]}}\n', encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    jobs = RESULTS / "choices_jobs.json"
    parser.add_argument("jobs", type=Path, nargs="?", default=jobs, help="JSON file [results/choices_jobs.json]")
    parser.add_argument("--folder", type=Path, default=Path("runs/choices"), help="folder for the pairs [%(default)s]")
    parser.add_argument("--data_dir", type=Path, help="folder of the public corpora (see `tasks/corpora.py`)")
    parser.add_argument("--processes", type=int, default=1, help="processes that share the device [%(default)s]")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time after which jobs are stopped")
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    arguments = parser.parse_args()
    deadline = time.time() + arguments.seconds
    machine = describe_machine(1) | {"bf16": torch.cuda.is_available()}
    results = read_results(arguments.output, machine)
    finished = {result["name"] for result in results if not result.get("is_stopped") and "error" not in result}
    changes, configurations = read_jobs(arguments.jobs)
    configurations = {name: job for name, job in configurations.items() if name not in finished}
    for task in sorted({name.partition(":")[0] for name in configurations}):
        write_task(task, arguments.folder, arguments.data_dir)
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="cache_") as cache,
        ProcessPoolExecutor(arguments.processes, spawn, prepare_process) as pool,
    ):
        # The processes share encoded pairs.
        os.environ["HF_DATASETS_CACHE"] = cache
        submitted = [
            pool.submit(run_job, name, job, arguments.folder, deadline) for name, job in configurations.items()
        ]
        for future in as_completed(submitted):
            result = future.result()
            if result is not None:
                name = result["name"]
                results = [other for other in results if other["name"] != name]
                results.append({"name": name, "changes": changes[name], **result})
                write_report(arguments.output, machine, arguments.processes, results)
                print(name, result.get("error") or result["test"], flush=True)


if __name__ == "__main__":
    main()
