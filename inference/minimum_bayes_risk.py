"""Minimum Bayes risk decoding: choose the candidate with the highest expected utility."""

import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sacrebleu.metrics import BLEU, CHRF
from transformers import GenerationConfig

from metaphrase.decoding.options import plain_options
from metaphrase.storage.generation_options import complete_sampling

# Settings with the neutral value None that change a model's distribution. Length bounds and forced or forbidden tokens are not
# among them: a model may need these to write at all, such as a language code.
_DISTORTIONS = (
    *("min_p", "typical_p", "top_h", "epsilon_cutoff", "eta_cutoff", "repetition_penalty", "no_repeat_ngram_size"),
    *("encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty"),
    *("sequence_bias", "guidance_scale", "watermarking_config"),
)

UTILITIES = {"chrf": CHRF(), "bleu": BLEU(effective_order=True)}


def weigh_samples(texts: Sequence[str]) -> dict[str, float]:
    """Return the share of each distinct sample.

    Source: Eikema and Aziz 2020, arXiv 2005.10283.
    """
    return {text: count / len(texts) for text, count in Counter(texts).items()}


def weigh_n_best(texts: Sequence[str], scores: Sequence[float]) -> dict[str, float]:
    """Return the probability of each distinct candidate of a beam, normalized to sum 1.

    Source: Kumar and Byrne 2004.

    Args:
        texts: Candidates.
        scores: Log-probabilities of the candidates, or length-normalized scores.
    """
    highest, weights = max(scores), dict.fromkeys(texts, 0.0)
    for text, score in zip(texts, scores, strict=True):
        weights[text] += math.exp(score - highest)
    total = sum(weights.values())
    return {text: weight / total for text, weight in weights.items()}


def expected_utilities(
    candidates: Sequence[str], references: Mapping[str, float], utility: str = "chrf"
) -> list[float]:
    """Return the mean utility of each candidate, sacreBLEU's sentence score against each pseudo-reference.

    Args:
        candidates: Texts.
        references: Pseudo-references with their probabilities.
        utility: `chrf` (Popovic 2015) or `bleu` (Papineni et al. 2002, with `effective_order`).

    Raises:
        ValueError: If the utility is unknown.
    """
    score = find_utility(utility)
    return [
        sum(weight * score(candidate, [reference]).score for reference, weight in references.items())
        for candidate in candidates
    ]


def find_utility(name: str) -> Callable:
    """Return a function that scores a text against a list of references.

    Raises:
        ValueError: If there is no utility of this name.
    """
    if name not in UTILITIES:
        raise ValueError(f"`utility` must be one of {', '.join(UTILITIES)}, got {name!r}.")
    return UTILITIES[name].sentence_score


def decode_by_risk(
    generate: Callable[[list[str], bool, dict[str, Any]], list[list[Any]]],
    texts: list[str],
    *,
    config: GenerationConfig,
    num_candidates: int,
    num_references: int | None,
    utility: str,
    options: dict[str, Any],
    reference_options: dict[str, Any] | None,
) -> list[tuple[str, float]]:
    """Return for each source the candidate of highest expected utility, and its utility. See `Generator.generate_mbr`.

    Args:
        generate: Takes texts, `return_scores` and options. Returns several scored texts for each text.
        texts: Sources.
        config: Generation config of the model.
        num_candidates: As for `Generator.generate_mbr`, as are the arguments below.
        num_references: Pseudo-references.
        utility: `chrf` or `bleu`.
        options: For the candidates.
        reference_options: For the pseudo-references.
    """
    # An unknown utility is an error before any text is decoded.
    find_utility(utility)
    if reference_options is not None and num_references is None:
        raise ValueError("`num_references` must be given with `reference_options`, got None.")
    candidates = _draw(generate, texts, config, "num_candidates", num_candidates, options)
    references = candidates
    if num_references is not None:
        reference_options = options if reference_options is None else reference_options
        references = _draw(generate, texts, config, "num_references", num_references, reference_options)
    chosen = []
    for weighted, weighted_references in zip(candidates, references, strict=True):
        utilities = dict(zip(weighted, expected_utilities(list(weighted), weighted_references, utility), strict=True))
        chosen.append(max(utilities.items(), key=operator.itemgetter(1)))
    return chosen


def _draw(
    generate: Callable[[list[str], bool, dict[str, Any]], list[list[Any]]],
    texts: list[str],
    config: GenerationConfig,
    name: str,
    count: int,
    options: dict[str, Any],
) -> list[dict[str, float]]:
    """Return `count` targets for each source, samples or those of a beam."""
    if count < 1:
        raise ValueError(f"`{name}` must be at least 1, got {count}.")
    options = plain_options(options)
    if "num_return_sequences" in options:
        raise ValueError(
            f"`num_return_sequences` must be left out with `{name}`, got {options['num_return_sequences']}."
        )
    num_beams = options.get("num_beams") or 1
    if num_beams > 1 and num_beams < count:
        raise ValueError(f"`num_beams` must be at least `{name}`, got {num_beams} and {count}.")
    options = complete_sampling(options)
    # Override the model's own settings, and transformers' default `top_k` of 50.
    if num_beams == 1:
        undistorted = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        undistorted |= {name: None for name in _DISTORTIONS if getattr(config, name, None) is not None}
        options = undistorted | options | {"num_beams": 1}
    elif config.do_sample:
        options = {"do_sample": False} | options
    rows = generate(texts, num_beams > 1, {**options, "num_return_sequences": count})
    if num_beams > 1:
        return [weigh_n_best([c.text for c in row], [c.score for c in row]) for row in rows]
    return [weigh_samples([c.text for c in row]) for row in rows]
