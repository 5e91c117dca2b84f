"""Length limits: the number of tokens that a model can read, and limits of a recipe lowered to it."""

import logging

from transformers import AutoConfig

from metaphrase.modeling import MetaphraseConfig
from metaphrase.storage.loading import naming
from metaphrase.training.recipe.fields import DEFAULT_PRESET
from metaphrase.training.recipe.recipe import Recipe

logger = logging.getLogger(__name__)

# Other families with a table of positions. FSMT and M2M100 extend theirs when needed.
TABLED_FAMILIES = [
    "bart",
    "bigbird_pegasus",
    "blenderbot",
    "blenderbot-small",
    "marian",
    "mbart",
    "mvp",
    "pegasus",
    "plbart",
]
_TRAINING_LIMITS = ("max_source_length", "max_target_length")


def longest_sequence(recipe: Recipe) -> int | None:
    """Return the maximum tokens per side for the model of a recipe; None if its positions have no end.

    Raises:
        ValueError: If there is no such preset.
        OSError: If there is no such model.
    """
    if recipe.model_name_or_path is None:
        # A whole configuration cannot be made before the vocabulary is known.
        preset = MetaphraseConfig.from_preset(recipe.preset or DEFAULT_PRESET)
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


def fit_budget(recipe: Recipe, longest: int | None) -> Recipe:
    """Return the recipe of a stream with length limits that fit the token budget, for any pair that may come.

    Call it before `fit_limits`, which turns defaults into given values.

    Args:
        recipe: Recipe with `max_tokens_per_batch`.
        longest: Maximum tokens per side that the model can read.

    Raises:
        ValueError: If the given limits exceed the budget.
    """
    budget = recipe.max_tokens_per_batch
    defaults = [name for name in _TRAINING_LIMITS if not recipe.is_set(name)]
    lengths = {name: getattr(recipe, name) for name in _TRAINING_LIMITS}
    if longest is not None:
        lengths |= {name: min(lengths[name], longest) for name in defaults}
    if sum(lengths.values()) <= budget:
        return recipe
    room = budget - sum(length for name, length in lengths.items() if name not in defaults)
    if not defaults or room < 2 * len(defaults):
        raise ValueError(
            "`max_tokens_per_batch` must be at least `max_source_length` and `max_target_length` together where pairs are "
            f"streamed, since a pair of these lengths may come at any time, got {budget}, {lengths['max_source_length']} and "
            f"{lengths['max_target_length']}."
        )
    lowered = {name: min(lengths[name], room // len(defaults)) for name in defaults}
    for name, limit in lowered.items():
        logger.info("`%s` is lowered from %d to %d, so that each pair fits into a batch.", name, lengths[name], limit)
    return recipe.replace(is_checked=False, **lowered)


def fit_limits(recipe: Recipe, longest: int | None) -> Recipe:
    """Return the recipe with default length limits lowered to what the model can read.

    Args:
        recipe: Recipe with `max_source_length`, `max_target_length` and `generation_max_length`.
        longest: Maximum tokens per side that the model can read.

    Raises:
        ValueError: If a given limit is above that.
    """
    if longest is None:
        return recipe
    # A decoded sequence has a start token, which labels lack, and its last token is never read.
    limits = {**dict.fromkeys(_TRAINING_LIMITS, longest), "generation_max_length": longest + 1}
    lowered = {name: limit for name, limit in limits.items() if (getattr(recipe, name) or 0) > limit}
    for name, limit in lowered.items():
        value = getattr(recipe, name)
        if recipe.is_set(name):
            raise ValueError(
                f"`{name}` must be at most {limit} for a model that has a table of positions with "
                f"`max_position_embeddings` {longest}, got {value}."
            )
        logger.info("`%s` is lowered from %d to %d, the most that the model can read.", name, value, limit)
    return recipe.replace(is_checked=False, **lowered) if lowered else recipe
