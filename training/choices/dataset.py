"""Choices for a data set of the Hub or a folder: its splits and its columns."""

import datasets

from metaphrase.training.choices.rules import OpenRecipe

# Names of a source and its target.
PAIRS = (("source", "target"), ("src", "tgt"), ("input", "output"), ("question", "answer"), ("article", "highlights"))
PAIRS += tuple((source, "summary") for source in ("text", "document", "article", "dialogue"))
_VALIDATION_NAMES = ("validation", "valid", "dev", "val")
_VALIDATION = ("dataset_validation_split", "num_validation")


def choose_dataset(recipe: OpenRecipe) -> None:
    """Choose the splits and columns of `dataset_name`, if the recipe has it.

    Raises:
        FileNotFoundError: If there is no such data set.
        ValueError: If a configuration must be given, or the columns do not tell source and target.
    """
    name, config = recipe.recipe.dataset_name, recipe.recipe.dataset_config_name
    if name is None:
        return
    try:
        splits = list(datasets.load_dataset(name, config))
    except (FileNotFoundError, ConnectionError) as error:
        raise FileNotFoundError(
            f"`dataset_name` must be a data set of the Hub or a folder that exists, got {name!r}: {error}"
        ) from error
    reason = f"{name} has the splits {', '.join(splits)}"
    validation = next((split for split in _VALIDATION_NAMES if split in splits), None)
    if validation is not None and recipe.is_open(*_VALIDATION):
        recipe.choose(reason, dataset_validation_split=validation)
    if "test" in splits and recipe.is_open("dataset_test_split", "num_test"):
        recipe.choose(reason, dataset_test_split="test")
    if recipe.is_open("source_column", "target_column"):
        # The split may be a part, such as `train[:10%]`.
        row = next(iter(datasets.load_dataset(name, config, split=recipe.recipe.dataset_train_split)), {})
        source, target = find_columns(row, name, config)
        recipe.choose(f"{name} has the columns {', '.join(row)}", source_column=source, target_column=target)


def find_columns(row: dict, name: str, config: str | None) -> tuple[str, str]:
    """Return the columns of source and target.

    Args:
        row: A row of the data set.
        name: Name of the data set, for errors.
        config: Configuration; `de-en` decides the direction of a column `translation`.

    Raises:
        ValueError: If no pair of columns is known, or several are.
    """
    languages = row.get("translation")
    names, direction = (languages, (config or "").split("-")) if isinstance(languages, dict) else (row, ())
    pairs = [tuple(pair) for pair in (direction, *PAIRS) if len(pair) == 2 and set(pair) <= set(names)]
    if len(pairs) != 1 and PAIRS[0] not in pairs:
        raise ValueError(
            f"`source_column` and `target_column` must be given for {name}, which has {', '.join(names)}, got neither."
        )
    return PAIRS[0] if PAIRS[0] in pairs else pairs[0]
