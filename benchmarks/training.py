"""Times training against transformers' BART and T5 of the same dimensions: real tokens per second and peak memory.

    python benchmarks/training.py --core 0 --output benchmarks/results/training_cpu.json

`results/README.md` holds the commands behind all result files.

Each contestant is a whole `Trainer.train()` in its own process (see `turns.py`), on random tokens in the lengths of
a mix, with label smoothing 0.1 and equally many updates per epoch. Contestants take turns of a few steps, so that other
load on the machine affects all of them. The figure counts all turns together, without padding. A peer with
`group_by_length` needs 50 steps, the period of its sorting; batches in random order need fewer (`--steps_unsorted`).

If memory is too small for all contestants, `--at_once` makes groups, each with ours in it for comparison. Without few
kernels, memory grows for about 30 steps. A new report replaces the report of the same dimensions and lengths.
"""

import argparse
import json
from pathlib import Path

from contestants import CONTESTANTS, VOCAB_SIZES
from lengths import MIXES
from machine import describe_machine
from turns import OURS, measure_group

DOCUMENTED = "bart, as documented"
TUNED = ("bart, tuned", "bart, tuned, bf16", "bart, tuned, bf16, few kernels")


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
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=["multi30k", "heavy_tailed"])
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
