"""Minimum Bayes risk decoding: select the candidate with the highest expected utility."""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sacrebleu.metrics import BLEU, CHRF

from metaphrase.errors import MetaphraseError
from metaphrase.inference.batches import read_options
from metaphrase.inference.generator import Generator, ScoredText
from metaphrase.plugins import needed_plugin
from metaphrase.storage.generation_options import complete_sampling

# Settings with the neutral value None that change a model's distribution. Length bounds and forced or forbidden tokens are not
# among them: a model may need these to write at all, such as a language code.
_DISTORTIONS = (
    *("min_p", "typical_p", "top_h", "epsilon_cutoff", "eta_cutoff", "repetition_penalty", "no_repeat_ngram_size"),
    *("encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty"),
    *("sequence_bias", "guidance_scale", "watermarking_config"),
)

UTILITIES = {"chrf": CHRF(), "bleu": BLEU(effective_order=True)}


def expected_utilities(
    candidates: Sequence[str], references: Mapping[str, float], utility: str = "chrf"
) -> list[float]:
    """Return the mean utility of each candidate, sacreBLEU's sentence score against each pseudo-reference.

    Args:
        candidates: Texts.
        references: Pseudo-references with their probabilities.
        utility: `chrf` (Popovic 2015) or `bleu` (Papineni et al. 2002, with `effective_order`).
    """
    score = UTILITIES[utility].sentence_score
    return [
        sum(weight * score(candidate, [reference]).score for reference, weight in references.items())
        for candidate in candidates
    ]


@functools.lru_cache(maxsize=1)
def _load_judge(name: str, device: Any) -> Any:
    """Return a judge, which the chunks of a stream share."""
    return needed_plugin("judge", "utility")(name, show_progress=False, device=device)


def _judge(
    judge: Any, texts: Sequence[str], candidates: Sequence[Sequence[str]], references: Sequence[Mapping[str, float]]
) -> Iterator[list[float]]:
    """Yield the expected utilities of the candidates of each source. The judge scores all of them in one call."""
    rows = list(zip(texts, candidates, references, strict=True))
    triples = [(text, target, reference) for text, row, weights in rows for target in row for reference in weights]
    values = iter(judge.utilities(*zip(*triples, strict=True)).tolist())
    for _, row, weights in rows:
        yield [sum(weight * next(values) for weight in weights.values()) for _ in row]


def generate_mbr(
    generator: Generator,
    texts: list[str],
    num_candidates: int,
    num_references: int | None,
    utility: str,
    show_progress: bool | None,
    options: Mapping[str, Any],
) -> list[ScoredText]:
    """Return the selected candidate of each text: see `Generator.generate_mbr`."""
    judge = None
    if utility not in UTILITIES:
        if ":" not in utility and "/" not in utility and not Path(utility).exists():
            raise MetaphraseError(f"`utility` must be a judge or one of {', '.join(UTILITIES)}, got {utility!r}.")
        judge = _load_judge(utility, getattr(generator.model, "device", None))
    options = read_options(options)
    if "num_return_sequences" in options:
        raise MetaphraseError(f"`num_candidates` sets `num_return_sequences`, got {options['num_return_sequences']}.")
    has_beams = (options.get("num_beams") or 1) > 1
    if has_beams:
        settings = {"do_sample": False, **complete_sampling(options)}
    else:
        # Samples of the whole distribution: override the model's own settings, and transformers' default `top_k` of 50. The
        # caller's options come first.
        config = generator.model.generation_config
        settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        settings |= {name: None for name in _DISTORTIONS if getattr(config, name, None) is not None}
        settings |= complete_sampling(options) | {"num_beams": 1}

    def draw(count: int) -> list[dict[str, float]]:
        """Return candidates of each source with their probabilities, normalized to sum 1.

        The scores of a beam are log-probabilities, or length-normalized. Samples have equal scores: the share of a text is its
        weight.

        Source: Kumar and Byrne 2004; for samples, Eikema and Aziz 2020, arXiv 2005.10283.
        """
        arguments = settings | {"num_return_sequences": count, "return_scores": has_beams}
        rows = []
        for row in generator.generate_n_best(texts, show_progress=show_progress, **arguments):
            weights = dict.fromkeys([candidate.text for candidate in row], 0.0)
            highest = max(candidate.score for candidate in row) if has_beams else 0.0
            for candidate in row:
                weights[candidate.text] += math.exp(candidate.score - highest) if has_beams else 1.0
            total = sum(weights.values())
            rows.append({text: weight / total for text, weight in weights.items()})
        return rows

    candidates = references = draw(num_candidates)
    if num_references is not None:
        counts = generator.num_truncated, generator.num_unknown
        references = draw(num_references)
        # The pseudo-references came from the same sources, which count once.
        generator.num_truncated, generator.num_unknown = counts
    selected = []
    for start in range(0, len(texts), generator.batch_size):
        part = slice(start, start + generator.batch_size)
        rows, weights = [list(row) for row in candidates[part]], references[part]
        if judge is None:
            utilities = (expected_utilities(*pair, utility) for pair in zip(rows, weights, strict=True))
        else:
            utilities = _judge(judge, texts[part], rows, weights)
        for row, values in zip(rows, utilities, strict=True):
            best = max(range(len(row)), key=values.__getitem__)
            selected.append(ScoredText(row[best], values[best]))
    return selected
