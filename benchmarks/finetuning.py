"""Fine-tunes a converted model of another family by its recipe, from random weights of a published size.

    python benchmarks/finetuning.py t5 --core 0

Without downloads, this shows that a converted model can be trained: the family's own class makes a model with a tokenizer
of the demo's corpus, `metaphrase convert` converts it, and the recipe trains it. Unknown options, such as `--bf16 false`,
are passed to the recipe.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import yaml
from lengths import STACKS, T5_SMALL
from machine import describe_machine
from seeds import RESULTS, carry_out, draw, read_run
from transformers import MarianConfig, MarianMTModel, PreTrainedModel, T5Config, T5ForConditionalGeneration, set_seed

from metaphrase.conversion import convert
from metaphrase.demo.corpus import write_demo_corpus
from metaphrase.scripts.train import find_data
from metaphrase.tokenization import TokenizerPair

VOCAB_SIZE = 2000
# Random weights need another learning rate than the recipe's.
OPTIONS = {"t5": ["--learning_rate", "1e-2"], "marian": []}
# The size of opus-mt-en-de, without its vocabulary.
OPUS_MT = {"d_model": 512, "max_position_embeddings": 512, **STACKS}
OPUS_MT |= {"activation_function": "swish", "scale_embedding": True}


def make_model(family: str, ids: dict) -> PreTrainedModel:
    """Return a model of the family's own class with random weights."""
    set_seed(42)
    if family == "t5":
        return T5ForConditionalGeneration(T5Config(**T5_SMALL, **ids))
    return MarianMTModel(MarianConfig(**OPUS_MT, **ids))


def prepare(family: str, folder: Path, source_prefix: str) -> None:
    """Write the corpus, the family's own model and its conversion."""
    corpus = write_demo_corpus(folder / "data")
    lines = corpus["train"].read_text(encoding="utf-8").splitlines()
    # Like T5's own tokenizer, one trained on the prefix needs few tokens for it.
    pairs = [(source_prefix + line).split("\t") for line in lines]
    tokenizers = TokenizerPair.train(*zip(*pairs, strict=True), vocab_size=VOCAB_SIZE, show_progress=False)
    ids = {name: value for name, value in tokenizers.config_fields().items() if name != "decoder_vocab_size"}
    ids["decoder_start_token_id"] = ids["pad_token_id"]
    make_model(family, ids).save_pretrained(folder / "theirs")
    tokenizers.save_pretrained(folder / "theirs")
    convert(folder / "theirs", folder / "ours")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("family", choices=("t5", "marian"))
    parser.add_argument("--threads", type=int, default=1, help="threads of torch [%(default)s]")
    parser.add_argument("--core", type=int, help="processor core to pin to")
    parser.add_argument("--output_dir", type=Path, default=Path("runs"), help="folder for all files [%(default)s]")
    parser.add_argument(
        "--output", type=Path, help="JSON file [benchmarks/results/RECIPE.json]; a picture goes beside it"
    )
    arguments, options = parser.parse_known_args()
    options = OPTIONS[arguments.family] + options
    recipe = find_data([f"finetune_{arguments.family}"])[0]
    fields = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    folder = arguments.output_dir / recipe.stem
    if not (folder / "ours").is_dir():
        prepare(arguments.family, folder, fields.get("source_prefix", ""))
    words = ["--data_dir", str(folder / "data"), "--model_name_or_path", str(folder / "ours"), "--disable_tqdm", "true"]
    words += ["--output_dir", str(folder / "run"), "--resume", *options]
    command = [sys.executable, "-m", "metaphrase.scripts", "train", str(recipe), *words]
    if arguments.core is not None:
        command = ["taskset", "-c", str(arguments.core), *command]
    seconds = carry_out(command, os.environ | {"OMP_NUM_THREADS": str(arguments.threads)}, folder / "run.seconds")

    run = {"seed": fields["seed"], "seconds": round(seconds), "machine": describe_machine(arguments.threads)}
    run = read_run(folder / "run") | run
    output = arguments.output or RESULTS / f"{recipe.stem}.json"
    report = {"recipe": fields, "options": options, "runs": [run]}
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    draw([run], recipe.stem, output.with_suffix(".png"), fields.get("label_smoothing_factor", 0.0))
    print(json.dumps({name: score["score"] for name, score in run["scores"].items()}, indent=2))


if __name__ == "__main__":
    main()
