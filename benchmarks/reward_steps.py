"""Times a training step with 8 candidates for each source beside a step of cross-entropy with the same sources.

    TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1 taskset -c 1 python benchmarks/reward_steps.py \
        --model runs/tiny --pairs train.tsv --output benchmarks/results/reward_steps.json

The model is a finished run, because the candidates of a trained model share their beginnings. Times are processor times, taken
in turns. `candidates` draws and scores candidates, `learning` is the step over them.
"""

import argparse
import json
import random
import statistics
import time
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from machine import describe_machine

from metaphrase.data.collators import PackedCollator
from metaphrase.data.pairs import WEIGHT_COLUMN, PairSource
from metaphrase.inference import Generator
from metaphrase.ops.cpu_setup import prepare_cpu
from metaphrase.techniques.rewards import RewardTraining
from metaphrase.training.recipe.recipe import Recipe
from metaphrase.training.trainer import TOKENS_MULTIPLE
from metaphrase.training.training_loss import TrainingLoss, weights_of_labels

# Pairs of which a batch is drawn, in the order of their sources' lengths, as a trainer forms its batches.
READ = 5000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", required=True, help="folders of finished runs")
    parser.add_argument("--pairs", required=True, help="training pairs of the runs, .tsv")
    parser.add_argument("--max_tokens_per_batch", type=int, default=2048)
    parser.add_argument("--loss", nargs="+", default=["rloo", "risk"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    prepare_cpu()
    torch.set_num_threads(1)
    result = {"machine": describe_machine(1), "num_candidates": 8, "reward": "bleu", "models": {}}
    for folder in arguments.model:
        result["models"][Path(folder).name] = measure(folder, arguments)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result["models"], indent=2))


def measure(folder: str, arguments: argparse.Namespace) -> dict:
    generator = Generator.from_pretrained(folder, device="cpu")
    model, batch = generator.model.train(), make_batch(generator, arguments)
    steps = {"cross_entropy": lambda: learn(model, batch)}
    made = {}
    for loss in arguments.loss:
        fields = {
            "train_file": arguments.pairs,
            "model_name_or_path": folder,
            "reward": "bleu",
            "reward_loss": loss,
            "bf16": True,
        }
        make = RewardTraining(Recipe.from_mapping(fields, "this benchmark"), generator.tokenizers)

        def draw(make=make, loss=loss):
            with torch.autocast("cpu", torch.bfloat16):
                made[loss] = make(model, batch)

        steps |= {f"{loss}_candidates": draw, f"{loss}_learning": lambda loss=loss: learn(model, made[loss])}
    seconds = {name: [] for name in steps}
    for number in range(arguments.rounds + 1):
        for name, step in steps.items():
            start = time.process_time()
            step()
            # The first round warms up.
            seconds[name] += [time.process_time() - start] * (number > 0)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = {
        loss: (medians[f"{loss}_candidates"] + medians[f"{loss}_learning"]) / medians["cross_entropy"]
        for loss in arguments.loss
    }
    sizes = {"sources": len(batch["source_lengths"]), "parameters": model.num_parameters()}
    sizes |= {"target_tokens": batch["labels"].numel()}
    sizes |= {f"{loss}_target_tokens": made[loss]["labels"].numel() for loss in arguments.loss}
    return {**sizes, "seconds": medians, "times_cross_entropy": ratios}


def make_batch(generator: Generator, arguments: argparse.Namespace) -> dict:
    """Return a packed batch of neighbours in the order of lengths."""
    pairs = [(row[0], row[1]) for row in islice(PairSource(file=arguments.pairs).rows(), READ)]
    sides = generator.tokenizers.encode_sources([pair[0] for pair in pairs])
    targets = generator.tokenizers.encode_targets([pair[1] for pair in pairs])
    rows = [{"input_ids": ids, "labels": labels} for ids, labels in zip(sides, targets, strict=True)]
    rows.sort(key=lambda row: len(row["input_ids"]) + len(row["labels"]))
    start, chosen, tokens = random.Random(0).randrange(len(rows) // 3, len(rows) // 2), [], 0
    for row in rows[start:]:
        tokens += len(row["input_ids"]) + len(row["labels"])
        if tokens > arguments.max_tokens_per_batch:
            break
        chosen.append(row)
    return PackedCollator(generator.model.config.pad_token_id, TOKENS_MULTIPLE)(chosen)


def learn(model, batch: dict) -> None:
    weights = weights_of_labels(batch)
    inputs = {name: value for name, value in batch.items() if name != WEIGHT_COLUMN}
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**inputs, loss_of_states=partial(TrainingLoss(), label_weights=weights)).loss
    loss.backward()
    model.zero_grad()


if __name__ == "__main__":
    main()
