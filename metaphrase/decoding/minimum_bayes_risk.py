"""Minimum Bayes risk decoding: select the candidate with the highest expected utility."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sacrebleu.metrics import BLEU, CHRF

from metaphrase.errors import MetaphraseError
from metaphrase.inference.batches import read_options
from metaphrase.inference.generator import Generator, ScoredText
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
    if utility not in UTILITIES:
        raise MetaphraseError(f"`utility` must be one of {', '.join(UTILITIES)}, got {utility!r}.")
    options = read_options(options)
    if "num_return_sequences" in options:
        raise MetaphraseError(
            f"`num_return_sequences` is set by `num_candidates`, got {options['num_return_sequences']}."
        )
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
    for row, weights in zip(candidates, references, strict=True):
        utilities = expected_utilities(list(row), weights, utility)
        best = max(range(len(utilities)), key=utilities.__getitem__)
        selected.append(ScoredText(list(row)[best], utilities[best]))
    return selected
