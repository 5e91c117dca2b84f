"""Times each step from pairs to texts on one core, and computes from the times what a billion pairs take.

    TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1 taskset -c 1 python benchmarks/throughput.py \
        --output benchmarks/results/throughput.json
    python benchmarks/throughput.py --tables benchmarks/results/throughput.json --write    # into docs/scale.md

Pairs are made-up words in the frequencies of Zipf's law, with one translation for each word. Times are processor times, so that
other work on the machine does not count. Hours of GPUs are computed from a data sheet, not measured.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import transformers
from engines import measure, save_random
from machine import describe_machine
from memory import replace_table, table
from noise import run_filter, write_pairs
from transformers import Seq2SeqTrainingArguments, TrainerCallback, set_seed

from metaphrase.conversion.ctranslate2 import find_obstacles
from metaphrase.data.collators import PairCollator
from metaphrase.data.encoding import encode_pairs
from metaphrase.data.pairs import LENGTH_COLUMNS, PairSource, load_pairs
from metaphrase.data.token_budget import PairStream, TokenBudgetSampler
from metaphrase.inference import Generator
from metaphrase.modeling import MetaphraseConfig, MetaphraseForConditionalGeneration
from metaphrase.ops.cpu_setup import prepare_cpu
from metaphrase.tokenization import TokenizerPair, train_tokenizer
from metaphrase.training.trainer import MetaphraseTrainer

STACKS = (("source", "encoder"), ("target", "decoder"))
PAGE = Path(__file__).parent.parent / "docs" / "scale.md"
PRESETS = ("metaphrase-tiny", "transformer-base")
WORDS, VOCAB_SIZE = 50_000, 32_000
MAX_TOKENS_PER_BATCH, WARM_STEPS, TIMED_STEPS = 4096, 2, 6
BEAMS, BATCH_SIZE, SENTENCES = (1, 4), 32, 96
# Pairs whose batches are planned. Smaller corpora would fit into memory that is free already.
PLANNED_PAIRS = 1_000_000

# The assumptions of the tables. The data sheet states twice this peak, with sparsity.
PAIRS, MACHINES, CORES, GPUS = 10**9, (1, 8, 64), 64, 8
GPU, PEAK_FLOPS, UTILIZATION = "H100 SXM", 989.5e12, 0.4


def make_pairs(count: int, seed: int = 0) -> Iterator[tuple[str, str]]:
    """Yield pairs of about 20 words. Neighbours in a target sometimes change places."""
    generator = np.random.default_rng(seed)
    consonants, vowels = list("bdfgklmnprstvz"), list("aeiou")

    def make_word() -> str:
        size = generator.integers(1, 5)
        return "".join(
            map("".join, zip(generator.choice(consonants, size), generator.choice(vowels, size), strict=True))
        )

    dictionaries = [[make_word() for _ in range(WORDS)] for _ in range(2)]
    frequencies = np.cumsum(1 / np.arange(1, WORDS + 1))
    for _ in range(count):
        length = max(4, round(generator.normal(20, 6)))
        source = np.searchsorted(frequencies, generator.random(length) * frequencies[-1]).tolist()
        target = source.copy()
        for place in np.flatnonzero(generator.random(length - 1) < 0.2).tolist():
            target[place : place + 2] = target[place + 1], target[place]
        texts = (
            " ".join(words[index] for index in side) for words, side in zip(dictionaries, (source, target), strict=True)
        )
        yield tuple(f"{text.capitalize()}." for text in texts)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = call()
    return time.process_time() - start, result


def measure_pairs(folder: Path, count: int) -> tuple[dict, datasets.Dataset]:
    """Return pairs per second and bytes per pair of the steps before training, and the encoded pairs."""
    files = {size: folder / f"{size}.tsv" for size in (count // 2, count)}
    for size, path in files.items():
        write_pairs(path, make_pairs(size))
    small, large = files.values()
    # The difference leaves out the start of the command, and the rule `alignment`'s learning from 100,000 pairs.
    seconds = [run_filter(path, "--output", folder / "clean.tsv", "--overwrite")["seconds"] for path in (small, large)]
    rates = {"filter": (count - count // 2) / (seconds[1] - seconds[0])}
    with (folder / "clean.tsv").open(encoding="utf-8") as file:
        kept = sum(1 for _ in file) / count
    elapsed, _ = timed(lambda: sum(1 for _ in PairSource(file=large).records()))
    rates["scan"] = count / elapsed
    elapsed, pairs = timed(lambda: load_pairs(file=large))
    rates["read"] = count / elapsed
    sample = pairs.select(range(min(count, 50_000)))
    tokenizer = train_tokenizer(
        (text for side in ("source", "target") for text in sample[side][:]), vocab_size=VOCAB_SIZE, show_progress=False
    )
    tokenizers = TokenizerPair(tokenizer, tokenizer)
    rules = {"max_source_length": 512, "max_target_length": 512}
    elapsed, (encoded, report) = timed(lambda: encode_pairs(pairs, tokenizers, **rules))
    rates["tokenize"] = count / elapsed
    stream = PairStream(PairSource(file=large), tokenizers, **rules)
    elapsed, _ = timed(lambda: sum(len(chunk) for _, chunk in stream.chunks(0)))
    rates["stream"] = count / elapsed
    lengths = np.stack([np.asarray(encoded[side][:]) for side in LENGTH_COLUMNS], axis=1)
    many = np.tile(lengths, (-(-PLANNED_PAIRS // len(lengths)), 1))[:PLANNED_PAIRS]
    before = reset_peak()
    elapsed, sampler = timed(lambda: TokenBudgetSampler(many, 8 * MAX_TOKENS_PER_BATCH, seed=0))
    rates["plan"] = PLANNED_PAIRS / elapsed
    sizes = {"tsv": large.stat().st_size / count}
    sizes |= {"texts": cache_bytes(pairs) / count, "tokens": cache_bytes(encoded) / count}
    sizes["plan"] = (peak_bytes() - before) / PLANNED_PAIRS
    del sampler
    tokens = {"source": report.source_lengths["mean"], "target": report.target_lengths["mean"]}
    return {
        "pairs": count,
        "kept_by_filter": round(kept, 4),
        "tokens_per_pair": {side: round(mean, 2) for side, mean in tokens.items()},
        "pairs_per_second": {step: round(rate) for step, rate in rates.items()},
        "bytes_per_pair": {kind: round(size, 1) for kind, size in sizes.items()},
    }, encoded


def cache_bytes(dataset: datasets.Dataset) -> int:
    return sum(Path(file["filename"]).stat().st_size for file in dataset.cache_files)


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) * 1024


def reset_peak() -> int:
    """Forget the peak of this process' memory, and return its memory now in bytes. Works on Linux alone."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return peak_bytes()


class Timer(TrainerCallback):
    """Processor time and tokens of the steps after the first ones."""

    def __init__(self) -> None:
        self.step = self.tokens = 0
        self.start = self.seconds = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        self.step += 1
        if self.step == WARM_STEPS:
            self.tokens, self.start = 0, time.process_time()
        self.seconds = time.process_time() - self.start


class CountingTrainer(MetaphraseTrainer):
    """Trainer that adds up the tokens of its batches, without padding."""

    def training_step(self, model: Any, inputs: dict, *options: Any) -> torch.Tensor:
        timer = next(each for each in self.callback_handler.callbacks if isinstance(each, Timer))
        timer.tokens += int((inputs["input_ids"] != model.config.pad_token_id).sum() + (inputs["labels"] != -100).sum())
        return super().training_step(model, inputs, *options)


def measure_training(preset: str, encoded: datasets.Dataset, folder: Path) -> dict:
    """Return tokens of sources and targets per second, in bfloat16, and the parameters of the stacks."""
    set_seed(0)
    model = MetaphraseForConditionalGeneration(MetaphraseConfig.from_preset(preset, vocab_size=VOCAB_SIZE))
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(folder),
        max_steps=WARM_STEPS + TIMED_STEPS,
        label_smoothing_factor=0.1,
        bf16=True,
        use_cpu=True,
        remove_unused_columns=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    timer = Timer()
    CountingTrainer(
        model=model,
        args=arguments,
        callbacks=[timer],
        data_collator=PairCollator(model.config.pad_token_id),
        train_dataset=encoded.select(range(min(len(encoded), 20_000))),
        max_tokens_per_batch=MAX_TOKENS_PER_BATCH,
    ).train()
    embeddings = {id(embedding.weight) for embedding in model.modules() if isinstance(embedding, torch.nn.Embedding)}
    counts = {
        name: sum(weight.numel() for weight in getattr(model.model, name).parameters() if id(weight) not in embeddings)
        for _, name in STACKS
    }
    return {"tokens_per_second": round(timer.tokens / timer.seconds), "parameters_without_embeddings": counts}


def measure_decoding(preset: str, tokens: dict[str, float], folder: Path) -> dict:
    """Return sentences per second in int8, by engine. Random weights write targets of the mean length."""
    fields = {"logits_bias": True, "initializer_range": 0.2, "vocab_size": VOCAB_SIZE}
    config = MetaphraseConfig.from_preset(preset, **fields)
    if config.position_embedding_type == "sinusoidal":
        config.sinusoidal_layout = "half_split"
    model, generator = save_random(config, folder / preset), random.Random(0)
    texts = [
        " ".join(
            f"w{generator.randrange(10, VOCAB_SIZE)}" for _ in range(max(3, round(generator.gauss(mean, 0.3 * mean))))
        )
        for mean in SENTENCES * [tokens["source"] - 1]
    ]
    engines = ("torch",) if find_obstacles(config) else ("torch", "ctranslate2")
    generators = {
        engine: Generator.from_pretrained(model, engine=engine, device="cpu", dtype="int8") for engine in engines
    }
    rates = {}
    for num_beams in BEAMS:
        report = measure(generators, texts, num_beams, BATCH_SIZE, rounds=2, max_new_tokens=round(tokens["target"]))
        rates[f"{num_beams} beams"] = {
            engine: round(1000 / report[engine]["milliseconds_per_sentence"], 2) for engine in engines
        }
    return {"sentences_per_second": rates}


def hours_of_steps(report: dict, machines: int) -> dict[str, float]:
    """Return the hours of each step for `PAIRS` pairs, by the rates of a report.

    Steps on all cores are divided by their number, without a loss. So is a stream, whose readers share its blocks. The cache
    takes one core of each machine, and each machine does all of it. A part of `filter --shard` reads the whole file for its
    sample, and then on average half of it to its beginning.
    """
    rates, tokens = report["pairs_per_second"], report["tokens_per_pair"]
    cores, gpus = machines * CORES, machines * GPUS
    hours = {
        "filter, `--shard`": PAIRS / rates["filter"] / cores + 1.5 * PAIRS / rates["scan"],
        "filter, files split before": PAIRS / rates["filter"] / cores,
        "read into the cache": PAIRS / rates["read"],
        "tokenize into the cache": PAIRS / rates["tokenize"],
        "read and tokenize a stream, a pass": PAIRS / rates["stream"] / cores,
        "plan the batches": PAIRS / rates["plan"],
    }
    for preset, training in report["training"].items():
        both = sum(tokens.values())
        hours[f"train {preset}, CPU, an epoch"] = PAIRS * both / training["tokens_per_second"] / cores
        flops = 6 * sum(tokens[side] * training["parameters_without_embeddings"][stack] for side, stack in STACKS)
        hours[f"train {preset}, GPU, an epoch, computed"] = PAIRS * flops / (PEAK_FLOPS * UTILIZATION) / gpus
    for preset, decoding in report["decoding"].items():
        for search, engines in decoding["sentences_per_second"].items():
            name = "greedy" if search == "1 beams" else search
            hours[f"decode by {preset}, CPU, {name}"] = PAIRS / max(engines.values()) / cores
    return {step: seconds / 3600 for step, seconds in hours.items()}


def steps_table(report: dict) -> str:
    columns = {machines: hours_of_steps(report, machines) for machines in MACHINES}
    rows = [[step, *(shown(columns[machines][step]) for machines in MACHINES)] for step in columns[1]]
    head = ["hours of a billion pairs", *(f"{machines} machine{'s' * (machines > 1)}" for machines in MACHINES)]
    return table(head, rows)


def bottleneck_table(report: dict) -> str:
    """Return the slowest step of three ways to a model."""
    cache = ("filter, files", "read into", "tokenize into", "plan", "train transformer-base, GPU")
    ways = {
        f"train transformer-base on {kind}s from a stream": (
            *cache[:1],
            "read and tok",
            f"train transformer-base, {kind}",
        )
        for kind in ("CPU", "GPU")
    }
    ways["train transformer-base on GPUs from a cache"] = cache
    rows = []
    for way, starts in ways.items():
        row = [way]
        for machines in MACHINES:
            hours = {step: value for step, value in hours_of_steps(report, machines).items() if step.startswith(starts)}
            slowest = max(hours, key=hours.get)
            row.append(f"{slowest.partition(', a')[0]}: {shown(hours[slowest])}")
        rows.append(row)
    return table(["slowest step, hours", *(f"{machines} machine{'s' * (machines > 1)}" for machines in MACHINES)], rows)


def rates_table(report: dict) -> str:
    rates, rows = report["pairs_per_second"], []
    names = {
        "filter": "filter",
        "scan": "read a .tsv file",
        "read": "read it into the cache",
        "tokenize": "tokenize into the cache",
        "stream": "read and tokenize a stream",
    }
    names["plan"] = "plan the batches"
    rows += [[name, "-", f"{rates[step]:,} pairs"] for step, name in names.items()]
    rows += [["train", preset, f"{each['tokens_per_second']:,} tokens"] for preset, each in report["training"].items()]
    for preset, decoding in report["decoding"].items():
        for search, engines in decoding["sentences_per_second"].items():
            name = "greedy" if search == "1 beams" else search
            shares = ", ".join(f"{rate:,.1f} by {engine}" for engine, rate in engines.items())
            rows.append([f"decode in int8, {name}", preset, f"{shares} sentences"])
    return "\n".join(
        ["| step | model | in a second of one core |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    )


def bytes_table(report: dict) -> str:
    names = {
        "tsv": "the .tsv file",
        "texts": "texts in the cache, on disk",
        "tokens": "tokens in the cache, on disk",
        "plan": "batches, memory of each process",
    }
    sizes = report["bytes_per_pair"]
    rows = [[name, f"{sizes[kind]:,.0f}", f"{sizes[kind] * PAIRS / 1e9:,.0f}"] for kind, name in names.items()]
    return table(["part", "bytes of a pair", "GB of a billion pairs"], rows)


def shown(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.2g}"


TABLES = {"rates": rates_table, "hours": steps_table, "bottleneck": bottleneck_table, "bytes": bytes_table}


def fill(text: str, report: dict) -> str:
    """Return the page with the tables of a report."""
    for name, make_table in TABLES.items():
        text = replace_table(text, name, make_table(report), "benchmarks/throughput.py")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=200_000, help="pairs to make [%(default)s]")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--tables", type=Path, help="JSON file to make the tables of, without a measurement")
    parser.add_argument("--write", action="store_true", help=f"write the tables into {PAGE.name}")
    arguments = parser.parse_args()
    if arguments.tables is not None:
        report = json.loads(arguments.tables.read_text(encoding="utf-8"))
        if arguments.write:
            PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), report), encoding="utf-8")
        else:
            print(*(make_table(report) for make_table in TABLES.values()), sep="\n\n")
        return
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    prepare_cpu()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        report, encoded = measure_pairs(folder, arguments.pairs)
        print(json.dumps(report, indent=1), flush=True)
        report |= {"training": {}, "decoding": {}}
        for preset in PRESETS:
            report["training"][preset] = measure_training(preset, encoded, folder / "run")
            print(preset, json.dumps(report["training"][preset]), flush=True)
            report["decoding"][preset] = measure_decoding(preset, report["tokens_per_pair"], folder)
            print(preset, json.dumps(report["decoding"][preset]), flush=True)
    report["machine"] = describe_machine(1)
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
