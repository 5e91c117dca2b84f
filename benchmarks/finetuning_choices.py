"""Fine-tunes small models with several learning rates and lengths, to check the choices for fine-tuning.

    python benchmarks/finetuning_choices.py t5 --data_dir CORPORA
    python benchmarks/finetuning_choices.py metaphrase --data_dir CORPORA --base runs/demo

The T5 learns short sentences of Tatoeba, English to Spanish, and is fine-tuned on its long sentences. The other base is the
model of `metaphrase demo`, which is fine-tuned on the demo's summaries. Both are fine-tuned on captions in a new language or
domain, English to German. Finished runs are skipped.
"""

import argparse
import json
import random
import time
from pathlib import Path

from machine import describe_machine
from transformers import T5Config, T5ForConditionalGeneration, set_seed

from metaphrase.conversion import convert
from metaphrase.data.pairs import SPLITS
from metaphrase.ops.cpu_setup import has_fast_bfloat16, keep_few_kernels, keep_freed_memory
from metaphrase.tokenization import TokenizerPair
from metaphrase.training.experiment import Experiment
from metaphrase.training.recipe.recipe import Recipe

RESULTS = Path(__file__).parent / "results"
WIDTH, LAYERS, FFN, HEADS, VOCAB_SIZE = 192, 2, 768, 4, 4000
SIZES = {
    "base": (60_000, 300, 300),
    "long": (1000, 200, 400),
    "captions": (1000, 200, 400),
    "summaries": (1000, 200, 400),
}
# Training of the T5, which begins with random weights.
BASE = {"optim": "adafactor", "optim_args": "scale_parameter=true", "learning_rate": 1e-2, "warmup_steps": 100}
BASE |= {"max_tokens_per_batch": 4096, "num_train_epochs": 3}
TASKS = {"t5": ("long", "captions"), "metaphrase": ("summaries", "captions")}
RATES = {"t5": (1e-4, 5e-4, 2e-3), "metaphrase": (2e-4, 8e-4, 3.2e-3)}
EPOCHS = (2, 6)
SHARED = {"lr_scheduler_type": "cosine", "max_grad_norm": 1.0, "max_source_length": 128, "max_target_length": 128}
SHARED |= {"report_to": "none", "disable_tqdm": True, "logging_steps": 10, "metrics": ["bleu", "chrf"], "num_beams": 1}


def write_tasks(folder: Path, corpora: Path, demo: Path | None) -> None:
    """Write the pairs of the base and of the tasks."""
    lines = (corpora / "tatoeba_en_es" / "en_es.tsv").read_text(encoding="utf-8").splitlines()
    lines = sorted(lines, key=len)
    sides = [
        (corpora / "multi30k_en_de" / f"train.{side}").read_text(encoding="utf-8").splitlines() for side in ("en", "de")
    ]
    pools = {"base": lines[: -len(lines) // 4], "long": lines[-len(lines) // 8 :]}
    pools["captions"] = ["\t".join(pair) for pair in zip(*sides, strict=True)]
    if demo is not None:
        pools["summaries"] = (demo / "data" / "summaries_train.tsv").read_text(encoding="utf-8").splitlines()
    for task, pool in pools.items():
        random.Random(42).shuffle(pool)
        for split, size in zip(SPLITS, SIZES[task], strict=True):
            (folder / f"{task}_{split}.tsv").write_text("".join(f"{line}\n" for line in pool[:size]), encoding="utf-8")
            pool = pool[size:]


def make_t5(folder: Path) -> None:
    """Write a converted T5 with random weights, and a tokenizer for all three languages."""
    lines = [line for task in ("base", "captions")
             for line in (folder / f"{task}_train.tsv").read_text(encoding="utf-8").splitlines()]  # fmt: skip
    sources, targets = zip(*(line.split("\t") for line in lines), strict=True)
    tokenizers = TokenizerPair.train(sources, targets, vocab_size=VOCAB_SIZE, show_progress=False)
    ids = {name: value for name, value in tokenizers.config_fields().items() if name != "decoder_vocab_size"}
    sizes = {"d_model": WIDTH, "d_kv": WIDTH // HEADS, "d_ff": FFN, "num_layers": LAYERS, "num_heads": HEADS}
    set_seed(42)
    model = T5ForConditionalGeneration(T5Config(**sizes, **ids | {"decoder_start_token_id": ids["pad_token_id"]}))
    model.save_pretrained(folder / "theirs")
    tokenizers.save_pretrained(folder / "theirs")
    convert(folder / "theirs", folder / "random")


def train(task: str, base: Path, folder: Path, data: Path, **fields) -> dict:
    """Train a model of a folder on a task, and return its scores."""
    begin = time.monotonic()
    files = {f"{split}_file": str(data / f"{task}_{split}.tsv") for split in SPLITS}
    fields |= {**SHARED, **files, "model_name_or_path": str(base), "output_dir": str(folder)}
    result = Experiment(Recipe.from_mapping(fields | {"bf16": has_fast_bfloat16(), "seed": 42}, "the run")).train()
    scores = {name: round(score["score"], 2) for name, score in result["scores"].items()}
    return scores | {"seconds": round(time.monotonic() - begin)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("family", choices=RATES)
    parser.add_argument("--data_dir", type=Path, required=True, help="folder of the public corpora")
    parser.add_argument("--base", type=Path, help="folder of `metaphrase demo`, for the family metaphrase")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/finetuning_choices"), help="for all files [%(default)s]"
    )
    parser.add_argument(
        "--output", type=Path, default=RESULTS / "finetuning_choices.json", help="JSON file [%(default)s]"
    )
    arguments = parser.parse_args()
    family, base = arguments.family, arguments.base
    folder = arguments.folder / family
    keep_freed_memory(), keep_few_kernels()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "captions_test.tsv").is_file():
        write_tasks(folder, arguments.data_dir, base)

    def report() -> dict:
        return json.loads(arguments.output.read_text(encoding="utf-8")) if arguments.output.is_file() else {}

    def carry_out(name: str, *places: str | Path, **fields) -> None:
        if name not in report():
            result = train(*places, folder / name.replace(" ", "_"), folder, **fields)
            text = json.dumps(report() | {name: result | {"machine": describe_machine(1)}}, indent=1)
            arguments.output.write_text(text + "\n", encoding="utf-8")

    if base is None:
        if not (folder / "random").is_dir():
            make_t5(folder)
        carry_out("t5 base", "base", folder / "random", **BASE)
        base = folder / "t5_base"
    for task in TASKS[family]:
        for epochs in EPOCHS:
            for rate in RATES[family]:
                fields = {"learning_rate": rate, "num_train_epochs": epochs, "warmup_steps": 0.1}
                fields |= {"max_tokens_per_batch": 1024, "label_smoothing_factor": 0.0 if family == "t5" else 0.1}
                carry_out(f"{family} {task} {rate:g} {epochs}", task, base, **fields)


if __name__ == "__main__":
    main()
