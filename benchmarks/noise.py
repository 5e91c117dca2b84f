"""Plants noise in clean pairs, and measures `metaphrase filter`: noise found, clean pairs dropped, speed, memory, resuming.

    python benchmarks/noise.py quality --pairs en_es.tsv --other train.de --seeds 1 2 3
    python benchmarks/noise.py speed --pairs en_es.tsv --num_pairs 1000000 5000000 --kills 3

`quality` keeps the noisy and the filtered pairs in `--folder`, for trainings. `speed` makes pairs by joining two pairs and a
number. Times are processor times, so that other work on the machine does not count.
"""

import argparse
import hashlib
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from machine import describe_machine

KINDS = ("misaligned", "wrong_language", "copied", "truncated", "duplicate", "mojibake")
NOISE_SHARE = 0.3
SKIPPED_FOR_SPEED = ("alignment",)

Pair = tuple[str, str]


class Row(NamedTuple):
    kind: str
    source: str
    target: str


def plant(pairs: Sequence[Pair], other: Sequence[str], seed: int) -> list[Row]:
    """Return all pairs with `NOISE_SHARE` of noise among them, in random order.

    Each kind has the same share. A duplicate stands behind its original, since filters keep the first.

    Args:
        pairs: Clean pairs.
        other: Texts in a language that is neither of the two.
        seed: Seed of all choices.
    """
    generator = random.Random(seed)
    rows = [(generator.random(), Row("clean", *pair)) for pair in pairs]
    num_noise = round(len(pairs) * NOISE_SHARE / (1 - NOISE_SHARE))
    for number in range(num_noise):
        kind = KINDS[number % len(KINDS)]
        index, pair = _draw(pairs, kind, generator)
        position = generator.random()
        if kind == "duplicate":
            position = generator.uniform(rows[index][0], 1)
        rows.append((position, Row(kind, *_spoil(kind, pair, pairs, other, generator))))
    return [row for _, row in sorted(rows, key=lambda entry: entry[0])]


def _draw(pairs: Sequence[Pair], kind: str, generator: random.Random) -> tuple[int, Pair]:
    """Return a random pair that this kind of noise can spoil."""
    while True:
        index = generator.randrange(len(pairs))
        is_long = all(len(text.split()) >= 4 for text in pairs[index])
        has_accents = not pairs[index][1].isascii()
        if (is_long or kind != "truncated") and (has_accents or kind != "mojibake"):
            return index, pairs[index]


def _spoil(
    kind: str, pair: Pair, pairs: Sequence[Pair], other: Sequence[str], generator: random.Random
) -> tuple[str, str]:
    source, target = pair
    stranger = generator.choice(pairs)
    if kind == "misaligned":
        return source, stranger[1]
    if kind == "wrong_language":
        # A third language of the target's length, or a side that is not translated.
        words = generator.choice(other).split()[: max(2, len(target.split()))]
        foreign = " ".join(words).rstrip(".,") + target[-1]
        return generator.choice([(source, foreign), (source, stranger[0]), (stranger[1], target)])
    if kind == "copied":
        return generator.choice([(source, source), (target, target)])
    if kind == "truncated":
        side = generator.randrange(2)
        words = pair[side].split()
        cut = " ".join(words[: max(1, round(len(words) * generator.uniform(0.2, 0.7)))])
        return (cut, target) if side == 0 else (source, cut)
    if kind == "duplicate":
        near = (source.lower(), target.lower()), (source.upper(), target), (source.rstrip(".?!") + "!", target)
        return generator.choice([pair, *near])
    return source, target.encode("utf-8").decode("latin-1")


def read_pairs(path: Path) -> list[Pair]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [tuple(line.split("\t")) for line in lines]


def write_pairs(path: Path, pairs: Iterable[Sequence[str]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(f"{source}\t{target}\n" for source, target in pairs)


def run_filter(*words: str | Path) -> dict:
    """Run `metaphrase filter` and return seconds of the processor and the largest memory."""
    # The usage counts all children of a process. So each measurement has a process of its own.
    code = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True); "
    code += (
        "usage = resource.getrusage(resource.RUSAGE_CHILDREN); print(usage.ru_utime + usage.ru_stime, usage.ru_maxrss)"
    )
    command = [sys.executable, "-c", code, *filter_command(*words)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    seconds, kibibytes = map(float, output.split()[-2:])
    return {"seconds": round(seconds, 1), "mebibytes": round(kibibytes / 1024)}


def filter_command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "metaphrase.scripts", "filter", *map(str, words)]


def verdicts(rows: Sequence[Row], clean: Path, rejected: Path) -> Iterator[tuple[Row, str]]:
    """Yield each row with the rule that dropped it, or with an empty text. Both files keep the order of the rows."""
    kept = iter(read_pairs(clean))
    dropped = (line.split("\t") for line in rejected.read_text(encoding="utf-8").splitlines())
    next_kept, next_dropped = next(kept, None), next(dropped, None)
    for row in rows:
        # The filter keeps the first of equal pairs, or none.
        if next_kept == (row.source, row.target):
            yield row, ""
            next_kept = next(kept, None)
        else:
            assert next_dropped is not None and next_dropped[1:] == [row.source, row.target], row
            yield row, next_dropped[0]
            next_dropped = next(dropped, None)


def measure_quality(arguments: argparse.Namespace) -> dict:
    pairs = read_pairs(arguments.pairs)
    other = arguments.other.read_text(encoding="utf-8").splitlines()
    runs = []
    for seed in arguments.seeds:
        noisy, clean, rejected = (arguments.folder / f"{name}_{seed}.tsv" for name in ("noisy", "clean", "rejected"))
        rows = plant(pairs, other, seed)
        write_pairs(noisy, (row[1:] for row in rows))
        languages = ("--source_lang", arguments.source_lang, "--target_lang", arguments.target_lang)
        usage = run_filter(noisy, "--output", clean, "--rejected", rejected, "--overwrite", *languages)
        counts = Counter((row.kind, rule) for row, rule in verdicts(rows, clean, rejected))
        runs.append({"seed": seed, **summarize(counts), **usage, "pairs": len(rows)})
        print(json.dumps(runs[-1]), flush=True)
    return {"noise_share": NOISE_SHARE, "runs": runs}


def summarize(counts: Counter) -> dict:
    """Return percentages: noise found, clean pairs dropped, and both by kind and rule."""
    totals = Counter()
    for (kind, _), count in counts.items():
        totals[kind] += count

    def percent(kinds: Sequence[str], rules: Sequence[str] | None = None) -> float:
        dropped = sum(
            count for (kind, rule), count in counts.items() if kind in kinds and rule and rule in (rules or rule)
        )
        return round(100 * dropped / max(1, sum(totals[kind] for kind in kinds)), 2)

    rules = sorted({rule for _, rule in counts if rule})
    return {
        "noise_found": percent(KINDS),
        "clean_dropped": percent(["clean"]),
        "by_kind": {kind: percent([kind]) for kind in KINDS},
        "by_rule": {
            rule: {kind: share for kind in ("clean", *KINDS) if (share := percent([kind], [rule]))} for rule in rules
        },
    }


def generate(pairs: Sequence[Pair], num_pairs: int, seed: int) -> Iterator[Pair]:
    """Yield pairs that are hardly ever equal."""
    generator = random.Random(seed)
    for _ in range(num_pairs):
        first, second = generator.choice(pairs), generator.choice(pairs)
        number = generator.randrange(1000)
        yield f"{first[0]} {second[0]} ({number})", f"{first[1]} {second[1]} ({number})"


def measure_speed(arguments: argparse.Namespace) -> dict:
    pairs, runs = read_pairs(arguments.pairs), []
    output, report = arguments.folder / "clean.tsv", arguments.folder / "report.json"
    words: list[str | Path] = ["--output", output, "--report", report]
    if not arguments.all_rules:
        words += ["--skip_rules", *SKIPPED_FOR_SPEED]
    for num_pairs in arguments.num_pairs:
        path = arguments.folder / f"generated_{num_pairs}.tsv"
        write_pairs(path, generate(pairs, num_pairs, seed=1))
        usage = run_filter(path, *words, "--overwrite")
        usage |= {"num_pairs": num_pairs, "pairs_per_second": round(num_pairs / usage["seconds"])}
        if arguments.kills:
            whole = [digest(file) for file in (output, report)]
            kill_and_resume([path, *words], usage["seconds"], arguments.kills, output)
            usage |= {"kills": arguments.kills, "same_bytes": whole == [digest(file) for file in (output, report)]}
        runs.append(usage)
        print(json.dumps(usage), flush=True)
    return {"skipped_rules": [] if arguments.all_rules else SKIPPED_FOR_SPEED, "runs": runs}


def kill_and_resume(words: Sequence[str | Path], seconds: float, kills: int, output: Path) -> None:
    """Start a run again, kill it several times at random moments, and let it finish."""
    generator = random.Random(1)
    for number in range(kills):
        process = subprocess.Popen(filter_command(*words, "--overwrite" if number == 0 else "--resume"))
        # It has `seconds` of the processor, which may be shared.
        while process.poll() is None and _seconds_of(process) < seconds * generator.uniform(0.3, 0.7):
            time.sleep(0.5)
        assert process.poll() is None, "The run ended before it was killed."
        process.kill()
        process.wait()
    subprocess.run(filter_command(*words, "--resume"), check=True)


def _seconds_of(process: subprocess.Popen) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("quality", "speed"))
    parser.add_argument("--pairs", type=Path, required=True, help="clean pairs, source and target with a tab between")
    parser.add_argument("--other", type=Path, help="texts in a third language, for `quality`")
    parser.add_argument("--source_lang", default="en")
    parser.add_argument("--target_lang", default="es")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--num_pairs", type=int, nargs="+", default=[1_000_000, 5_000_000])
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--all_rules", action="store_true", help=f"also {', '.join(SKIPPED_FOR_SPEED)}, for `speed`")
    parser.add_argument("--folder", type=Path, default=Path("runs/noise"))
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    result = measure_quality(arguments) if arguments.part == "quality" else measure_speed(arguments)
    result = {"part": arguments.part, "pairs": arguments.pairs.name} | result | {"machine": describe_machine(1)}
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
