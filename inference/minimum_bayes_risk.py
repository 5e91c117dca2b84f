"""Minimum Bayes risk decoding: choose the candidate with the highest expected utility.

The utility is sacreBLEU's score of a candidate against a pseudo-reference. The n-grams of each text are counted once, and shared
n-grams come from matrix products. The scores equal sacreBLEU's sentence-level scores bit for bit.
"""

import math
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from sacrebleu.metrics import BLEU, CHRF
from transformers import GenerationConfig

from metaphrase.decoding.options import plain_options
from metaphrase.storage.generation_options import complete_sampling

# Columns of the n-gram matrices at a time. Bounds the memory to (candidates + references) rows of this width.
_COLUMNS_AT_ONCE = 1 << 14

# Settings with the neutral value None that change a model's distribution. Length bounds and forced or forbidden tokens are not
# among them: a model may need these to write at all, such as a language code.
_DISTORTIONS = (
    *("min_p", "typical_p", "top_h", "epsilon_cutoff", "eta_cutoff", "repetition_penalty", "no_repeat_ngram_size"),
    *("encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty"),
    *("sequence_bias", "guidance_scale", "watermarking_config"),
)

NGrams = list[list[Hashable]]


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
    """Return the mean utility of each candidate against pseudo-references, each with its probability.

    Raises:
        ValueError: If the utility is unknown.
    """
    check_utility(utility)
    return (UTILITIES[utility](candidates, list(references)) @ np.array(list(references.values()))).tolist()


def pairwise_chrf(candidates: Sequence[str], references: Sequence[str]) -> np.ndarray:
    """Return sacreBLEU's `sentence_chrf` of each candidate against each reference, `(candidates, references)`.

    Source: Popovic 2015, as sacreBLEU has it.
    """
    orders = range(1, CHRF.CHAR_ORDER + 1)
    # White space is no character here.
    counted = [_ngrams("".join(text.split()), orders) for text in (*candidates, *references)]
    left, right = counted[: len(candidates)], counted[len(candidates) :]
    matches = _matches(left, right, len(orders))
    # (orders, candidates, 1) and (orders, 1, references)
    left_totals, right_totals = _totals(left)[:, :, None], _totals(right)[:, None, :]
    # An order counts if both texts have n-grams of it. Sums run from the lowest order up, to equal sacreBLEU bit for bit.
    is_counted = (left_totals > 0) & (right_totals > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        precisions = np.where(is_counted, matches / left_totals, 0.0)
        recalls = np.where(is_counted, matches / right_totals, 0.0)
    precision, recall = np.zeros(matches.shape[1:]), np.zeros(matches.shape[1:])
    for order_precisions, order_recalls in zip(precisions, recalls, strict=True):
        precision, recall = precision + order_precisions, recall + order_recalls
    num_counted = np.maximum(is_counted.sum(axis=0), 1)
    precision, recall = precision / num_counted, recall / num_counted
    factor = CHRF.BETA**2
    with np.errstate(invalid="ignore"):
        scores = (1 + factor) * precision * recall / (factor * precision + recall)
    return np.where(precision + recall > 0, 100 * scores, 0.0)


def pairwise_bleu(candidates: Sequence[str], references: Sequence[str]) -> np.ndarray:
    """Return sacreBLEU's `sentence_bleu` of each candidate against each reference, `(candidates, references)`.

    Source: Papineni et al. 2002, with sacreBLEU's smoothing and `effective_order` for sentences.
    """
    scorer = BLEU(effective_order=True)
    tokenize, orders = scorer.tokenizer, range(1, scorer.max_ngram_order + 1)
    counted = [_ngrams(tuple(tokenize(text.rstrip()).split()), orders) for text in (*candidates, *references)]
    left, right = counted[: len(candidates)], counted[len(candidates) :]
    matches, totals = _matches(left, right, len(orders)).astype(int), _totals(left).astype(int)
    table = np.empty(matches.shape[1:])
    for row, column in np.ndindex(*table.shape):
        table[row, column] = BLEU.compute_bleu(
            correct=matches[:, row, column].tolist(),
            total=totals[:, row].tolist(),
            sys_len=len(left[row][0]),
            ref_len=len(right[column][0]),
            smooth_method=scorer.smooth_method,
            effective_order=scorer.effective_order,
        ).score
    return table


UTILITIES = {"chrf": pairwise_chrf, "bleu": pairwise_bleu}


def check_utility(utility: str) -> None:
    """Raise `ValueError` for an unknown utility."""
    if utility not in UTILITIES:
        raise ValueError(f"`utility` must be one of {', '.join(UTILITIES)}, got {utility!r}.")


def _ngrams(items: str | tuple[str, ...], orders: range) -> NGrams:
    """Return the n-grams of each order."""
    return [[items[start : start + order] for start in range(len(items) - order + 1)] for order in orders]


def _totals(texts: Sequence[NGrams]) -> np.ndarray:
    """Return the number of n-grams of each order, `(orders, texts)`."""
    return np.array([[len(ngrams) for ngrams in text] for text in texts], dtype=np.float64).T


def _matches(left: Sequence[NGrams], right: Sequence[NGrams], num_orders: int) -> np.ndarray:
    """Return the clipped number of shared n-grams of each order, `(orders, left, right)`.

    The second "the" of a text is a different item than the first. So a text is a set, and the size of an intersection is the
    product of two rows of zeros and ones.
    """
    return np.stack([_shared([t[order] for t in left], [t[order] for t in right]) for order in range(num_orders)])


def _shared(left: list[list[Hashable]], right: list[list[Hashable]]) -> np.ndarray:
    columns: dict[tuple[Hashable, int], int] = {}
    left_sets = [[columns.setdefault(item, len(columns)) for item in _numbered(ngrams)] for ngrams in left]
    right_sets = [[columns[item] for item in _numbered(ngrams) if item in columns] for ngrams in right]
    shared = np.zeros((len(left), len(right)))
    for first in range(0, len(columns), _COLUMNS_AT_ONCE):
        width = min(_COLUMNS_AT_ONCE, len(columns) - first)
        shared += _indicator(left_sets, first, width) @ _indicator(right_sets, first, width).T
    return shared


def _numbered(ngrams: list[Hashable]) -> Iterator[tuple[Hashable, int]]:
    """Yield each n-gram with the number of its earlier occurrences."""
    counts: Counter[Hashable] = Counter()
    for ngram in ngrams:
        yield ngram, counts[ngram]
        counts[ngram] += 1


def _indicator(sets: list[list[int]], first: int, width: int) -> np.ndarray:
    """Return `(sets, width)` with 1 where a set has a column. float32 is exact for sums of this many ones."""
    rows = np.repeat(np.arange(len(sets)), [len(columns) for columns in sets])
    columns = np.fromiter((column for row in sets for column in row), dtype=np.int64, count=len(rows)) - first
    is_inside = (columns >= 0) & (columns < width)
    table = np.zeros((len(sets), width), dtype=np.float32)
    table[rows[is_inside], columns[is_inside]] = 1.0
    return table


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
    check_utility(utility)
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
