"""Turns of contestants of the training benchmark, each of which is a process of its own."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from contestants import CONTESTANTS

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
