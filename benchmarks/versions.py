"""Times two versions of this project in turns: greedy and beam search, and steps of training.

    python benchmarks/versions.py before=../before now=. --core 0 --output benchmarks/results/versions_cpu.json

Each version is a checkout with its own `.venv`. Both must run with the installed torch and transformers. All versions get the
same random weights and ids. Searches write 24 tokens, since random weights hardly ever end a sentence. A turn of
training is a few steps of `contestants.py` of that checkout.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

SETTINGS = {
    "greedy, batch 1": (1, 1),
    "greedy, batch 32": (1, 32),
    "beam 4, batch 1": (4, 1),
    "beam 4, batch 32": (4, 32),
}
TRAININGS = (
    ("transformer-tiny", "multi30k", 10),
    ("transformer-base", "multi30k", 2),
    ("transformer-tiny", "heavy_tailed", 10),
)


def generate_in_turns(preset: str) -> None:
    """Run the worker process: generate once for each line with the name of a setting."""
    import torch

    import metaphrase.modeling as modeling

    torch.manual_seed(0)
    torch.set_num_threads(1)
    vocab_size = {"transformer-tiny": 10000, "transformer-base": 32000}[preset]
    model = modeling.MetaphraseForConditionalGeneration(
        modeling.MetaphraseConfig.from_preset(preset, vocab_size=vocab_size)
    )
    model.eval()
    sources = torch.randint(4, vocab_size, (32, 14))
    for line in sys.stdin:
        num_beams, batch_size = SETTINGS[line.strip()]
        start = time.process_time()
        with torch.inference_mode():
            for first in range(0, 8 if batch_size == 1 else 32, batch_size):
                model.generate(
                    sources[first : first + batch_size],
                    num_beams=num_beams,
                    do_sample=False,
                    max_new_tokens=24,
                    min_new_tokens=24,
                )
        print(json.dumps({"seconds": time.process_time() - start, "file": modeling.__file__}), flush=True)


class Worker:
    """Process of a version that answers each line with a line of JSON."""

    def __init__(self, command: list[str], core: int | None):
        pinned = [] if core is None else ["taskset", "-c", str(core)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        self.process = subprocess.Popen([*pinned, *command], env=environment, **pipes)

    def answer(self) -> dict:
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"The process ended with status {self.process.wait()}.")

    def ask(self, line: str) -> dict:
        print(line, file=self.process.stdin, flush=True)
        return self.answer()


def in_turns(workers: dict[str, Worker], line: str, rounds: int, unit: str) -> dict:
    """Return median seconds (per token, for training) of each version, and the median ratio of the last to the first."""
    seconds = {name: [] for name in workers}
    names = list(workers)
    for number in range(-1, rounds):
        for name in names if number % 2 else names[::-1]:
            turn = workers[name].ask(line)
            if number >= 0:  # the first round warms up
                seconds[name].append(turn["seconds"] / turn.get(unit, 1))
    first, *_, last = names
    ratios = [new / old for old, new in zip(seconds[first], seconds[last], strict=True)]
    medians = {name: float(f"{statistics.median(values):.4g}") for name, values in seconds.items()}
    return {
        **medians,
        "ratio": round(statistics.median(ratios), 3),
        "least": round(min(ratios), 3),
        "most": round(max(ratios), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", metavar="NAME=FOLDER", help="checkouts, the older one first")
    parser.add_argument("--core", type=int, help="core that all processes are pinned to")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=("generation", "training"))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", metavar="PRESET", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return generate_in_turns(arguments.worker)
    from machine import describe_machine

    folders = {
        name: Path(folder).resolve() for name, _, folder in (version.partition("=") for version in arguments.versions)
    }
    pythons = {name: str(folder / ".venv/bin/python") for name, folder in folders.items()}
    report = {"machine": describe_machine(1), "rounds": arguments.rounds, "results": {}}

    def measure(label: str, commands: dict[str, list[str]], lines: list[str], unit: str = "") -> None:
        workers = {name: Worker(command, arguments.core) for name, command in commands.items()}
        if unit:
            for worker in workers.values():
                worker.answer()  # the base of its memory
        for line in lines:
            report["results"][f"{label}, {line}" if len(lines) > 1 else label] = in_turns(
                workers, line, arguments.rounds, unit
            )
            print(json.dumps(dict([list(report["results"].items())[-1]])), file=sys.stderr, flush=True)
        for worker in workers.values():
            worker.process.kill()

    if arguments.only != "training":
        for preset in ("transformer-tiny", "transformer-base"):
            command = [str(Path(__file__).resolve()), "now=.", "--worker", preset]
            measure(preset, {name: [python, *command] for name, python in pythons.items()}, list(SETTINGS))
    if arguments.only != "generation":
        for preset, mix, steps in TRAININGS:
            options = ["metaphrase", preset, mix, "--steps", str(steps), "--threads", "1"]
            commands = {
                name: [python, str(folders[name] / "benchmarks/contestants.py"), *options]
                for name, python in pythons.items()
            }
            measure(f"training of {preset}, {mix}", commands, ["go"], "tokens")
    text = json.dumps(report, indent=2) + "\n"
    arguments.output.write_text(text) if arguments.output else print(text)


if __name__ == "__main__":
    main()
