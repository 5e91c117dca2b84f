"""Times training against transformers' BART and T5 of the same dimensions: real tokens per second and peak memory.

    python benchmarks/training.py --core 0 --output benchmarks/results/training_cpu.json

`results/README.md` holds the commands behind all result files.

Each contestant is a whole `Trainer.train()` in its own process (see `contestants.py`), on random tokens in the lengths of
a mix, with label smoothing 0.1 and equally many updates per epoch. Contestants take turns of a few steps, so that other
load on the machine affects all of them. The figure counts all turns together, without padding. A peer with
`group_by_length` needs 50 steps, the period of its sorting; batches in random order need fewer (`--steps_unsorted`).

If memory is too small for all contestants, `--at_once` makes groups, each with ours in it for comparison. Without few
kernels, memory grows for about 30 steps. A new report replaces the report of the same dimensions and lengths.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from contestants import CONTESTANTS, VOCAB_SIZES
from lengths import MIXES
from machine import describe_machine

DOCUMENTED = "bart, as documented"
TUNED = ("bart, tuned", "bart, tuned, bf16", "bart, tuned, bf16, few kernels")
OURS = "metaphrase"
PEERS = ("bart", "t5")


class Process:
    """Process of a contestant that waits for its turn."""

    def __init__(self, name: str, preset: str, mix: str, steps: int, threads: int, core: int | None):
        command = [sys.executable, str(Path(__file__).with_name("contestants.py")), name, preset, mix]
        command += ["--steps", str(steps), "--threads", str(threads)]
        if core is not None:
            command = ["taskset", "-c", str(core), *command]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self.name, self.turns = name, []
        self.base_bytes = self._answer()["base_bytes"]
        self._take_turn()  # the first round warms up

    def _answer(self) -> dict:
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"The process of {self.name!r} ended with status {self.process.wait()}.")

    def _take_turn(self) -> dict:
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return self._answer()

    def take_turn(self) -> None:
        self.turns.append(self._take_turn())

    def finish(self) -> dict:
        self.process.stdin.write("stop\n")
        self.process.stdin.flush()
        peak = self._answer()["peak_bytes"]
        self.process.wait()
        rates = sorted(turn["tokens"] / turn["seconds"] for turn in self.turns)
        tokens, seconds = (sum(turn[name] for turn in self.turns) for name in ("tokens", "seconds"))
        return {
            "real_tokens_per_second": round(tokens / seconds, 1),
            "slowest_round": round(rates[0], 1),
            "fastest_round": round(rates[-1], 1),
            "peak_mib": round(peak / 2**20),
            "peak_mib_over_start": round((peak - self.base_bytes) / 2**20),
        }


def measure(preset: str, mix: str, names: list[str], arguments: argparse.Namespace) -> dict:
    results: dict[str, dict] = {}
    for group in make_groups(names, arguments.at_once):
        group_results = measure_group(preset, mix, group, arguments)
        for name, result in group_results.items():
            if OURS in group_results:
                share = result["real_tokens_per_second"] / group_results[OURS]["real_tokens_per_second"]
                result["speed_of_metaphrase"] = round(share, 3)
            results.setdefault(name, result)
    report = {
        "preset": preset,
        "vocab_size": VOCAB_SIZES[preset],
        "lengths": mix,
        "pairs_per_batch": MIXES[mix].pairs_per_batch,
        "rounds": arguments.rounds,
        "steps_per_round": arguments.steps,
        "steps_unsorted": arguments.steps_unsorted or arguments.steps,
        "machine": describe_machine(arguments.threads),
        "results": results,
    }
    if OURS in results and DOCUMENTED in results:
        report["ratios"] = ratios(results)
    return report


def make_groups(names: list[str], at_once: int | None) -> list[list[str]]:
    """Split contestants into groups of at most `at_once`, with ours in each group if it takes part."""
    if at_once is None or len(names) <= at_once:
        return [names]
    ours = [OURS] if OURS in names else []
    peers = [name for name in names if name not in ours]
    step = max(1, at_once - len(ours))
    return [peers[start : start + step] + ours for start in range(0, len(peers), step)]


def measure_group(preset: str, mix: str, names: list[str], arguments: argparse.Namespace) -> dict[str, dict]:
    unsorted = {name for name in names if name.startswith(PEERS) and not CONTESTANTS[name].groups_by_length}
    steps = dict.fromkeys(unsorted, arguments.steps_unsorted or arguments.steps)
    options = (arguments.threads, arguments.core)
    processes = [Process(name, preset, mix, steps.get(name, arguments.steps), *options) for name in names]
    for number in range(arguments.rounds):
        for process in processes:
            process.take_turn()
        print(f"{preset}, {mix}: round {number + 1} of {arguments.rounds}", file=sys.stderr, flush=True)
    return {process.name: process.finish() for process in processes}


def ratios(results: dict[str, dict]) -> dict[str, float]:
    """Return our speed and memory relative to the documented peer, and our speed relative to the best tuned peer."""
    ours, documented = results[OURS], results[DOCUMENTED]
    values = {
        "speed_of_documented": 1 / documented["speed_of_metaphrase"],
        "peak_memory_of_documented": ours["peak_mib"] / documented["peak_mib"],
        "peak_memory_over_start_of_documented": ours["peak_mib_over_start"] / documented["peak_mib_over_start"],
    }
    tuned = [results[name]["speed_of_metaphrase"] for name in TUNED if name in results]
    if tuned:
        values["speed_of_tuned"] = 1 / max(tuned)
    return {name: round(value, 3) for name, value in values.items()}


def save(report: dict, output: Path) -> None:
    """Add a report to a file, in place of the report of the same dimensions and lengths."""
    kind = (report["preset"], report["lengths"])
    reports = json.loads(output.read_text(encoding="utf-8")) if output.is_file() else []
    reports = [old for old in reports if (old["preset"], old["lengths"]) != kind] + [report]
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(reports, indent=2) + "\n", encoding="utf-8")


def show(report: dict) -> None:
    print(f"\n{report['preset']}, vocabulary {report['vocab_size']}, {report['lengths']} lengths")
    for name, result in report["results"].items():
        print(f"  {name:36} {result['real_tokens_per_second']:10,.0f} tokens/s {result['peak_mib']:8,} MiB")
    for name, value in report.get("ratios", {}).items():
        print(f"  {name:36} {value:10.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--presets", nargs="+", choices=VOCAB_SIZES, default=["transformer-tiny", "transformer-base"])
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=list(MIXES))
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--rounds", type=int, default=7, help="turns of each [%(default)s]")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps of a turn [%(default)s]")
    parser.add_argument("--steps_unsorted", type=int, help="steps of a peer with batches in random order [--steps]")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch [%(default)s]")
    parser.add_argument("--at_once", type=int, help="most contestants in memory at once [all]")
    parser.add_argument("--core", type=int, help="processor core for all contestants")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    for preset in arguments.presets:
        for mix in arguments.mixes:
            report = measure(preset, mix, arguments.contestants, arguments)
            show(report)
            if arguments.output is not None:
                save(report, arguments.output)


if __name__ == "__main__":
    main()
