"""`metaphrase train RECIPE.yaml --field value ...`: run a recipe, in the processes of any launcher, or by `train` in Python."""

import sys

if __name__ == "__main__" and not __package__:  # Run as a file: its folder must not hide `evaluate` or `tokenize`.
    sys.path.pop(0)

import argparse
import contextlib
import functools
import logging
import re
import shlex
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import datasets
import psutil
from transformers import TrainerCallback
from transformers.utils import logging as transformers_logging

from metaphrase.data.pairs import READERS
from metaphrase.errors import MetaphraseError
from metaphrase.hub_card import renew_model_card
from metaphrase.hub_card.card import with_interval
from metaphrase.inference.progress import has_bar
from metaphrase.plugins import needed_plugin, plugin
from metaphrase.scripts.__main__ import run
from metaphrase.training.checkpoints import STAGES_NAME, holds_run, last_whole_checkpoint, with_fields_of_run
from metaphrase.training.distributed import leave_processes
from metaphrase.training.experiment import Experiment
from metaphrase.training.recipe.recipe import Recipe, choose_plainly, describe_fields, load_recipe

logger = logging.getLogger(__name__)

RECIPES = Path(__file__).parent / "recipes"
_RECIPE_ENDINGS = (".yaml", ".yml")
# Not the path of a recipe.
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(?<!\.yaml)(?<!\.yml)")


def find_data(names: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return the recipe file that the words on the command line name, or None, and options for files or a data set.

    A recipe is a file, or the name of a recipe in this package. A data set is a folder, or a name with its owner.
    """
    if not names:
        return None, []
    endings = [Path(name.lower().removesuffix(".gz")).suffix for name in names]
    if len(names) == 2 and not {*endings} & {*READERS, *_RECIPE_ENDINGS}:
        return None, ["--train_source_file", names[0], "--train_target_file", names[1]]
    if len(names) == 1:
        [name], [ending], path = names, endings, Path(names[0])
        if ending in READERS:
            return None, ["--train_file", name]
        if path.is_file() and ending in _RECIPE_ENDINGS:
            return path, []
        packaged = RECIPES / f"{name}.yaml"
        if path.name == name and packaged.is_file():
            return packaged, []
        if path.is_dir() or (_HUB_NAME.fullmatch(name) and not path.is_file()):
            return None, ["--dataset_name", name]
    known = ", ".join(sorted(path.stem for path in RECIPES.glob("*.yaml")))
    raise FileNotFoundError(
        f"`metaphrase train` takes a recipe (a .yaml file, or one of {known}), a file of pairs ({', '.join(READERS)}), two "
        f"parallel files, or a data set (a folder, or OWNER/NAME on the Hub), got {' '.join(names)}. Pass other files as "
        "--train_file FILE, --validation_file FILE and --test_file FILE."
    )


def read_recipe(arguments: argparse.Namespace, ending: str = "") -> Recipe:
    """Return the recipe of a command line, whose `output_dir` is by default named after the file."""
    path, fields = find_data(arguments.recipe)
    recipe = load_recipe(path, [*fields, *arguments.fields])
    if recipe.output_dir is not None:
        return recipe
    name = Path(arguments.recipe[0]).stem.partition(".")[0] if arguments.recipe else "train"
    return recipe.replace(output_dir=f"runs/{name}{ending}")


def prepare_process(recipe: Recipe) -> None:
    """Set the memory of the process up, and hide bars that say nothing, and all bars where no terminal can show them."""
    if (prepare_cpu := plugin("cpu_setup")) is not None:
        prepare_cpu()
    # There would be a bar for each checkpoint that is loaded.
    transformers_logging.disable_progress_bar()
    if recipe.disable_tqdm or not has_bar():
        datasets.disable_progress_bars()


@contextlib.contextmanager
def naming_checkpoint(folder: Path) -> Iterator[None]:
    """Add to an interruption the checkpoint that the run can be resumed from."""
    try:
        yield
    except KeyboardInterrupt:
        checkpoint = last_whole_checkpoint(folder)
        hint = "There is no checkpoint yet to go on from."
        if checkpoint is not None:
            hint = f"The same command with --resume goes on from {checkpoint}."
        raise KeyboardInterrupt(hint) from None


def next_steps(folder: Path, objective: str = "pairs", is_ensemble: bool = False) -> str:
    """Return the commands that a user of a finished model or ensemble needs next."""
    name = shlex.quote(str(folder))
    commands = [
        f"metaphrase generate {name} --input FILE --output FILE",
        f"metaphrase evaluate {name} --source FILE --target FILE",
    ]
    if objective != "pairs":
        commands = [f"metaphrase train PAIRS.tsv --model_name_or_path {name}"]
    commands.append(f"metaphrase serve {name}" if is_ensemble else f"metaphrase push {name} USER/NAME")
    return "\n  ".join(["Next:", *commands])


def main(arguments: argparse.Namespace) -> None:
    if arguments.help_fields:
        print(describe_fields())
        return
    if arguments.resume:
        arguments.fields += ["--resume_from_checkpoint", "true"]
    if not arguments.recipe and not arguments.fields:
        raise MetaphraseError("Give a file: metaphrase train pairs.tsv. See metaphrase train --help for other data.")
    recipe = read_recipe(arguments)
    arguments.output_dir = recipe.output_dir
    train(recipe, arguments.dry_run, psutil.Process().create_time())
    leave_processes()


def train(
    recipe: Recipe, is_dry_run: bool = False, started: float | None = None, callbacks: Sequence[TrainerCallback] = ()
) -> tuple[Experiment, dict]:
    """Run a recipe as the command does: choose its open fields, train, save and score. A dry run prints what the run needs.

    All processes of a launcher call this with the same recipe. A process group that the launcher has made is used, and stays.

    Args:
        started: Beginning of `time_budget`, in seconds of `time.time()`; None for now.
        callbacks: More callbacks of the trainer.

    Returns:
        The experiment, and in the first process the content of `metrics.json`.

    Raises:
        MetaphraseError: If the recipe or its data are refused.
    """
    prepare_process(recipe)
    if recipe.output_dir is None:
        recipe = recipe.replace(output_dir="runs/train")
    folder = Path(recipe.output_dir)
    if recipe.resume_from_checkpoint is True and holds_run(folder / STAGES_NAME):
        recipe = with_fields_of_run(recipe, folder / STAGES_NAME)
    run_recipe = functools.partial(_train_model, callbacks=callbacks)
    if recipe.stages or recipe.num_seeds > 1 or recipe.monolingual_target is not None:
        run_recipe = functools.partial(needed_plugin("stages", "stages"), train=run_recipe)
    experiment, result = run_recipe(recipe, is_dry_run=is_dry_run, started=started)
    if experiment.arguments.process_index == 0 and not is_dry_run:
        for name, score in result.get("scores", {}).items():
            logger.info("%s on %s: %s  %s", name, result["data"]["split"], with_interval(score), score["signature"])
        is_ensemble = recipe.num_seeds > 1
        kind, steps = "ensemble" if is_ensemble else "model", next_steps(folder, recipe.objective, is_ensemble)
        logger.info("The %s lies in %s\n%s", kind, folder, steps)
    if experiment.interrupt.has_ended:
        # A script must not go on as if the training had reached its end.
        raise KeyboardInterrupt("The model of this update is saved; --resume goes on from there.")
    return experiment, result


def _train_model(
    recipe: Recipe, is_dry_run: bool, started: float | None, callbacks: Sequence[TrainerCallback] = ()
) -> tuple[Experiment, dict]:
    folder = Path(recipe.output_dir)
    if recipe.resume_from_checkpoint is True and not holds_run(folder):
        # Open fields are chosen as for any new run.
        logger.info("%s holds nothing to resume from: the run starts from the beginning.", folder)
        recipe = recipe.replace(resume_from_checkpoint=None)
    recipe = with_fields_of_run(recipe, folder)
    if (complete := plugin("choose")) is not None:
        experiment, choices = complete(recipe, is_dry_run, started)
    else:
        # Without the ring that measures, a recipe gets plain defaults.
        recipe = recipe if recipe.resume_from_checkpoint else choose_plainly(recipe)
        experiment, choices = Experiment(recipe, is_dry_run, started), []
    is_main_process = experiment.arguments.process_index == 0
    if choices and is_main_process:
        width = shutil.get_terminal_size((120, 24)).columns
        lines = textwrap.TextWrapper(width, "  ", "      ", break_on_hyphens=False, break_long_words=False)
        logger.info("Chosen, to be saved in recipe.yaml:\n%s", "\n".join(map(lines.fill, choices)))
    if is_dry_run:
        estimate = needed_plugin("estimate", "dry_run")(experiment)
        if is_main_process:
            print(estimate)
        return experiment, {}
    with naming_checkpoint(experiment.folder):
        result = experiment.train(callbacks)
    if is_main_process:
        renew_model_card(experiment.folder)
    return experiment, result


if __name__ == "__main__":
    sys.exit(run("train", sys.argv[1:]))
