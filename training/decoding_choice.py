"""Choice of beams and length penalty on validation pairs, when training has ended, and the time of all that follows training."""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from metaphrase.evaluation.task_scores import TaskScores, ValidationSample
from metaphrase.inference import Generator
from metaphrase.training.checkpointing.averaging import is_better_lower
from metaphrase.training.model_setup import remove_ineffective_settings
from metaphrase.training.recipe.recipe import Recipe

logger = logging.getLogger(__name__)

BEAMS = 4
# A penalty above 1 favors longer targets.
LENGTH_PENALTIES = (1.0, 0.6, 1.5)
# Scores of text are compared with all penalties. Symbols and single words end where they must.
_TEXT_SCORES = ("bleu", "chrf", "chrf++", "ter", "rouge")
# Duration of a search with beams, relative to greedy search.
_BEAMS_COST = 2.0


def is_choice_open(recipe: Recipe) -> bool:
    """Return True if the recipe leaves beams and length penalty to `choose_decoding`."""
    return recipe.choose_decoding and not (recipe.is_set("num_beams") or recipe.is_set("length_penalty"))


def final_share(recipe: Recipe, metrics: Sequence[str], num_scored: int, num_validation: int) -> float:
    """Return the duration of all that follows training, relative to an evaluation, which is greedy and may decode fewer pairs.

    Args:
        recipe: The recipe of the run.
        metrics: The scores of the run.
        num_scored: Number of pairs that the finished model is scored on; 0 if it is not scored.
        num_validation: Number of validation pairs.
    """
    num_decoded = min(num_validation, recipe.max_decoded_samples or num_validation)
    if not num_scored:
        return 0.0
    if not num_decoded:
        # No evaluation tells how long it takes.
        return 1.0
    is_open = is_choice_open(recipe)
    beams = _BEAMS_COST if is_open or (recipe.num_beams or 1) > 1 else 1
    choice = 1 + _BEAMS_COST * len(_penalties(metrics[0])) if is_open and metrics else 0
    # The mean of checkpoints is evaluated once.
    return beams * num_scored / num_decoded + choice + (recipe.average_best is not None)


def fill_decoding(
    recipe: Recipe, generator: Generator, sample: ValidationSample, deadline: float, num_scored: int, folder: Path
) -> Recipe:
    """Set the beams and the length penalty that the recipe leaves open, and return the recipe with them.

    Args:
        recipe: The recipe of the run.
        generator: The finished model. Its generation configuration is changed.
        sample: The pairs to compare on.
        deadline: Time when the run should end, in seconds of `time.time()`. Scoring the finished model comes before it.
        num_scored: Number of pairs that the finished model is scored on.
        folder: The folder for the generation configuration.
    """

    def is_in_time(seconds: float) -> bool:
        return time.time() + seconds * (1 + num_scored / len(sample.sources)) < deadline

    values, reason = choose_decoding(generator, sample.sources, sample.references, sample.scores, is_in_time)
    logger.info("%s: %s", ", ".join(f"{name} {value}" for name, value in values.items()), reason)
    config = generator.model.generation_config
    for name, value in values.items():
        setattr(config, name, value)
    remove_ineffective_settings(config)
    config.save_pretrained(folder)
    reasons = {**recipe.reasons, "num_beams": reason}
    return recipe.replace(**values, reasons=reasons)


def choose_decoding(
    generator: Generator,
    sources: Sequence[str],
    references: Sequence[str],
    scores: TaskScores,
    is_in_time: Callable[[float], bool] = lambda seconds: True,
) -> tuple[dict[str, float], str]:
    """Compare greedy search with beams, and beams with several length penalties.

    Args:
        generator: The finished model.
        sources: Validation sources.
        references: Their references.
        scores: The first of its metrics decides. Of equal settings, the faster one is chosen.
        is_in_time: Returns False if there is no time for a search that takes this many seconds.

    Returns:
        `num_beams`, with beams `length_penalty` too, and the scores of all settings in one line.
    """
    metric, duration = scores.metrics[0], 0.0
    sign = -1 if is_better_lower(metric) else 1
    beams = ({"num_beams": BEAMS, "length_penalty": penalty} for penalty in _penalties(metric))
    settings = [{"num_beams": 1}, *beams]
    tried: list[tuple[float, dict[str, float]]] = []
    for setting in settings:
        if not is_in_time(duration):
            break
        start = time.perf_counter()
        texts = generator.generate(list(sources), show_progress=False, **setting)
        tried.append((sign * scores.compute(texts, references)[metric]["score"], setting))
        duration = (_BEAMS_COST if len(tried) == 1 else 1.0) * (time.perf_counter() - start)
        if len(tried) == 2 and tried[1][0] <= tried[0][0]:
            break  # Beams bring nothing.
    if not tried:
        return settings[0], "there is no time to compare beams"
    # The first of equals: it is the faster one.
    best = max(tried, key=lambda pair: pair[0])[1]
    shown = ", ".join(f"{sign * score:.2f} with {_shown(setting)}" for score, setting in tried)
    return best, f"{metric} of {len(sources)} validation pairs: {shown}"


def _penalties(metric: str) -> tuple[float, ...]:
    return LENGTH_PENALTIES if metric in _TEXT_SCORES else LENGTH_PENALTIES[:1]


def _shown(options: dict[str, float]) -> str:
    beams = "greedy search" if options["num_beams"] == 1 else f"{options['num_beams']} beams"
    penalty = options.get("length_penalty", 1.0)
    return beams if penalty == 1 else f"{beams} and length penalty {penalty}"
