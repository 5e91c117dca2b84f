"""`metaphrase tune RECIPE.yaml --field value ...`: search for better values of a recipe's fields."""

import argparse
import shlex

import psutil

from metaphrase.choices.tuning import BEST_NAME, Tuning
from metaphrase.scripts.train import prepare_process, read_recipe
from metaphrase.training.checkpoints import RECIPE_NAME

_SHOWN_ROWS = 5


def main(arguments: argparse.Namespace) -> None:
    recipe = read_recipe(arguments, "_tune")
    if recipe.time_budget is None:
        recipe = recipe.replace(time_budget="30m")
    prepare_process(recipe)
    tuning = Tuning(recipe, arguments.trials, arguments.resume, psutil.Process().create_time())
    try:
        tuning.run()
    except KeyboardInterrupt:
        raise KeyboardInterrupt("The same command with --resume goes on with the search.") from None
    rows = [{name: str(value) for name, value in row.items()} for row in tuning.best_rows[:_SHOWN_ROWS]]
    rows.insert(0, {name: name for name in rows[0]})
    for row in rows:
        print("  ".join(value.rjust(max(len(line[name]) for line in rows)) for name, value in row.items()))
    command = ["metaphrase", "train", str(tuning.folder / RECIPE_NAME)]
    command += ["--data_dir", recipe.data_dir] if recipe.data_dir is not None else []
    # A saved recipe names no absolute folder.
    command += ["--output_dir", str(tuning.folder / BEST_NAME)] if tuning.folder.is_absolute() else []
    print(f"\nTrain by the best recipe:\n{shlex.join(command)}")
