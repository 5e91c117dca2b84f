"""`metaphrase demo`: make a corpus, train a small model on it, score it and draw its attention."""

import argparse
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from transformers import set_seed

from metaphrase.analysis.pages import draw_attention_map
from metaphrase.demo.corpus import SPLITS, write_demo_corpus, write_demo_summaries
from metaphrase.errors import MetaphraseError
from metaphrase.hub_card import renew_model_card
from metaphrase.inference import Generator, cross_attention
from metaphrase.scripts.train import RECIPES, naming_checkpoint, next_steps, prepare_process
from metaphrase.training.checkpoints import checkpoints_in, discard_checkpoint, discard_model, last_whole_checkpoint
from metaphrase.training.experiment import Experiment
from metaphrase.training.recipe.recipe import load_recipe

logger = logging.getLogger(__name__)

DECODINGS: dict[str, dict] = {
    "greedy": {"num_beams": 1},
    "beam 4": {"num_beams": 4},
    "nucleus 0.9": {"num_beams": 1, "do_sample": True, "top_p": 0.9, "top_k": 0},
}

# Only this subcommand writes the file. It marks a folder that may be replaced.
MARKER_NAME = "made_by_demo.txt"
MARKER_TEXT = "`metaphrase demo` made this folder. It replaces data, checkpoints and model in it whenever it runs.\n"


def main(arguments: argparse.Namespace) -> None:
    start = time.monotonic()
    if "WORLD_SIZE" not in os.environ:
        # Several GPUs gain nothing with a model of this size.
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    folder = Path(arguments.output_dir)
    is_resumed = arguments.resume and last_whole_checkpoint(folder) is not None
    # A run with a checkpoint has its corpus and its recipe, too.
    source = folder / "recipe.yaml" if is_resumed else RECIPES / "demo.yaml"
    fields = ["--data_dir", str(folder / "data"), "--output_dir", str(folder), *arguments.fields]
    if arguments.resume:
        fields += ["--resume_from_checkpoint", "true"]
    if not is_resumed:
        prepare(folder, source, fields, arguments)
    recipe = load_recipe(source, fields)
    prepare_process(recipe)
    with naming_checkpoint(folder):
        result = Experiment(recipe).train()
    card = renew_model_card(folder)
    generator = Generator.from_pretrained(folder)
    tests = [line.split("\t") for line in (folder / "data" / "test.tsv").read_text(encoding="utf-8").splitlines()]
    set_seed(42)
    sources, references = map(list, zip(*tests[:4], strict=True))
    rows = {"source": sources, "reference": references}
    rows |= {name: generator.generate(sources, **options) for name, options in DECODINGS.items()}
    for texts in zip(*rows.values(), strict=True):
        print("".join(f"\n{name:<12} {text}" for name, text in zip(rows, texts, strict=True)))
    # In a subordinate clause the German verb moves to the end.
    shown = next((text for text, target in tests if ", weil " in target and len(text.split()) <= 12), tests[0][0])
    attention = cross_attention(generator, shown, num_beams=1)
    maps = (attention.weights, attention.source_tokens, attention.target_tokens)
    picture = draw_attention_map(*maps, folder / "attention.png", title="Cross-attention, mean of all heads")
    scores = result["scores"]
    print(f"\nOn {result['num_examples']} test sentences, whose combinations of words are not in the training data:")
    print(f"  BLEU         {scores['bleu']['score']:6.2f}   ({scores['bleu']['signature']})")
    print(f"  chrF         {scores['chrf']['score']:6.2f}   ({scores['chrf']['signature']})")
    print(f"  exact match  {scores['exact_match']['score']:6.2f}%")
    print(f"\nModel:          {folder}   (AutoModelForSeq2SeqLM.from_pretrained loads it)")
    print(f"Training curve: {folder / 'training_curve.png'}\nAttention:      {picture}\nModel card:     {card}")
    print(f"Took {time.monotonic() - start:.0f} seconds.\n{next_steps(folder)}")


def prepare(folder: Path, source: Path, fields: Sequence[str], arguments: argparse.Namespace) -> None:
    """Make the corpus and clear the folder. The folder changes only after all checks."""
    data, is_demo = folder / "data", (folder / MARKER_NAME).is_file()
    if not is_demo and (files := sorted(data.glob("*.tsv"))):
        raise MetaphraseError(
            f"`output_dir` must be a new folder or that of an earlier demo, got {folder} with {files[0]} and without "
            f"{MARKER_NAME}. Choose another folder, or remove the file."
        )
    is_replaced = is_demo and not arguments.resume
    with tempfile.TemporaryDirectory() as corpus:
        for split in SPLITS:
            (Path(corpus) / f"{split}.tsv").touch()
        # A recipe is checked without data. The model of an earlier demo would be an error.
        checked = ["--data_dir", corpus, *(("--output_dir", corpus) if is_replaced else ())]
        Experiment(load_recipe(source, [*fields, *checked]))
        logger.info("Making the corpus ...")
        write_demo_corpus(corpus, num_train=arguments.num_train)
        # For the recipe `text_to_text`, which learns both tasks.
        write_demo_summaries(corpus, num_train=max(1, arguments.num_train // 2))
        if is_replaced:
            for checkpoint in checkpoints_in(folder):
                discard_checkpoint(checkpoint)
            discard_model(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARKER_NAME).write_text(MARKER_TEXT, encoding="utf-8")
        shutil.copytree(corpus, data, dirs_exist_ok=True)
