"""Times a training step against transformers' BART of the same dimensions, side by side in one process.

    python benchmarks/training.py --output benchmarks/results/training_cpu.json

Forward, backward and optimizer step on random tokens at the lengths of Multi30k, float32, with one optimizer and the same batches
for all; only real tokens count, padding does not. The contestants take turns, so that what else the machine does meets them
alike, and medians are reported.
"""

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from transformers import BartConfig, BartForConditionalGeneration, PreTrainedModel

from metaphrase.modeling import IGNORED_LABEL, MetaphraseConfig, MetaphraseForConditionalGeneration
from metaphrase.training.memory import keep_freed_memory

PRESETS = {"transformer-tiny": 10000, "transformer-base": 32000}


def make_models(preset: str, vocab_size: int) -> dict[str, PreTrainedModel]:
    """Our model of a preset and a BART of the same depth, width and vocabulary."""
    config = MetaphraseConfig.from_preset(preset, vocab_size=vocab_size, dropout=0.1)
    names = ("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads")
    names += ("encoder_ffn_dim", "decoder_ffn_dim", "vocab_size", "dropout", "activation_function")
    peer = BartConfig(d_model=config.hidden_size, **{name: getattr(config, name) for name in names})
    return {
        "metaphrase": MetaphraseForConditionalGeneration(config),
        "transformers-bart": BartForConditionalGeneration(peer),
    }


def make_batches(count: int, rows: int, vocab_size: int) -> list[dict[str, torch.Tensor]]:
    """Batches of sentences as long as those of Multi30k (normal around 15 tokens), padded."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(count):
        lengths = (15 + 4 * torch.randn(2, rows, generator=generator)).round().clamp(4, 40).long()
        source, target = (
            torch.randint(4, vocab_size, (rows, int(side.max())), generator=generator) for side in lengths
        )
        mask = torch.arange(source.shape[1])[None, :] < lengths[0][:, None]
        labels = target.masked_fill(torch.arange(target.shape[1])[None, :] >= lengths[1][:, None], IGNORED_LABEL)
        batches.append({"input_ids": source, "attention_mask": mask.long(), "labels": labels})
    return batches


def make_step(model: PreTrainedModel) -> Callable[[dict[str, torch.Tensor]], None]:
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4, fused=True)

    def step(batch: dict[str, torch.Tensor]) -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(preset: str, rows: int, rounds: int) -> dict:
    vocab_size = PRESETS[preset]
    batches = make_batches(rounds + 1, rows, vocab_size)
    steps = {name: make_step(model) for name, model in make_models(preset, vocab_size).items()}
    rates: dict[str, list[float]] = {name: [] for name in steps}
    for number, batch in enumerate(batches):
        tokens = int(batch["attention_mask"].sum() + (batch["labels"] != IGNORED_LABEL).sum())
        for name, step in steps.items():
            start = time.perf_counter()
            step(batch)
            if number:  # the first round warms up
                rates[name].append(tokens / (time.perf_counter() - start))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "preset": preset,
        "vocab_size": vocab_size,
        "rows": rows,
        "rounds": rounds,
        "real_tokens_per_second": {name: round(value, 1) for name, value in medians.items()},
        "ratio": round(medians["metaphrase"] / medians["transformers-bart"], 3),
    }


def describe_machine() -> dict:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    ).stdout.strip()
    return {
        "processor": names[0] if names else platform.processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--rows", type=int, default=64, help="sentences in a batch [%(default)s]")
    parser.add_argument("--rounds", type=int, default=11, help="measured steps of each [%(default)s]")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch [%(default)s]")
    parser.add_argument("--system_allocator", action="store_true", help="leave the C library's allocator as it is")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    is_tuned = not arguments.system_allocator and keep_freed_memory()
    report = {"machine": describe_machine(), "keeps_freed_memory": is_tuned, "results": []}
    for preset in arguments.presets:
        report["results"].append(measure(preset, arguments.rows, arguments.rounds))
        print(json.dumps(report["results"][-1]))
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
