"""`metaphrase train RECIPE.yaml --field value ...`: carries out a recipe. `accelerate launch scripts/train.py ...` likewise."""

import sys

if __name__ == "__main__" and not __package__:  # Run as a file: its folder must not hide `evaluate` or `tokenize`.
    sys.path.pop(0)

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from metaphrase.hub_card import renew_model_card
from metaphrase.scripts.console import run
from metaphrase.training.cpu_setup import keep_few_kernels, keep_freed_memory
from metaphrase.training.distributed import leave_processes
from metaphrase.training.experiment import Experiment
from metaphrase.training.planning.dry_run import dry_run
from metaphrase.training.recipe.recipe import format_help, load_recipe

logger = logging.getLogger(__name__)

RECIPES = Path(__file__).parent / "recipes"
OPTIONS = ("--resume", "--dry_run")


def find_recipe(name: str) -> Path:
    """The file that a word of the command line means: a path, or a mere name, of a recipe that comes with the package.

    Raises:
        FileNotFoundError: If there is no such file.
    """
    path, packaged = Path(name), RECIPES / f"{name}.yaml"
    if path.is_file():
        return path
    if path.name == name and packaged.is_file():
        return packaged
    names = ", ".join(sorted(each.stem for each in RECIPES.glob("*.yaml")))
    raise FileNotFoundError(f"The recipe must be a file or one of {names}, got {name!r}.")


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="metaphrase train",
        usage="%(prog)s [-h] [--resume] [--dry_run] [recipe] [--field value ...]",
        description="Carries out a recipe. Every field can be given on the command line too: --field value.",
        epilog=format_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("recipe", nargs="?", help="a YAML file, or the name of a recipe of the package")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in output_dir")
    parser.add_argument("--dry_run", action="store_true", help="print what the run would need, and do not train")
    ours, overrides = [], []
    for before, word in zip((None, *words), words, strict=False):
        # What stands first, or behind an option that takes no value, is the recipe; all other options are fields of it.
        is_recipe = not word.startswith("--") and before in (None, *OPTIONS)
        (ours if is_recipe or word in (*OPTIONS, "-h", "--help") else overrides).append(word)
    arguments = parser.parse_args(ours)
    recipe = load_recipe(find_recipe(arguments.recipe) if arguments.recipe else None, overrides)
    if arguments.resume:
        recipe.resume_from_checkpoint = "true"
    if recipe.output_dir is None:
        recipe.output_dir = f"runs/{Path(arguments.recipe).stem if arguments.recipe else 'train'}"

    keep_freed_memory()
    keep_few_kernels()
    experiment = Experiment(recipe, is_dry_run=arguments.dry_run)
    if arguments.dry_run:
        estimate = dry_run(experiment)
        if experiment.arguments.process_index == 0:
            print(estimate)
        leave_processes()
        return
    result = experiment.train()
    if experiment.arguments.process_index == 0:
        for name, score in result.get("scores", {}).items():
            logger.info("%s on %s: %.2f  %s", name, result["data"]["split"], score["score"], score["signature"])
        logger.info("The model lies in %s", experiment.folder)
        renew_model_card(experiment.folder)
    leave_processes()


if __name__ == "__main__":
    sys.exit(run(main, "train"))
