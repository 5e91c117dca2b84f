"""Choice of beams and length penalty on validation pairs, when training has ended."""

import time
from collections.abc import Callable, Sequence

from metaphrase.evaluation.task_scores import TaskScores
from metaphrase.inference import Generator
from metaphrase.training.checkpointing.averaging import is_better_lower

BEAMS = 4
# A penalty above 1 favors longer targets.
LENGTH_PENALTIES = (1.0, 0.6, 1.5)
# Scores of text are compared with all penalties. Symbols and single words end where they must.
_TEXT_SCORES = ("bleu", "chrf", "chrf++", "ter", "rouge")
# Duration of a search with beams, relative to greedy search.
_BEAMS_COST = 2.0


def choice_cost(metric: str) -> float:
    """Return the duration of `choose_decoding`, relative to greedy decoding of its pairs."""
    return 1 + _BEAMS_COST * (len(LENGTH_PENALTIES) if metric in _TEXT_SCORES else 1)


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
    penalties = LENGTH_PENALTIES if metric in _TEXT_SCORES else LENGTH_PENALTIES[:1]
    settings = [{"num_beams": 1}, *({"num_beams": BEAMS, "length_penalty": penalty} for penalty in penalties)]
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


def _shown(options: dict[str, float]) -> str:
    beams = "greedy search" if options["num_beams"] == 1 else f"{options['num_beams']} beams"
    penalty = options.get("length_penalty", 1.0)
    return beams if penalty == 1 else f"{beams} and length penalty {penalty}"
