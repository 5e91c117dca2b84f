"""Times scores of one decoder step, as of MetricX and monoT5: ours beside loops of transformers over the same random weights.

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/scoring.py --output benchmarks/results/scoring.json

The sentences are ids of random tokens with log-normal lengths. All contestants return the logit of one token in float32, and
take turns, so that other load on the machine affects all. `sorted` is the loop of an experienced user: batches of similar
length with the token budget of ours, padded to their longest sentence. `unsorted` takes eight sentences at a time, as they
come. The scores must be equal.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import transformers
from machine import describe_machine
from transformers import AutoConfig, AutoModelForSeq2SeqLM, PreTrainedModel, set_seed

from metaphrase.analysis.reading import first_logits
from metaphrase.conversion import convert
from metaphrase.inference import Generator

# mT5-small, with a smaller vocabulary.
SIZES = {"vocab_size": 32_000, "d_model": 512, "d_kv": 64, "num_heads": 6, "d_ff": 1024, "num_layers": 8}
MEDIAN, SPREAD, RANGE = 12, 0.6, (3, 160)
TOKEN = 10
# Sizes that `metaphrase classify` and judges have by default.
BATCH_SIZE, MAX_TOKENS = 64, 8192
TOLERANCE = 1e-4


def make_sentences(count: int) -> list[list[int]]:
    generator = np.random.default_rng(0)
    lengths = np.exp(np.log(MEDIAN) + SPREAD * generator.standard_normal(count)).round().clip(*RANGE).astype(int)
    return [generator.integers(100, SIZES["vocab_size"], length).tolist() for length in lengths]


def make_models() -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return our converted model, and that of transformers with random weights."""
    set_seed(0)
    config = AutoConfig.for_model("mt5", **SIZES, decoder_start_token_id=0, pad_token_id=0)
    theirs = AutoModelForSeq2SeqLM.from_config(config).eval()
    # The scores spread about as much as MetricX's errors, from 0 to 25.
    theirs.lm_head.weight.data *= 0.25
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(Path(folder) / "theirs")
        convert(Path(folder) / "theirs", Path(folder) / "ours")
        ours = AutoModelForSeq2SeqLM.from_pretrained(Path(folder) / "ours").eval()
    return ours, theirs


def sorted_batches(sentences: list[list[int]]) -> Iterator[list[int]]:
    """Yield the indices of sentences of similar length, longest first."""
    batch: list[int] = []
    for index in sorted(range(len(sentences)), key=lambda index: -len(sentences[index])):
        if batch and (len(batch) == BATCH_SIZE or len(sentences[batch[0]]) * (len(batch) + 1) > MAX_TOKENS):
            yield batch
            batch = []
        batch.append(index)
    yield batch


def score_by_transformers(
    model: PreTrainedModel, sentences: list[list[int]], batches: Iterator[list[int]]
) -> np.ndarray:
    scores = np.zeros(len(sentences), np.float32)
    with torch.inference_mode():
        for batch in batches:
            rows = [torch.tensor(sentences[index]) for index in batch]
            ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
            start = torch.zeros(len(batch), 1, dtype=torch.long)
            output = model(input_ids=ids, attention_mask=mask, decoder_input_ids=start, use_cache=False)
            scores[batch] = output.logits[:, 0, TOKEN].numpy()
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sentences", type=int, default=2000, help="number of sentences [%(default)s]")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each [%(default)s]")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # Random weights give probabilities below 1e-38, and such numbers are a hundred times as slow on some processors.
    torch.set_flush_denormal(True)
    transformers.logging.set_verbosity_error()
    sentences, (ours, theirs) = make_sentences(arguments.sentences), make_models()
    generator = Generator(ours, None, batch_size=BATCH_SIZE, max_tokens_per_batch=MAX_TOKENS)
    indices = list(range(len(sentences)))
    contestants: dict[str, Callable[[list[list[int]]], np.ndarray]] = {
        "metaphrase": lambda texts: first_logits(generator, texts, [TOKEN])[:, 0],
        "transformers, sorted": lambda texts: score_by_transformers(theirs, texts, sorted_batches(texts)),
        "transformers, unsorted": lambda texts: score_by_transformers(
            theirs, texts, (indices[start : min(start + 8, len(texts))] for start in range(0, len(texts), 8))
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    difference = 0.0
    for run in contestants.values():
        run(sentences[:64])
    for number in range(arguments.rounds):
        results = {}
        for name in list(contestants)[:: -1 if number % 2 else 1]:
            started = time.process_time()
            results[name] = contestants[name](sentences)
            seconds[name].append(time.process_time() - started)
            print(f"{name:24} {seconds[name][-1]:8.2f} seconds", flush=True)
        first = results.pop("metaphrase")
        difference = max(difference, *(float(np.abs(first - other).max()) for other in results.values()))
        assert difference <= TOLERANCE and np.ptp(first) > 100 * TOLERANCE, difference
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        report = {
            "machine": describe_machine(1),
            "sizes": SIZES | {"sentences": len(sentences), "tokens": sum(map(len, sentences))},
            "batches": {"batch_size": BATCH_SIZE, "max_tokens_per_batch": MAX_TOKENS},
            "processor_seconds": {name: [round(value, 2) for value in values] for name, values in seconds.items()},
            "times_as_fast": {name: round(median / medians["metaphrase"], 2) for name, median in medians.items()},
            "largest_difference": difference,
        }
        print(report["times_as_fast"], difference, flush=True)
        if arguments.output is not None:
            arguments.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
