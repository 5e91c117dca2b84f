"""`metaphrase demo`: makes a corpus, trains a model on it, scores it on combinations that it never saw, and draws it."""

import sys

if __name__ == "__main__" and not __package__:  # Run as a file: its folder must not hide `evaluate` or `tokenize`.
    sys.path.pop(0)

import argparse
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from transformers import set_seed

from metaphrase.hub_card import draw_attention_map, renew_model_card
from metaphrase.inference import Generator, cross_attention
from metaphrase.scripts.console import run
from metaphrase.scripts.train import RECIPES
from metaphrase.training.checkpoints import checkpoints_in, discard_checkpoint, last_whole_checkpoint
from metaphrase.training.demo_corpus import SPLITS, write_demo_corpus
from metaphrase.training.demo_summaries import write_demo_summaries
from metaphrase.training.experiment import Experiment
from metaphrase.training.memory import keep_freed_memory
from metaphrase.training.recipe import load_recipe
from metaphrase.training.run_folder import discard_model

logger = logging.getLogger(__name__)

DECODINGS = {
    "greedy": {"num_beams": 1},
    "beam 4": {"num_beams": 4},
    "nucleus 0.9": {"num_beams": 1, "do_sample": True, "top_p": 0.9, "top_k": 0},
}
NUM_SAMPLES = 4


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="metaphrase demo",
        description="Trains and shows a small English-German model. Fields of the recipe can be given: --num_train_epochs 2.",
        allow_abbrev=False,
    )
    parser.add_argument("--output_dir", default="runs/demo", help="folder of the run [%(default)s]")
    parser.add_argument("--num_train", type=int, default=30000, help="training pairs to make [%(default)s]")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the last checkpoint of a run that was stopped"
    )
    return parser


def main(words: Sequence[str]) -> None:
    start = time.monotonic()
    arguments, overrides = make_parser().parse_known_args(words)
    folder = Path(arguments.output_dir)
    data = folder / "data"
    if not arguments.resume:
        discard_earlier_demo(folder, data)
    if arguments.resume and last_whole_checkpoint(folder) is not None:
        # A run that has a checkpoint has its corpus and its recipe too.
        paths, source = {split: data / f"{split}.tsv" for split in SPLITS}, folder / "recipe.yaml"
    else:
        logger.info("Making the corpus ...")
        paths, source = write_demo_corpus(data, num_train=arguments.num_train), RECIPES / "demo.yaml"
        # For `text_to_text`, which learns both.
        write_demo_summaries(data, num_train=max(1, arguments.num_train // 2))
    tests = [line.split("\t") for line in paths["test"].read_text(encoding="utf-8").splitlines()]

    keep_freed_memory()
    recipe = load_recipe(source, ["--data_dir", str(data), "--output_dir", str(folder), *overrides])
    if arguments.resume:
        recipe.resume_from_checkpoint = "true"
    result = Experiment(recipe).train()
    card = renew_model_card(folder)
    generator = Generator.from_pretrained(folder)
    show_translations(generator, tests[:NUM_SAMPLES])
    picture = draw_attention(generator, tests, folder / "attention.png")
    scores = result["scores"]
    print(f"\nOn {result['num_examples']} test sentences, each with a combination of words that training never saw:")
    print(f"  BLEU         {scores['bleu']['score']:6.2f}   ({scores['bleu']['signature']})")
    print(f"  chrF         {scores['chrf']['score']:6.2f}   ({scores['chrf']['signature']})")
    print(f"  exact match  {scores['exact_match']['score']:6.2f}%")
    print(f"\nModel:          {folder}   (AutoModelForSeq2SeqLM.from_pretrained loads it)")
    print(f"Training curve: {folder / 'training_curve.png'}")
    print(f"Attention:      {picture}")
    print(f"Model card:     {card}")
    print(f"Took {time.monotonic() - start:.0f} seconds.")


def discard_earlier_demo(folder: Path, data: Path) -> None:
    """Deletes checkpoints and model of an earlier demo, which is known by its corpus: it is made anew each time.

    Those of another run are left alone; the run itself then refuses their folder.
    """
    if not all((data / f"{split}.tsv").is_file() for split in SPLITS):
        return
    for checkpoint in checkpoints_in(folder):
        discard_checkpoint(checkpoint)
    discard_model(folder)


def show_translations(generator: Generator, pairs: Sequence[Sequence[str]]) -> None:
    """Prints each source with its reference and its translation by every way of decoding."""
    set_seed(42)
    sources = [source for source, _ in pairs]
    decoded = {name: generator.generate(sources, **options) for name, options in DECODINGS.items()}
    for index, (source, reference) in enumerate(pairs):
        print(f"\n{'source':<12} {source}\n{'reference':<12} {reference}")
        for name, translations in decoded.items():
            print(f"{name:<12} {translations[index]}")


def draw_attention(generator: Generator, pairs: Sequence[Sequence[str]], path: Path) -> Path:
    """Draws the cross-attention of a test sentence with a subordinate clause, whose verb moves to the end in German."""
    source = next((s for s, t in pairs if ", weil " in t and len(s.split()) <= 12), pairs[0][0])
    attention = cross_attention(generator, source, num_beams=1)
    return draw_attention_map(
        attention.weights,
        attention.source_tokens,
        attention.target_tokens,
        path,
        title="Cross-attention, mean of all heads",
    )


if __name__ == "__main__":
    sys.exit(run(main, "demo"))
