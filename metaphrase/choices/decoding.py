"""Choice of the search that decodes best, by the scores of validation pairs."""

import collections
import math
import time

from metaphrase.evaluation.evaluate import ValidationSample
from metaphrase.inference import Generator
from metaphrase.training.callbacks import BEAMS_COST, TEXT_SCORES
from metaphrase.training.checkpointing.averaging import is_better_lower

BEAMS = 4
# A penalty above 1 favors longer targets. Symbols and single words end where they must.
LENGTH_PENALTIES = (1.0, 0.6, 1.5)
# Points that early stopping may not cost.
_NOTICEABLE = 0.1


def choose_decoding(
    generator: Generator, sample: ValidationSample, deadline: float = math.inf, num_scored: int = 0
) -> tuple[dict[str, float], str]:
    """Compare greedy search with beams, and beams with several length penalties, by the first metric of the sample.

    The best beams are also tried with early stopping, which is faster, and the rule of fairseq, Marian and CTranslate2. It may
    end before the right target of a model whose other beams end soon, so that only a comparison tells.

    Returns:
        `num_beams`, with beams `length_penalty` too, `early_stopping` if it costs nothing, and the scores of all settings in one
        line.
    """
    metric, num_pairs = sample.scores.metrics[0], len(sample.sources)
    sign, duration, shown = -1 if is_better_lower(metric) else 1, 0.0, []
    best: tuple[float, dict[str, float]] = -math.inf, {"num_beams": 1}
    penalties = LENGTH_PENALTIES if metric in TEXT_SCORES else LENGTH_PENALTIES[:1]
    beams = [{"num_beams": BEAMS, "length_penalty": value} for value in penalties]
    settings = collections.deque([best[1], *beams])
    # The final scores come after this search, and take as long for each pair.
    while settings and time.time() + duration * (1 + num_scored / num_pairs) < deadline:
        setting, start = settings.popleft(), time.perf_counter()
        texts = generator.generate(list(sample.sources), show_progress=False, **setting)
        duration = (1.0 if shown else BEAMS_COST) * (time.perf_counter() - start)
        score = sign * sample.scores.compute(texts, sample.references)[metric]["score"]
        shown.append(f"{sign * score:.2f} with {_shown(setting)}")
        # The first of equal settings is the fastest.
        if score > best[0] or ("early_stopping" in setting and score > best[0] - _NOTICEABLE):
            best = score, setting
        if setting == beams[0] and best[1] != setting:
            break  # Beams bring nothing.
        if setting == beams[-1]:
            settings.append({**best[1], "early_stopping": True})
    if not shown:
        return best[1], "there is no time to compare beams"
    return best[1], f"{metric} of {num_pairs} validation pairs: {', '.join(shown)}"


def _shown(options: dict[str, float]) -> str:
    if options["num_beams"] == 1:
        return "greedy search"
    parts = [f"{options['num_beams']} beams"]
    if options["length_penalty"] != 1:
        parts.append(f"length penalty {options['length_penalty']}")
    if "early_stopping" in options:
        parts.append("early stopping")
    return " and ".join(parts)
