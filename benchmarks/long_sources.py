"""Times long sources with and without windows in the encoder, and measures the memory above that of the model.

    OMP_NUM_THREADS=1 taskset -c 1 python benchmarks/long_sources.py --output benchmarks/results/long_sources.json

The model is the preset `metaphrase-long` with random weights, and the same network with full attention. Each measurement has a
process of its own, which first reads a short source. The memory is the peak of the process above its memory at that time. The
measurements take turns, so that other load on the machine affects all of them. The time is processor time.
"""

import argparse
import itertools
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from contestants import peak_bytes
from machine import describe_machine

from metaphrase.modeling import MetaphraseConfig, MetaphraseForConditionalGeneration
from metaphrase.ops.cpu_setup import keep_few_kernels, keep_freed_memory

PRESET, LENGTHS = "metaphrase-long", (1024, 4096, 16384)
WARM_UP_LENGTH, TARGET_LENGTH = 256, 32
Call = Callable[[torch.Tensor], object]


def make_encoding(model: MetaphraseForConditionalGeneration) -> Call:
    return torch.no_grad()(model.get_encoder())


def make_training_step(model: MetaphraseForConditionalGeneration) -> Call:
    """Return a step of AdamW on a packed pair, set up as by `metaphrase train`."""
    keep_freed_memory()
    keep_few_kernels()
    optimizer = torch.optim.AdamW(model.train().parameters(), fused=True)
    labels = torch.randint(4, model.config.vocab_size, (1, TARGET_LENGTH))

    def step(ids: torch.Tensor) -> None:
        lengths = {"source_lengths": torch.tensor([ids.shape[1]]), "target_lengths": torch.tensor([TARGET_LENGTH])}
        model(input_ids=ids, labels=labels, **lengths).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def make_generation(model: MetaphraseForConditionalGeneration) -> Call:
    lengths = dict.fromkeys(("min_new_tokens", "max_new_tokens"), TARGET_LENGTH)
    return lambda ids: model.generate(ids, do_sample=False, num_beams=1, **lengths)


CALLS = {"encoding": make_encoding, "training step": make_training_step, "generation": make_generation}


def measure(name: str, length: int, has_windows: bool) -> tuple[float, float]:
    """Return seconds and MiB of a call on a source, in a process of its own."""
    torch.manual_seed(0)
    fields = {} if has_windows else {"encoder_layer_types": None, "encoder_window": None}
    model = MetaphraseForConditionalGeneration(MetaphraseConfig.from_preset(PRESET, **fields)).eval()
    call = CALLS[name](model)
    ids = torch.randint(4, model.config.vocab_size, (1, length))
    call(ids[:, :WARM_UP_LENGTH])
    # Linux: the peak starts again from the present memory.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    base, start = peak_bytes(), time.process_time()
    call(ids)
    return time.process_time() - start, (peak_bytes() - base) / 2**20


def table(results: list[dict]) -> str:
    """Return the results as a table in Markdown."""
    lines = ["| call | tokens | seconds, windows | seconds, full | MiB, windows | MiB, full |", "|---|" + "---:|" * 5]
    for name, length in dict.fromkeys((result["call"], result["tokens"]) for result in results):
        rows = [result for result in results if (result["call"], result["tokens"]) == (name, length)]
        cells = [f"{row['seconds']:.2f}" for row in rows] + [f"{row['mib']:,}" for row in rows]
        lines.append(f"| {' | '.join([name, f'{length:,}', *cells])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=list(CALLS))
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, help="tokens of the source [%(default)s]")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each [%(default)s]")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    settings = list(itertools.product(arguments.calls, arguments.lengths, (True, False)))
    turns: dict[tuple, list[tuple[float, float]]] = {setting: [] for setting in settings}
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for number in range(arguments.rounds):
            for setting in settings:
                turns[setting].append(pool.apply(measure, setting))
            print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr, flush=True)
    results = []
    for (name, length, has_windows), values in turns.items():
        seconds, mib = (statistics.median(column) for column in zip(*values, strict=True))
        result = {"call": name, "tokens": length, "windows": has_windows}
        results.append(result | {"seconds": round(seconds, 3), "mib": round(mib)})
    print(table(results))
    if arguments.output is not None:
        machine = describe_machine(torch.get_num_threads())
        report = {"preset": PRESET, "rounds": arguments.rounds, "machine": machine, "results": results}
        arguments.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
