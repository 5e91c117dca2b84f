"""`metaphrase train RECIPE.yaml --field value ...`: run a recipe. `accelerate launch scripts/train.py ...` does the same."""

import sys

if __name__ == "__main__" and not __package__:  # Run as a file: its folder must not hide `evaluate` or `tokenize`.
    sys.path.pop(0)

import logging
import re
from collections.abc import Sequence
from pathlib import Path

import datasets
import psutil
from transformers.utils import logging as transformers_logging

from metaphrase.data.pairs import READERS
from metaphrase.hub_card import renew_model_card
from metaphrase.scripts.console import run, verb_parser
from metaphrase.training.choices.completion import complete, is_completable
from metaphrase.training.cpu_setup import keep_few_kernels, keep_freed_memory
from metaphrase.training.distributed import leave_processes
from metaphrase.training.experiment import Experiment
from metaphrase.training.recipe.recipe import describe_fields, load_recipe
from metaphrase.training.run_folder import with_fields_of_run

logger = logging.getLogger(__name__)

RECIPES = Path(__file__).parent / "recipes"
# Options without a value; all others are fields of the recipe.
OPTIONS = ("--resume", "--dry_run", "--help_fields")
# Not the path of a recipe.
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(?<!\.yaml)(?<!\.yml)")


def find_recipe(name: str) -> Path:
    """Return the recipe file of a path, or of the name of a recipe in this package.

    Raises:
        FileNotFoundError: If there is no such file.
    """
    path, packaged = Path(name), RECIPES / f"{name}.yaml"
    if path.is_file():
        return path
    if path.name == name and packaged.is_file():
        return packaged
    names = ", ".join(sorted(path.stem for path in RECIPES.glob("*.yaml")))
    raise FileNotFoundError(
        f"The recipe must be a file or one of {names}, got {name!r}. A data set must be a folder, or OWNER/NAME on the Hub."
    )


def find_data(names: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return the recipe file that the words on the command line name, or None, and options for files or a data set.

    A data set is a folder, or a name with its owner: a single word is a recipe.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If there are more than two words.
    """
    if len(names) > 2:
        raise ValueError(
            f"`metaphrase train` takes a recipe, a file of pairs, two parallel files or a data set, got {' '.join(names)}."
        )
    if len(names) == 2:
        return None, ["--train_source_file", names[0], "--train_target_file", names[1]]
    if names and Path(names[0].removesuffix(".gz")).suffix in READERS:
        return None, ["--train_file", names[0]]
    is_recipe = names and (Path(names[0]).is_file() or (RECIPES / f"{names[0]}.yaml").is_file())
    if names and not is_recipe and (Path(names[0]).is_dir() or _HUB_NAME.fullmatch(names[0])):
        return None, ["--dataset_name", names[0]]
    return (find_recipe(names[0]) if names else None), []


def split_words(words: Sequence[str], flags: Sequence[str], options: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """Return the words of a verb itself, and those that set fields of a recipe.

    Args:
        words: The command line.
        flags: Options of the verb without a value.
        options: Options of the verb with one value.
    """
    verb_words, overrides = [], []
    for before, word in zip((None, *words), words, strict=False):
        # Recipe or files are the first words, or follow another word of the verb.
        is_value = not word.startswith("-") and (before in (None, *flags, *options) or before in verb_words)
        (verb_words if is_value or word in (*flags, *options, "-h", "--help") else overrides).append(word)
    return verb_words, overrides


def main(words: Sequence[str]) -> None:
    parser = verb_parser(
        "train",
        "Train a model by a recipe. Each field of the recipe is an option too: --field value.",
        usage="%(prog)s [-h] [--help_fields] [--resume] [--dry_run] [recipe] [--field value ...]",
    )
    parser.add_argument(
        "recipe",
        nargs="*",
        help="a YAML file, the name of a recipe of the package, a file of pairs, two parallel files, or a data set: a folder "
        "or OWNER/NAME on the Hub; what a recipe leaves open is chosen from the pairs",
    )
    parser.add_argument("--help_fields", action="store_true", help="list all fields of a recipe and exit")
    parser.add_argument("--resume", action="store_true", help="resume from the last checkpoint in output_dir")
    parser.add_argument("--dry_run", action="store_true", help="print what the run needs, and do not train")
    stated, overrides = split_words(words, OPTIONS)
    arguments = parser.parse_args(stated)
    if arguments.help_fields:
        print(describe_fields())
        return
    if arguments.resume:
        overrides += ["--resume_from_checkpoint", "true"]
    path, fields = find_data(arguments.recipe)
    recipe = load_recipe(path, [*fields, *overrides])
    if recipe.output_dir is None:
        name = Path(arguments.recipe[0]).stem.partition(".")[0] if arguments.recipe else "train"
        recipe = recipe.replace(output_dir=f"runs/{name}", is_checked=False)
    recipe = with_fields_of_run(recipe, Path(recipe.output_dir))

    # One bar for each checkpoint says nothing.
    transformers_logging.disable_progress_bar()
    if recipe.disable_tqdm:
        datasets.disable_progress_bars()
    keep_freed_memory()
    keep_few_kernels()
    if is_completable(recipe):
        experiment, choices = complete(recipe, arguments.dry_run, psutil.Process().create_time())
        if choices and experiment.arguments.process_index == 0:
            lines = "".join(f"\n  {choice}" for choice in choices)
            logger.info("Chosen from the pairs and this machine, to be saved in recipe.yaml:%s", lines)
    else:
        experiment = Experiment(recipe, is_dry_run=arguments.dry_run)
    is_main_process = experiment.arguments.process_index == 0
    if arguments.dry_run:
        # Imported here because training needs no estimates.
        from metaphrase.training.planning.dry_run import dry_run

        estimate = dry_run(experiment)
        if is_main_process:
            print(estimate)
        leave_processes()
        return
    result = experiment.train()
    if is_main_process:
        for name, score in result.get("scores", {}).items():
            logger.info("%s on %s: %.2f  %s", name, result["data"]["split"], score["score"], score["signature"])
        logger.info("The model lies in %s", experiment.folder)
        renew_model_card(experiment.folder)
    leave_processes()


if __name__ == "__main__":
    sys.exit(run(main, "train"))
