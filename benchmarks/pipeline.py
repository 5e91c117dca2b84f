"""Collects the results of `scripts/recipes/pipeline_en_es/run.sh`, and measures the speed of teachers and students.

    python benchmarks/pipeline.py runs/pipeline --output benchmarks/results/pipeline_en_es.json

Scores are those of `metaphrase compare` in the folder. Speeds are lines per second of `metaphrase generate` on the test sources,
without loading, by torch and by CTranslate2 on one thread, in turns.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

from machine import describe_machine

GENERATE = [sys.executable, "-m", "metaphrase", "generate"]
NUM_TURNS = 3
# The teacher and the student of all pairs, and those of few pairs.
COUPLES = (("teacher", "student"), ("teacher_few", "student_few"))


def read_comparison(path: Path) -> dict:
    """Return scores with the half width of their 95 % intervals, and the p-values of the second system."""
    report = json.loads(path.read_text(encoding="utf-8"))
    return {
        metric: {
            row.pop("system"): {name: round(value, 4) for name, value in row.items() if isinstance(value, float)}
            for row in scores["systems"]
        }
        for metric, scores in report["scores"].items()
    }


def read_training(folder: Path) -> dict:
    """Return pairs, minutes, updates, shape and search of a training."""
    state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape = ("hidden_size", "encoder_layers", "decoder_layers", "vocab_size")
    return {
        "pairs": metrics["data"]["num_train"],
        "minutes": round(next(row["train_runtime"] for row in state["log_history"] if "train_runtime" in row) / 60, 1),
        "updates": state["global_step"],
        **{name: config[name] for name in shape},
        "generation": metrics["generation"],
    }


def decode(words: list[str], source: Path, target: Path) -> float:
    """Decode the sources and return the lines per second."""
    command = [*GENERATE, *words, "--input", str(source), "--output", str(target), "--overwrite"]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return float(re.search(r"([\d.]+) lines per second", log)[1])


def folder_for(engine: str, model: Path) -> str:
    """Return the folder of a model for an engine, and export the model if needed."""
    if engine == "torch":
        return str(model)
    export = model.with_name(f"{model.name}_ctranslate2")
    if not export.is_dir():
        words = ["export", str(model), str(export), "--format", "ctranslate2"]
        subprocess.run([sys.executable, "-m", "metaphrase", *words], check=True)
    return str(export)


def measure_speed(folder: Path, engine: str, teacher: str, student: str, num_beams: int) -> dict:
    """Return the speeds of a teacher, of its student, and of the student with its list of permitted tokens."""
    source, small = folder / "data/test.en", folder_for(engine, folder / student)
    systems = {
        "teacher": [folder_for(engine, folder / teacher)],
        "student": [small],
        "shortlist": [small, "--use_vmap"],
    }
    # CTranslate2 knows no other end of beams.
    ending = ["--early_stopping"] if engine == "ctranslate2" and num_beams > 1 else []
    speeds: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(NUM_TURNS):
        for name, words in systems.items():
            words = [*words, "--engine", engine, "--num_beams", str(num_beams), *ending]
            speeds[name].append(decode(words, source, folder / f"{name}_speed.es"))
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    targets = [(folder / f"{name}_speed.es").read_text("utf-8").split("\n")[:-1] for name in ("student", "shortlist")]
    same = sum(first == second for first, second in zip(*targets, strict=True)) / len(targets[0])
    return {
        "engine": engine,
        "teacher": teacher,
        "student": student,
        "num_beams": num_beams,
        "lines_per_second": medians,
        "student_to_teacher": round(medians["student"] / medians["teacher"], 2),
        "shortlist_to_student": round(medians["shortlist"] / medians["student"], 2),
        "same_targets_with_shortlist": round(same, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="folder of a finished pipeline")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    folder = arguments.folder
    report = {
        "trainings": {path.parent.name: read_training(path.parent) for path in sorted(folder.glob("*/metrics.json"))},
        "comparisons": {path.stem: read_comparison(path) for path in sorted(folder.glob("*-*.json"))},
        "speed": [
            measure_speed(folder, engine, *couple, num_beams)
            for engine in ("torch", "ctranslate2")
            for couple in COUPLES
            for num_beams in (4, 1)
        ],
        "machine": describe_machine(1),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
