"""Measures how time and memory of each phase before training grow with the number of pairs, on made pairs.

    python benchmarks/scale.py --output benchmarks/results/scale.json

Each phase of each size is a process of its own on one thread, which finds what earlier phases left in a folder. The figures are
processor seconds of the phase, and the peak memory of its process. The exponent of a phase is the slope of a line through the
logarithms of pairs and seconds (least squares), over the sizes at which the phase takes more than 0.2 seconds. The words of
a source follow Zipf's law, and a target has its words in reverse spelling.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from machine import describe_machine

SIZES = (100_000, 200_000, 400_000, 800_000, 1_600_000)
NUM_WORDS, WORDS_OF_TEXT = 50_000, (10, 31)
SYLLABLES = ("ba", "ke", "li", "mo", "nu", "ra", "si", "to", "ve", "zu", "chi", "dra", "fle", "gri", "pla", "stu")
# In the order in which they use what the earlier ones left.
PHASES = ("reading", "splitting", "alerts", "profile", "tokenizer", "encoding", "batches", "filter", "scoring")
LEAST_SECONDS = 0.2
HELD_OUT, VOCAB_SIZE, TOKENS_PER_BATCH = 1000, 8000, 8192


def write_pairs(path: Path, pairs: int) -> None:
    """Write a file of made pairs, the same for the same number."""
    generator = np.random.default_rng(0)
    words = np.array([f"{SYLLABLES[n % 16]}{SYLLABLES[n // 16 % 16]}{n:x}" for n in range(NUM_WORDS)])
    turned = np.array([word[::-1] for word in words])
    shares = 1 / np.arange(1, NUM_WORDS + 1)
    bounds = np.cumsum(shares / shares.sum())
    with path.open("w", encoding="utf-8") as file:
        for length in generator.integers(*WORDS_OF_TEXT, pairs):
            row = np.minimum(np.searchsorted(bounds, generator.random(length)), NUM_WORDS - 1)
            file.write(f"{' '.join(words[row])}\t{' '.join(turned[row])}\n")


def run_phase(phase: str, file: Path, folder: Path) -> dict[str, float]:
    """Return the processor seconds of a phase, and the peak memory of this process in MiB."""
    from metaphrase.choices.alerts import data_alerts
    from metaphrase.choices.rules import CorpusProfile
    from metaphrase.data.pairs import LENGTH_COLUMNS, PairSource
    from metaphrase.data.token_budget import TokenBudgetSampler
    from metaphrase.evaluation.metrics import compute_metrics
    from metaphrase.filtering.rules import FilterSettings
    from metaphrase.filtering.run import filter_pairs
    from metaphrase.tokenization import TokenizerPair
    from metaphrase.training.corpora import open_corpus
    from metaphrase.training.experiment import make_arguments
    from metaphrase.training.model_setup import make_tokenizers
    from metaphrase.training.recipe.recipe import Recipe

    fields = {"train_file": str(file), "num_validation": HELD_OUT, "num_test": HELD_OUT, "vocab_size": VOCAB_SIZE}
    fields |= {"max_source_length": 256, "max_target_length": 256, "output_dir": str(folder / "run")}
    recipe = Recipe(**fields, disable_tqdm=True)
    corpus = open_corpus(recipe, make_arguments(recipe), (None, None))
    number, tokenizers, saved, lengths = PHASES.index(phase), None, folder / "tokenizers", None
    texts: list[str] = []
    if 0 < number < PHASES.index("filter"):
        corpus.read()
    if 1 < number < PHASES.index("filter"):
        corpus.load()
    if phase in ("encoding", "batches"):
        tokenizers = TokenizerPair.from_pretrained(saved)
    if phase == "batches":
        train = corpus.encode(tokenizers)["train"]
        lengths = np.stack([np.asarray(train[name][:]) for name in LENGTH_COLUMNS], axis=1)
    if phase == "scoring":
        texts = [line.partition("\t")[2] for line in file.read_text(encoding="utf-8").splitlines()]
    steps = {
        "reading": corpus.read,
        "splitting": corpus.load,
        "alerts": lambda: list(data_alerts(corpus)),
        "profile": lambda: CorpusProfile.of(corpus.splits["train"]),
        "tokenizer": lambda: make_tokenizers(recipe, corpus).save_pretrained(saved),
        "encoding": lambda: corpus.encode(tokenizers),
        "batches": lambda: list(TokenBudgetSampler(lengths, TOKENS_PER_BATCH, 0)),
        "filter": lambda: filter_pairs(PairSource(file=file), [folder / "clean.tsv"], FilterSettings()),
        "scoring": lambda: compute_metrics(texts, texts, ("bleu", "exact_match")),
    }
    start = time.process_time()
    steps[phase]()
    seconds = time.process_time() - start
    return {"seconds": round(seconds, 2), "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}


def measure(pairs: int, work_dir: Path | None) -> dict[str, dict[str, float]]:
    """Return the figures of each phase for a number of made pairs."""
    results = {}
    with tempfile.TemporaryDirectory(dir=work_dir) as name:
        folder = Path(name)
        write_pairs(folder / "pairs.tsv", pairs)
        cache = {"HF_DATASETS_CACHE": str(folder / "cache"), "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
        threads = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        for phase in PHASES:
            command = [sys.executable, __file__, "--phase", phase, "--folder", name]
            done = subprocess.run(
                command, env=os.environ | cache | threads, stdout=subprocess.PIPE, text=True, check=True
            )
            results[phase] = json.loads(done.stdout.splitlines()[-1])
            print(f"{pairs:>9,} {phase:<10} {results[phase]['seconds']:8.2f} s {results[phase]['peak_mib']:8,} MiB")
    return results


def exponent(sizes: list[int], seconds: list[float]) -> float | None:
    """Return the power of the size with which the seconds grow; None if fewer than two sizes take long enough."""
    points = [(size, value) for size, value in zip(sizes, seconds, strict=True) if value > LEAST_SECONDS]
    return round(float(np.polyfit(*np.log(points).T, 1)[0]), 2) if len(points) > 1 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="numbers of pairs [%(default)s]")
    parser.add_argument("--work_dir", type=Path, help="folder for files of up to 3 GB [that of the system]")
    parser.add_argument("--output", type=Path, help="JSON file of the results")
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.phase:
        print(json.dumps(run_phase(arguments.phase, arguments.folder / "pairs.tsv", arguments.folder)))
        return
    results = {size: measure(size, arguments.work_dir) for size in arguments.sizes}
    report = {"machine": describe_machine(1), "sizes": results, "exponents": {}}
    for phase in PHASES:
        seconds = [figures[phase]["seconds"] for figures in results.values()]
        report["exponents"][phase] = exponent(list(results), seconds)
    print(json.dumps(report["exponents"], indent=2))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
