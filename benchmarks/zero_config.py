"""Trains models from data files and a time budget alone, or by a recipe, and records scores, time and warnings.

    python benchmarks/zero_config.py --jobs g2p_fre g2p_dut --time_budget 15m --seeds 1 2 3 --data_dir CORPORA --core 0
    python benchmarks/zero_config.py --jobs g2p_fre --recipe g2p --seeds 1 2 3 --ensemble --data_dir CORPORA --core 0

Each run has a process of its own, on one core with one thread, and an empty cache. Runs in the output file are skipped.
Two commands may run at once, on different cores. `tasks/corpora.py` describes the corpora; the pairs of other jobs are
generated. Models and logs stay in a temporary folder.
"""

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml
from machine import describe_machine
from sacrebleu.metrics import BLEU
from tasks import GENERATED, write_task

# The first setup of the log wins. So each line begins with its level.
COMMAND = (
    "import logging, sys; logging.basicConfig(level='INFO', format='%(levelname)s %(message)s', stream=sys.stderr); "
    "from metaphrase.scripts.__main__ import main; sys.exit(main())"
)
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
SPLITS = ("train", "validation", "test")
# Stems of the files of each split, and the suffixes of source and target, or of both.
JOBS = {f"g2p_{name}": (f"g2p_2021/{name}_", "train dev test", ".tsv") for name in ("fre", "dut", "kor", "hun")}
JOBS |= {
    "java_cs": ("java_cs/", "train valid test", ".java .cs"),
    "cs_java": ("java_cs/", "train valid test", ".cs .java"),
    "multi30k": ("multi30k_en_de/", "train val test_2016_flickr", ".en .de"),
    "tatoeba": ("tatoeba_en_es/", "en_es", ".tsv"),
}
# One file without splits.
OPTIONS = {"tatoeba": ["--num_test", "1000"]}
# Code is also scored on the tokens of the files.
TOKENIZED = ("java_cs", "cs_java")


def find_files(job: str, data_dir: Path | None, folder: Path) -> dict[str, list[Path]]:
    """Return the files of each split: one, or two for sources and targets. Generated pairs are written first."""
    if job in GENERATED:
        write_task(job, folder)
        return {split: [folder / job / f"{split}.tsv"] for split in SPLITS}
    if data_dir is None:
        raise ValueError(f"`data_dir` must name the folder of the corpora for the job {job}, got None.")
    prefix, stems, suffixes = JOBS[job]
    files = [[data_dir / f"{prefix}{stem}{suffix}" for suffix in suffixes.split()] for stem in stems.split()]
    return dict(zip(SPLITS, files, strict=False))


def run_verb(words: list[str], log: Path, core: int | None) -> tuple[dict[str, float], list[str]]:
    """Run a verb and return its minutes, by the clock and of the processor, and its warnings.

    Raises:
        subprocess.CalledProcessError: If the verb fails.
    """
    pinned = [] if core is None else ["taskset", "-c", str(core)]
    with tempfile.TemporaryDirectory(prefix="cache_") as cache, log.open("w", encoding="utf-8") as stream:
        environment = os.environ | ENVIRONMENT | {"HF_DATASETS_CACHE": cache}
        command = [*pinned, sys.executable, "-c", COMMAND, *words]
        start, usage = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, stdout=stream, stderr=stream, env=environment, check=True)
        seconds, used = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        used = used.ru_utime + used.ru_stime - usage.ru_utime - usage.ru_stime
        minutes = {"minutes": round(seconds / 60, 2), "processor_minutes": round(used / 60, 2)}
    # A progress bar may stand before a warning.
    return minutes, re.findall("WARNING (.*)", log.read_text(encoding="utf-8"))


def train(job: str, seed: int, folder: Path, files: dict[str, list[Path]], arguments: argparse.Namespace) -> dict:
    """Train a model, and return its scores with time, warnings and recipe."""
    shutil.rmtree(folder, ignore_errors=True)
    words = ["train"] if arguments.recipe is None else ["train", arguments.recipe]
    for split, paths in files.items():
        names = [f"--{split}_file"] if len(paths) == 1 else [f"--{split}_source_file", f"--{split}_target_file"]
        is_first = split == "train" and arguments.recipe is None
        for name, path in zip(names, paths, strict=True):
            words += [str(path)] if is_first else [name, str(path)]
    words += [*OPTIONS.get(job, []), "--seed", str(seed), "--output_dir", str(folder)]
    if arguments.time_budget is not None:
        words += ["--time_budget", arguments.time_budget]
    minutes, warnings = run_verb(words, folder.with_name(f"{folder.name}.log"), arguments.core)
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))
    fields = {name: value for name, value in recipe.items() if not name.endswith(("_file", "_dir"))}
    scores = read_scores(job, metrics, folder / "test_predictions.txt", files.get("test", []))
    result = minutes | {"updates": state["global_step"], "scores": scores, "warnings": warnings}
    systematic = files["train"][0].with_name("test_systematic.tsv")
    if systematic.is_file():
        result["systematic"] = evaluate(job, [folder], "systematic", [systematic], arguments.core)["scores"]
    for kind in sorted(systematic.with_name("systematic").glob("*.tsv")):
        score = evaluate(job, [folder], kind.stem, [kind], arguments.core)["scores"]["exact_match"]
        result.setdefault("kinds", {})[kind.stem] = score
    return result | {"data": metrics["data"], "fields": fields}


def evaluate(job: str, folders: list[Path], name: str, test: list[Path], core: int | None) -> dict:
    """Return scores of a model, or of an ensemble of models, on test pairs, with time and warnings."""
    paths = [folders[0].with_name(f"{folders[0].name}_{name}.{suffix}") for suffix in ("json", "txt", "log")]
    options = ["--file"] if len(test) == 1 else ["--source", "--target"]
    metrics = json.loads((folders[0] / "metrics.json").read_text(encoding="utf-8"))["scores"]
    words = ["evaluate", str(folders[0]), "--metrics", *metrics]
    words += ["--output", str(paths[0]), "--predictions", str(paths[1])]
    for option, path in zip(options, test, strict=True):
        words += [option, str(path)]
    if folders[1:]:
        words += ["--ensemble", *map(str, folders[1:])]
    minutes, warnings = run_verb(words, paths[2], core)
    scores = read_scores(job, json.loads(paths[0].read_text(encoding="utf-8")), paths[1], test)
    return minutes | {"scores": scores, "warnings": warnings}


def read_scores(job: str, metrics: dict, predictions: Path, test: list[Path]) -> dict[str, float]:
    """Return the scores of the test pairs, with the error rate of whole targets."""
    scores = {name: round(score["score"], 2) for name, score in metrics["scores"].items()}
    if "exact_match" in scores:
        scores["error_rate"] = round(100 - scores["exact_match"], 2)
    if job in TOKENIZED:
        texts, references = (path.read_text("utf-8").split("\n")[:-1] for path in (predictions, test[1]))
        bleu = BLEU(tokenize="none", force=True).corpus_score(texts, [references])
        scores["bleu_of_tokens"] = round(bleu.score, 2)
    return scores


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", nargs="+", choices=(*JOBS, *GENERATED), default=list(JOBS), help="[%(default)s]")
    parser.add_argument("--data_dir", type=Path, help="folder of the public corpora")
    parser.add_argument("--recipe", help="recipe in place of the choices, with the files of the job")
    parser.add_argument("--time_budget", help="time of a run, such as 15m")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="%(default)s")
    parser.add_argument("--ensemble", action="store_true", help="also score an ensemble of all seeds")
    parser.add_argument("--core", type=int, help="processor core to pin to")
    folder, output = Path(tempfile.gettempdir(), "metaphrase_tasks"), Path(__file__).parent / "results" / "tasks.json"
    parser.add_argument("--folder", type=Path, default=folder, help="folder for models and logs [%(default)s]")
    parser.add_argument("--output", type=Path, default=output, help="JSON file [%(default)s]")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    recipe = "zero_config" if arguments.recipe is None else Path(arguments.recipe).stem
    for job in arguments.jobs:
        files = find_files(job, arguments.data_dir, arguments.folder / "data")
        names = {seed: f"{job}_{recipe}_{arguments.time_budget}_{seed}" for seed in arguments.seeds}
        folders = {seed: arguments.folder / name for seed, name in names.items()}
        for seed in (*arguments.seeds, *([arguments.seeds] if arguments.ensemble else [])):
            key = {"task": job, "recipe": recipe, "time_budget": arguments.time_budget, "seed": seed}
            if any(key.items() <= entry.items() for entry in read_entries(arguments.output)):
                continue
            machine = describe_machine(1)
            if isinstance(seed, list):
                result = evaluate(job, list(folders.values()), "ensemble", files["test"], arguments.core)
            else:
                result = train(job, seed, folders[seed], files, arguments)
            # Another command may have written meanwhile.
            entries = [*read_entries(arguments.output), key | result | {"machine": machine}]
            lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries)
            arguments.output.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
            print(key, result["minutes"], result["scores"], result["warnings"], flush=True)


def read_entries(output: Path) -> list[dict]:
    """Return the entries of the output file."""
    return json.loads(output.read_text(encoding="utf-8")) if output.is_file() else []


if __name__ == "__main__":
    main()
