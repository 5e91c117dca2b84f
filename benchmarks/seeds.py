"""Runs a recipe with several seeds, and saves scores, signatures, times and curves.

    python benchmarks/seeds.py multi30k_en_de_paper --data_dir FOLDER --seeds 1 2 3 --core 0

Each seed runs in its own process, one after the other. Seeds in the output file are skipped; their recipe must be the
same. Several of these commands may run at once, with different seeds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import matplotlib
import yaml
from machine import describe_machine

matplotlib.use("agg")
from matplotlib import pyplot

from metaphrase.scripts.train import find_data

RESULTS = Path(__file__).parent / "results"


def train(recipe: Path, seed: int, arguments: argparse.Namespace) -> dict:
    """Train with one seed and return its report."""
    folder = arguments.output_dir / f"{recipe.stem}_seed_{seed}"
    words = ["train", str(recipe), "--data_dir", str(arguments.data_dir), "--output_dir", str(folder)]
    words += ["--seed", str(seed), "--disable_tqdm", "true", "--resume"]
    if arguments.bf16 is not None:
        words += ["--bf16", arguments.bf16]
    command = [sys.executable, "-m", "metaphrase.scripts", *words]
    if arguments.core is not None:
        command = ["taskset", "-c", str(arguments.core), *command]
    clock = folder.with_suffix(".seconds")
    if not folder.is_dir():
        # It belongs to a deleted run.
        clock.unlink(missing_ok=True)
    seconds = carry_out(command, os.environ | {"OMP_NUM_THREADS": str(arguments.threads)}, clock)
    run = read_run(folder) | {"seed": seed, "seconds": round(seconds), "machine": describe_machine(arguments.threads)}
    return run if arguments.bf16 is None else run | {"bf16": arguments.bf16 == "true"}


def carry_out(command: list[str], environment: dict[str, str], clock: Path) -> float:
    """Run a command and return its seconds. The file `clock` also counts attempts that were killed.

    Raises:
        subprocess.CalledProcessError: If the command fails.
    """
    before = float(clock.read_text(encoding="utf-8")) if clock.is_file() else 0.0
    clock.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    process = subprocess.Popen(command, env=environment)
    while process.poll() is None:
        time.sleep(5)
        clock.write_text(f"{before + time.perf_counter() - start:.0f}\n", encoding="utf-8")
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return before + time.perf_counter() - start


def read_runs(output: Path, fields: dict) -> list[dict]:
    """Return the runs in the output file.

    Raises:
        ValueError: If they are of another recipe.
    """
    if not output.is_file():
        return []
    report = json.loads(output.read_text(encoding="utf-8"))
    if report["recipe"] != fields:
        raise ValueError(f"{output} holds results of another recipe: remove it, or name another --output.")
    return report["runs"]


def read_run(folder: Path) -> dict:
    """Return scores and curves of a finished run."""
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    history = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    losses = [f"{entry['step']}: {entry['loss']:.4f}" for entry in history if "loss" in entry]
    evaluations = [
        {name: entry[name] for name in ("step", "epoch", "eval_loss", "eval_bleu") if name in entry}
        for entry in history
        if "eval_loss" in entry
    ]
    fields = ("scores", "num_examples", "generation", "data")
    return {name: metrics[name] for name in fields} | {"losses": ", ".join(losses), "evaluations": evaluations}


def summarize(runs: list[dict]) -> dict:
    """Return mean, sample standard deviation, minimum and maximum of the first score over the seeds."""
    name = next(iter(runs[0]["scores"]))
    scores = [run["scores"][name]["score"] for run in runs]
    return {
        "score": name,
        "seeds": len(scores),
        "mean": round(statistics.mean(scores), 2),
        "standard_deviation": round(statistics.stdev(scores), 2) if len(scores) > 1 else None,
        "least": round(min(scores), 2),
        "most": round(max(scores), 2),
        "hours": round(statistics.mean(run["seconds"] for run in runs) / 3600, 2),
    }


def draw(runs: list[dict], title: str, path: Path, smoothing: float = 0.0) -> None:
    """Draw training loss and validation score of each seed over the steps."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for run in runs:
        points = [map(float, entry.split(": ")) for entry in run["losses"].split(", ")]
        steps, losses = zip(*points, strict=True)
        left.plot(steps, losses, linewidth=0.8, label=f"seed {run['seed']}")
        points = [(entry["step"], entry["eval_bleu"]) for entry in run["evaluations"] if "eval_bleu" in entry]
        right.plot(*zip(*points, strict=True), marker="o", markersize=3, label=f"seed {run['seed']}")
    for axes, label in (
        (left, "training loss" + (", smoothed labels" if smoothing else "")),
        (right, "validation BLEU"),
    ):
        axes.set_xlabel("steps")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    right.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("recipe", help="a YAML file, or the name of a recipe of the package")
    parser.add_argument("--data_dir", type=Path, required=True, help="folder of the recipe's files")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="%(default)s")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch [%(default)s]")
    parser.add_argument("--core", type=int, help="processor core to pin to")
    parser.add_argument(
        "--bf16", choices=("true", "false"), help="override the recipe, for processors that bfloat16 slows down"
    )
    parser.add_argument("--output_dir", type=Path, default=Path("runs"), help="folder for the models [%(default)s]")
    parser.add_argument(
        "--output", type=Path, help="JSON file [benchmarks/results/RECIPE.json]; a picture goes beside it"
    )
    arguments = parser.parse_args()
    recipe = find_data([arguments.recipe])[0]
    fields = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    output = arguments.output or RESULTS / f"{recipe.stem}.json"
    for seed in arguments.seeds:
        if seed in (run["seed"] for run in read_runs(output, fields)):
            continue
        run = train(recipe, seed, arguments)
        runs = sorted([*read_runs(output, fields), run], key=lambda run: run["seed"])
        report = {"summary": summarize(runs), "recipe": fields, "runs": runs}
        output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        draw(runs, recipe.stem, output.with_suffix(".png"), fields.get("label_smoothing_factor", 0.0))
    print(json.dumps(summarize(read_runs(output, fields)), indent=2))


if __name__ == "__main__":
    main()
