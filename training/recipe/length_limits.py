"""Length limits: how many tokens a model can read, known before it is made, and what a recipe asks of it."""

import logging
from typing import TYPE_CHECKING

from transformers import AutoConfig

from metaphrase.modeling import MetaphraseConfig
from metaphrase.storage.loading import naming

if TYPE_CHECKING:
    from metaphrase.training.recipe.recipe import Recipe

logger = logging.getLogger(__name__)

# Other families with a row of a table for each position; FSMT and M2M100 lengthen theirs where it is too short.
TABLED_FAMILIES = (
    "bart",
    "bigbird_pegasus",
    "blenderbot",
    "blenderbot-small",
    "marian",
    "mbart",
    "mvp",
    "pegasus",
    "plbart",
)


def longest_sequence(recipe: "Recipe", default_preset: str) -> int | None:
    """The most tokens that a side may have for the model of a recipe; `None` if its positions have no end.

    Args:
        recipe: Names a model to fine-tune, or the dimensions of a new one.
        default_preset: Of a new model without a `preset`.

    Raises:
        ValueError: If there is no such preset.
        OSError: If there is no such model.
    """
    if recipe.model_name_or_path is None:
        # Field by field, since a whole configuration cannot be made before the vocabulary is known.
        preset = MetaphraseConfig.from_preset(recipe.preset or default_preset)
        names = ("position_embedding_type", "max_position_embeddings")
        kind, rows = (recipe.model.get(name, getattr(preset, name)) for name in names)
        has_table = kind == "learned"
    else:
        with naming(recipe.model_name_or_path, "model_name_or_path"):
            config = AutoConfig.from_pretrained(recipe.model_name_or_path, trust_remote_code=False)
        rows = getattr(config, "max_position_embeddings", None)
        kind = config.model_type
        has_table = kind in TABLED_FAMILIES or (kind == "metaphrase" and config.position_embedding_type == "learned")
    return rows if has_table and isinstance(rows, int) else None


def fit_budget(recipe: "Recipe", longest: int | None) -> None:
    """For a stream, whose pairs nobody has seen: none within the limits may be more than a batch can hold.

    Comes before `fit_limits`, after which nothing is a default.

    Args:
        recipe: With `max_tokens_per_batch`; of `max_source_length` and `max_target_length` what is a default is lowered.
        longest: As `longest_sequence` says.

    Raises:
        ValueError: If the limits that were given leave no way out.
    """
    names, budget = ("max_source_length", "max_target_length"), recipe.max_tokens_per_batch
    defaults = [name for name in names if not recipe.is_set(name)]
    lengths = {name: getattr(recipe, name) for name in names}
    if longest is not None:
        lengths |= {name: min(lengths[name], longest) for name in defaults}
    if sum(lengths.values()) <= budget:
        return
    room = budget - sum(length for name, length in lengths.items() if name not in defaults)
    if not defaults or room < 2 * len(defaults):
        raise ValueError(
            "`max_tokens_per_batch` must be at least `max_source_length` and `max_target_length` together where pairs are "
            f"streamed, since a pair of these lengths may come at any time, got {budget}, {lengths[names[0]]} and "
            f"{lengths[names[1]]}."
        )
    for name in defaults:
        lowered = min(lengths[name], room // len(defaults))
        logger.info(
            "`%s` is %d, so that a batch can hold each pair, and not %d, its default.", name, lowered, lengths[name]
        )
        setattr(recipe, name, lowered)


def fit_limits(recipe: "Recipe", longest: int | None) -> None:
    """Refuses limits of a recipe that allow for more tokens than the model can read, and lowers those that are defaults.

    Args:
        recipe: With `max_source_length`, `max_target_length` and `generation_max_length`.
        longest: As `longest_sequence` says.

    Raises:
        ValueError: Naming the field.
    """
    if longest is None:
        return
    # What decoding writes begins with a token more than labels have, and its last one is not read.
    most = {"max_source_length": longest, "max_target_length": longest, "generation_max_length": longest + 1}
    for name, limit in most.items():
        value = getattr(recipe, name)
        if value is None or value <= limit:
            continue
        if recipe.is_set(name):
            raise ValueError(
                f"`{name}` must be at most {limit} for a model that has a table of positions with "
                f"`max_position_embeddings` {longest}, got {value}."
            )
        logger.info("`%s` is %d, all that the model can read, and not %d, its default.", name, limit, value)
        # As if it had been given: the recipe that is saved says what was done.
        setattr(recipe, name, limit)
