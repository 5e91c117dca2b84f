"""Trains with and without a reward in the same time: commands of which training knows the actions, or only the drawings.

    python benchmarks/rewards.py --seeds 1 2 3 --core 0 --output benchmarks/results/rewards.json

Each run has a process of its own, on one core with one thread. Their updates are given, so that other programs on the core change
nothing, and their processor minutes are recorded. Scores are exact matches of long commands, whose actions no run has seen. Runs
in the output file are skipped.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import describe_machine
from tasks.drawings import write_drawings

HERE = Path(__file__).resolve().parent
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
REWARD = ("--reward", "tasks.drawings:same_drawing", "--cross_entropy_share", "0", "--max_tokens_per_batch", "512")
# The network and the batches that `metaphrase train` chooses for a few minutes.
STACK = {"layers": 2, "ffn_dim": 320, "attention_heads": 4}
CROSS_ENTROPY = ["--max_tokens_per_batch", "2048", "--preset", "metaphrase-tiny", "--model.hidden_size", "128"]
for name, size in STACK.items():
    CROSS_ENTROPY += [f"--model.encoder_{name}", str(size), f"--model.decoder_{name}", str(size)]


def processor_seconds() -> float:
    """Return the time that processes which have ended took."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def train(folder: Path, name: str, core: int, file: str, *options: str) -> dict:
    """Train below a folder, and return the score of the test pairs, updates, processor minutes and rewards of the log."""
    words = [file, "--validation_file", "validation.tsv", "--test_file", "test.tsv", "--output_dir", name, *options]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}"}
    command = ["taskset", "-c", str(core), sys.executable, "-m", "metaphrase", "train", *words]
    before = processor_seconds()
    with (folder / f"{name}.log").open("w", encoding="utf-8") as log:
        subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=log, check=True)
    scores = json.loads((folder / name / "metrics.json").read_text(encoding="utf-8"))["scores"]
    state = json.loads((folder / name / "trainer_state.json").read_text(encoding="utf-8"))
    rewards = [round(entry["reward"], 3) for entry in state["log_history"] if "reward" in entry]
    result = {"exact_match": round(scores["exact_match"]["score"], 2), "updates": state["global_step"]}
    result["processor_minutes"] = round((processor_seconds() - before) / 60, 2)
    return result | ({"rewards": rewards} if rewards else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    text = "updates of cross-entropy alone, and of cross-entropy before those of the reward"
    parser.add_argument("--updates", type=int, nargs=3, default=[6050, 4650, 340], help=text)
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    whole, first, last = arguments.updates
    done = json.loads(arguments.output.read_text(encoding="utf-8")) if arguments.output.exists() else {}
    result = {"machine": describe_machine(1), "seeds": {}} | done
    for seed in map(str, arguments.seeds):
        if seed in result["seeds"]:
            continue
        with tempfile.TemporaryDirectory(prefix="rewards_") as temporary:
            folder = Path(temporary)
            write_drawings(folder)

            def run(name: str, file: str, updates: int, *options: str, folder=folder, seed=seed) -> dict:
                return train(folder, name, arguments.core, file, "--seed", seed, "--max_steps", str(updates), *options)

            runs = {"cross_entropy": run("whole", "train.tsv", whole, *CROSS_ENTROPY)}
            runs["before"] = run("before", "train.tsv", first, *CROSS_ENTROPY)
            runs["reward"] = run("reward", "results.tsv", last, "--model_name_or_path", "before", *REWARD)
            result["seeds"][seed] = runs
        arguments.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(seed, json.dumps(runs), flush=True)


if __name__ == "__main__":
    main()
