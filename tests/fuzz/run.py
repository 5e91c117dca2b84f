"""Run command lines with broken input, and print a table of their outcomes: `make test-fuzz`.

A failure is a traceback, a wrong result, a file that is lost, or much time or memory.
`ARGS="--seed 3 --parts recipes --match lora"` runs some cases.
"""

import argparse
import gc
import hashlib
import importlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]
# The processes of the cases find the libraries imported.
os.environ |= {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

import datasets  # noqa: E402
import torch  # noqa: E402
from cases import LARGE_BYTES, Case, run  # noqa: E402

from metaphrase.scripts.parsers.verbs import VERBS  # noqa: E402

PARTS = ("folders", "recipes", "data_files", "options")
CLEAN, ACCEPTED, FAILURES = "clean error", "accepted", ("traceback", "wrong", "slow", "large")
OUTPUTS = ("--output", "--output_dir", "--predictions")
ERROR = re.compile(r"^(metaphrase( \w+)?: .*error: |usage: )", re.MULTILINE)


def digests(words: list[str]) -> dict[Path, bytes]:
    """Return the hash of each file or folder that a command line names, without outputs."""
    names = [word for before, word in zip(("", *words), words, strict=False) if before not in OUTPUTS]
    paths = [Path(name) for name in names if name.startswith("/") and os.path.exists(name)]
    files = [file for path in paths for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file()]
    return {file: hashlib.blake2b(file.read_bytes()).digest() for file in files}


def outcome_of(case: Case, folder: Path) -> tuple[str, str]:
    """Run a case, and return the outcome and the reason of a failure."""
    before = digests(case.words)
    result = run(case.words, folder)
    after = digests(case.words)
    changed = [str(file) for file in before if after.get(file) != before[file]]
    if result.status is None:
        return "slow", result.messages[-300:]
    if result.added_bytes > LARGE_BYTES:
        return "large", f"{result.added_bytes / 2**20:.0f} MiB"
    if "Traceback (most recent call last)" in result.messages or result.status not in (0, 2):
        # An error of a library that names the field.
        if result.status == 1 and any(field in result.messages for field in case.fields):
            return CLEAN, ""
        return "traceback", f"status {result.status}: {result.messages[-700:]}"
    if changed:
        return "wrong", f"changed: {changed[0]}"
    if result.status == 2 and len(ERROR.findall(result.messages)) != 1:
        return "wrong", f"no error: {result.messages[-500:]}"
    fault = case.check(result) if case.check else ""
    return ("wrong", fault) if fault else (ACCEPTED if result.status == 0 else CLEAN, "")


def work(part: str, seed: int, number: int, folder: Path, match: str) -> None:
    """Run the cases of a part, and write a line for each to `folder / "results"`."""
    folder.mkdir(parents=True)
    datasets.config.HF_DATASETS_CACHE = folder / "cache"
    with open(folder / "results", "w", encoding="utf-8") as file:
        for index, case in enumerate(importlib.import_module(part).cases(seed, number, folder / "cases")):
            if match not in case.name:
                continue
            started = time.monotonic()
            outcome, reason = outcome_of(case, folder / str(index))
            line = {"part": part, "outcome": outcome, "name": case.name, "words": case.words, "reason": reason}
            file.write(json.dumps(line | {"seconds": time.monotonic() - started}) + "\n")
            file.flush()
            shutil.rmtree(folder / str(index))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=2000, help="number of cases [%(default)s]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--match", default="", help="run only cases whose name holds this text")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in VERBS:
        importlib.import_module(f"metaphrase.scripts.{name}")
    gc.collect()
    gc.freeze()
    started, root = time.monotonic(), Path(tempfile.mkdtemp(prefix="fuzz_"))
    # Each process makes cases of every part, so that all end at about the same time.
    children, num_jobs = [], len(os.sched_getaffinity(0))
    for job in range(num_jobs):
        if not (child := os.fork()):
            for part in arguments.parts:
                number = arguments.number // (num_jobs * len(arguments.parts))
                work(part, arguments.seed * 1000 + job, number, root / f"{part}_{job}", arguments.match)
            sys.stdout.flush()
            os._exit(0)
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    lines = [
        json.loads(line) for path in sorted(root.glob("*/results")) for line in path.read_text("utf-8").splitlines()
    ]
    failures = [line for line in lines if line["outcome"] in FAILURES]
    for line in failures:
        print(f"\n{line['outcome']}, {line['part']}: {line['name']}\n  {' '.join(line['words'])}\n  {line['reason']}")
    for (part, outcome), count in sorted(Counter((line["part"], line["outcome"]) for line in lines).items()):
        print(f"{part:12}{outcome:13}{count:6}")
    seconds, name = max(((line["seconds"], line["name"]) for line in lines), default=(0, ""))
    print(f"{len(lines)} cases in {time.monotonic() - started:.0f} seconds, the longest {seconds:.0f} seconds: {name}")
    if failures or any(statuses):
        print(f"{len(failures)} failures; the files are in {root}.")
        return 1
    shutil.rmtree(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
