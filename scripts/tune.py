"""`metaphrase tune RECIPE.yaml --field value ...`: search for better values of a recipe's fields."""

import shlex
from collections.abc import Sequence
from pathlib import Path

import psutil

from metaphrase.hub_card.figures import draw_trials
from metaphrase.scripts.console import verb_parser
from metaphrase.scripts.train import find_data, split_words
from metaphrase.training.checkpointing.averaging import RECIPE_NAME
from metaphrase.training.choices.tuning import BEST_NAME, Tuning
from metaphrase.training.cpu_setup import keep_few_kernels, keep_freed_memory
from metaphrase.training.recipe.recipe import load_recipe

_SHOWN_ROWS = 5


def main(words: Sequence[str]) -> None:
    parser = verb_parser(
        "tune",
        "Search for better values of the fields that a recipe lists in `search`. Each field is an option too.",
        usage="%(prog)s [-h] [--time_budget 30m] [--trials N] [--resume] [recipe] [--field value ...]",
    )
    parser.add_argument("recipe", nargs="*", help="a recipe or files of pairs, as for `metaphrase train`")
    parser.add_argument("--trials", type=int, help="maximum number of trials [all that fit into the time budget]")
    parser.add_argument("--resume", action="store_true", help="resume the search in output_dir")
    stated, overrides = split_words(words, flags=("--resume",), options=("--trials",))
    arguments = parser.parse_args(stated)
    path, fields = find_data(arguments.recipe)
    recipe = load_recipe(path, [*fields, *overrides])
    name = Path(arguments.recipe[0]).stem.partition(".")[0] if arguments.recipe else "train"
    defaults = {"output_dir": f"runs/{name}_tune", "time_budget": "30m"}
    defaults = {name: value for name, value in defaults.items() if getattr(recipe, name) is None}
    recipe = recipe.replace(is_checked=False, **defaults)

    keep_freed_memory()
    keep_few_kernels()
    tuning = Tuning(recipe, arguments.trials, arguments.resume, psutil.Process().create_time())
    tuning.run()
    log_names = [name for name, values in tuning.space.items() if values.is_log]
    draw_trials(tuning.rows, tuning.best_rows[0], tuning.metric, tuning.folder / "trials.png", log_names)
    rows = [{name: str(value) for name, value in row.items()} for row in tuning.best_rows[:_SHOWN_ROWS]]
    rows.insert(0, {name: name for name in rows[0]})
    for row in rows:
        print("  ".join(value.rjust(max(len(line[name]) for line in rows)) for name, value in row.items()))
    command = ["metaphrase", "train", str(tuning.folder / RECIPE_NAME)]
    command += ["--data_dir", recipe.data_dir] if recipe.data_dir is not None else []
    # A saved recipe names no absolute folder.
    command += ["--output_dir", str(tuning.folder / BEST_NAME)] if tuning.folder.is_absolute() else []
    print(f"\nTrain by the best recipe:\n{shlex.join(command)}")
