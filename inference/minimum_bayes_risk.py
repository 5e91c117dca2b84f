"""Minimum Bayes risk decoding: of some candidates, the one that is most like all that the model might have said.

The utility of a candidate beside a pseudo-reference is sacreBLEU's score of the one against the other. The n-grams of each text
are counted once, and those that two texts share come from products of matrices; what they give is equal to sacreBLEU's
sentence-level score, bit for bit.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sacrebleu.metrics import BLEU, CHRF
from transformers import GenerationConfig

from metaphrase.decoding.options import complete_sampling, plain_options

# So many columns of the matrices at a time: (candidates + references) rows of this width are held.
_COLUMNS_AT_ONCE = 1 << 14

# Settings that change a model's distribution, beside those whose neutral value is not None. Lengths are none of them, nor is what
# forbids or forces tokens, which a model may need to write at all: the code of a language, no padding.
_DISTORTIONS = (
    *("min_p", "typical_p", "top_h", "epsilon_cutoff", "eta_cutoff", "repetition_penalty", "no_repeat_ngram_size"),
    *("encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty"),
    *("sequence_bias", "guidance_scale", "watermarking_config"),
)

NGrams = list[list[Hashable]]


@dataclass(frozen=True)
class WeightedTexts:
    """Texts that stand for a distribution, each once.

    Attributes:
        texts: All different.
        weights: How probable each is; their sum is 1.
    """

    texts: list[str]
    weights: list[float]


def weigh_samples(texts: Sequence[str]) -> WeightedTexts:
    """Equal samples count once, with the share that they have.

    Source: Eikema and Aziz 2020, arXiv 2005.10283.
    """
    counts = Counter(texts)
    return WeightedTexts(list(counts), [count / len(texts) for count in counts.values()])


def weigh_n_best(texts: Sequence[str], scores: Sequence[float]) -> WeightedTexts:
    """The candidates of a beam by their probabilities, as if there were no others; those of equal texts add up.

    Source: Kumar and Byrne 2004.

    Args:
        texts: Of the candidates.
        scores: Their log-probabilities, or scores that are normalized by length.
    """
    highest, weights = max(scores), dict.fromkeys(texts, 0.0)
    for text, score in zip(texts, scores, strict=True):
        weights[text] += math.exp(score - highest)
    total = sum(weights.values())
    return WeightedTexts(list(weights), [weight / total for weight in weights.values()])


def expected_utilities(candidates: Sequence[str], references: WeightedTexts, utility: str = "chrf") -> list[float]:
    """What each candidate scores against the pseudo-references, in the mean by their weights.

    Raises:
        ValueError: If the utility is unknown.
    """
    check_utility(utility)
    table = UTILITIES[utility](candidates, references.texts)
    return (table @ np.array(references.weights)).tolist()


def pairwise_chrf(candidates: Sequence[str], references: Sequence[str]) -> np.ndarray:
    """sacreBLEU's `sentence_chrf` of each candidate against each reference, `(candidates, references)`.

    Source: Popovic 2015, as sacreBLEU has it.
    """
    orders = range(1, CHRF.CHAR_ORDER + 1)
    counted = [_character_ngrams(text, orders) for text in (*candidates, *references)]
    left, right = counted[: len(candidates)], counted[len(candidates) :]
    matches = _matches(left, right, len(orders))
    # (orders, candidates, 1) and (orders, 1, references)
    left_totals, right_totals = _totals(left)[:, :, None], _totals(right)[:, None, :]
    # An order counts where both texts have n-grams of it. As in sacreBLEU, sums run from the lowest order on.
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
    """sacreBLEU's `sentence_bleu` of each candidate against each reference, `(candidates, references)`.

    Source: Papineni et al. 2002, smoothed and with as many orders as there are, as sacreBLEU has it for sentences.
    """
    scorer = BLEU(effective_order=True)
    tokenize, orders = scorer.tokenizer, range(1, scorer.max_ngram_order + 1)
    counted = [_word_ngrams(tokenize(text.rstrip()).split(), orders) for text in (*candidates, *references)]
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


UTILITIES: dict[str, Callable[[Sequence[str], Sequence[str]], np.ndarray]] = {
    "chrf": pairwise_chrf,
    "bleu": pairwise_bleu,
}


def check_utility(utility: str) -> None:
    """Raises `ValueError` if there is no such utility."""
    if utility not in UTILITIES:
        raise ValueError(f"`utility` must be one of {', '.join(UTILITIES)}, got {utility!r}.")


def _character_ngrams(text: str, orders: range) -> NGrams:
    """All n-grams of each order, white space left out."""
    text = "".join(text.split())
    return [[text[start : start + order] for start in range(len(text) - order + 1)] for order in orders]


def _word_ngrams(words: list[str], orders: range) -> NGrams:
    return [[tuple(words[start : start + order]) for start in range(len(words) - order + 1)] for order in orders]


def _totals(texts: Sequence[NGrams]) -> np.ndarray:
    """How many n-grams of each order a text has, `(orders, texts)`."""
    return np.array([[len(ngrams) for ngrams in text] for text in texts], dtype=np.float64).T


def _matches(left: Sequence[NGrams], right: Sequence[NGrams], num_orders: int) -> np.ndarray:
    """How many n-grams of each order two texts share, each as often as both have it, `(orders, left, right)`.

    The second "the" of a text is another thing than its first one. Then a text is a set, and what two sets share is a product
    of rows of zeros and ones.
    """
    return np.stack([_shared([t[order] for t in left], [t[order] for t in right]) for order in range(num_orders)])


def _shared(left: list[list[Hashable]], right: list[list[Hashable]]) -> np.ndarray:
    columns: dict[tuple[Hashable, int], int] = {}
    known = [[columns.setdefault(thing, len(columns)) for thing in _numbered(ngrams)] for ngrams in left]
    # What no text on the left has is shared with none.
    found = [[columns[thing] for thing in _numbered(ngrams) if thing in columns] for ngrams in right]
    shared = np.zeros((len(left), len(right)))
    for first in range(0, len(columns), _COLUMNS_AT_ONCE):
        width = min(_COLUMNS_AT_ONCE, len(columns) - first)
        shared += _indicator(known, first, width) @ _indicator(found, first, width).T
    return shared


def _numbered(ngrams: list[Hashable]) -> list[tuple[Hashable, int]]:
    seen: Counter[Hashable] = Counter()
    things = []
    for ngram in ngrams:
        things.append((ngram, seen[ngram]))
        seen[ngram] += 1
    return things


def _indicator(sets: list[list[int]], first: int, width: int) -> np.ndarray:
    """1 where a set has a column, `(sets, width)`. Sums of so many ones are exact in float32."""
    rows = np.repeat(np.arange(len(sets)), [len(each) for each in sets])
    columns = np.fromiter((column for each in sets for column in each), dtype=np.int64, count=len(rows)) - first
    is_inside = (columns >= 0) & (columns < width)
    table = np.zeros((len(sets), width), dtype=np.float32)
    table[rows[is_inside], columns[is_inside]] = 1.0
    return table


def decode_by_risk(
    generate: Callable[[list[str], bool, dict[str, Any]], list[list[Any]]],
    texts: list[str],
    *,
    own: GenerationConfig,
    num_candidates: int,
    num_references: int | None,
    utility: str,
    options: dict[str, Any],
    reference_options: dict[str, Any] | None,
) -> list[tuple[str, float]]:
    """For each source the candidate of the highest expected utility, and that utility.

    Args:
        generate: From texts, whether scores are wanted and options to several scored texts for each.
        texts: Sources.
        own: The model's settings.
        num_candidates: How many are drawn for each source.
        num_references: How many pseudo-references are drawn beside them, if they are not the candidates.
        utility: `chrf` or `bleu`.
        options: For the candidates.
        reference_options: For the pseudo-references; by default the same.

    Raises:
        ValueError: As `Generator.generate_mbr`.
    """
    check_utility(utility)
    if reference_options is not None and num_references is None:
        raise ValueError("`num_references` must be given with `reference_options`, got None.")
    candidates = _draw(generate, texts, own, "num_candidates", num_candidates, options)
    references = candidates
    if num_references is not None:
        others = options if reference_options is None else reference_options
        references = _draw(generate, texts, own, "num_references", num_references, others)
    chosen = []
    for found, others in zip(candidates, references, strict=True):
        utilities = expected_utilities(found.texts, others, utility)
        best = max(range(len(utilities)), key=utilities.__getitem__)
        chosen.append((found.texts[best], utilities[best]))
    return chosen


def _draw(
    generate: Callable[[list[str], bool, dict[str, Any]], list[list[Any]]],
    texts: list[str],
    own: GenerationConfig,
    name: str,
    count: int,
    options: dict[str, Any],
) -> list[WeightedTexts]:
    """So many targets for each source, sampled or of a beam."""
    if count < 1:
        raise ValueError(f"`{name}` must be at least 1, got {count}.")
    options = plain_options(options)
    if "num_return_sequences" in options:
        raise ValueError(
            f"`num_return_sequences` must be left out where `{name}` says it, got {options['num_return_sequences']}."
        )
    num_beams = options.get("num_beams") or 1
    if num_beams > 1 and num_beams < count:
        raise ValueError(f"`num_beams` must be at least `{name}`, got {num_beams} and {count}.")
    options = complete_sampling(options)
    # Whatever the model's own settings say.
    if num_beams == 1:
        # And transformers would leave all but 50 tokens out.
        whole = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        reset = {name: None for name in _DISTORTIONS if getattr(own, name, None) is not None}
        options = whole | reset | options | {"num_beams": 1}
    elif own.do_sample:
        options = {"do_sample": False} | options
    lists = generate(texts, num_beams > 1, {**options, "num_return_sequences": count})
    if num_beams > 1:
        return [weigh_n_best([c.text for c in found], [c.score for c in found]) for found in lists]
    return [weigh_samples([c.text for c in found]) for found in lists]
