"""Comparison of the outputs of several systems on one test set, with tests, as a report for JSON, text and HTML.

Source: Neubig et al. 2019 (compare-mt, arXiv 1903.07926) for scores by length and by word frequency.
"""

import copy
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from sacrebleu.metrics import BLEU
from sacrebleu.significance import PairedTest

from metaphrase.evaluation.metrics import METRICS, NUM_BOOTSTRAP_SAMPLES, Ratio, SegmentStatistics

NUM_RANDOMIZATION_TRIALS = 10_000


def _randomization(systems: Mapping[str, SegmentStatistics], num_trials: int, seed: str) -> list[float]:
    """Test each system against the first one by approximate randomization. Return the probability of each but the first.

    The trials are those of sacreBLEU, which does not count a trial that has exactly the observed difference. Where few sentences
    differ, most trials have it.

    Source: Riezler and Maxwell 2005 (W05-0908).
    """
    first = next(iter(systems.values()))
    generator = np.random.default_rng(int(seed) if seed.isnumeric() else None)
    is_swapped = generator.integers(2, size=(num_trials, len(first.rows)), dtype=bool)

    def compute(sums: np.ndarray) -> np.ndarray:
        return np.array([first.scorer._aggregate_and_compute([row]).score for row in sums])

    # Products of floats are fast. The sums are the same: all counts are whole numbers below 2**53.
    baseline, *compared = (np.asarray(segments.rows, dtype=np.float64) for segments in systems.values())
    probabilities = []
    for rows in compared:
        swapped = is_swapped @ (rows - baseline)
        differences = np.abs(compute(baseline.sum(0) + swapped) - compute(rows.sum(0) - swapped))
        observed = np.abs(np.subtract(*compute(np.stack([baseline.sum(0), rows.sum(0)]))))
        # Equal differences of fractions may differ in their last digit.
        count = np.sum(differences >= observed * (1 - 1e-9))
        probabilities.append(float((count + 1) / (num_trials + 1)))
    return probabilities


NUM_LENGTH_BUCKETS = 5
# Lowest frequency of the words of each bucket.
FREQUENCIES = (0, 1, 2, 10, 100, 1000, 10_000)

# Statistics of a score by the name of the system.
Systems = dict[str, SegmentStatistics]


@dataclass(frozen=True)
class TestSet:
    """Outputs for the same sources, by the name of the system, and the references. The first system is the baseline."""

    outputs: Mapping[str, Sequence[str]]
    references: Sequence[str]
    sources: Sequence[str] | None = None


def compute_segments(
    test_set: TestSet, metrics: Sequence[str], options: Mapping[str, Mapping[str, Any]]
) -> dict[str, Systems]:
    """Return the statistics of each score and system. `metrics` and `options` are those of `compute_metrics`."""
    return {
        metric: {
            system: METRICS[metric].segments(texts, test_set.references, **options.get(metric, {}))
            for system, texts in test_set.outputs.items()
        }
        for metric in metrics
    }


def external_segments(scores: Mapping[str, Sequence[float]]) -> Systems:
    """Return the statistics of scores of single sentences, by the name of the system. The corpus score is their mean."""
    return {
        system: SegmentStatistics(Ratio(1.0), [(value, 1) for value in values], "mean of external scores")
        for system, values in scores.items()
    }


def compare(
    test_set: TestSet,
    segments: Mapping[str, Systems],
    *,
    lower_is_better: Collection[str] = (),
    word_tokenizer: str = "13a",
    lowercase: bool = False,
    training_targets: Iterable[str] | None = None,
    num_bootstrap_samples: int = NUM_BOOTSTRAP_SAMPLES,
    num_randomization_trials: int = NUM_RANDOMIZATION_TRIALS,
    num_sentences: int = 20,
) -> dict[str, Any]:
    """Compare each system with the first one. Return the report, for JSON, with all scores but external ones in percent.

    Args:
        segments: Statistics of each score and system. A name that is no key of `METRICS` is an external score.
        word_tokenizer: Tokenizer of sacreBLEU, for the words of the buckets.
        training_targets: Texts to count the frequency of words in; None for the references.
        num_sentences: Sentences with the largest differences, in each direction.
    """
    scorer = BLEU(tokenize=word_tokenizer, lowercase=lowercase)

    def split(text: str) -> list[str]:
        return scorer._preprocess_segment(text).split()

    words = {name: list(map(split, texts)) for name, texts in test_set.outputs.items()}
    reference_words = list(map(split, test_set.references))
    # The memory for counts does not grow with the training targets.
    known = set(itertools.chain(*itertools.chain(reference_words, *words.values())))
    counted = reference_words if training_targets is None else map(split, training_targets)
    frequencies = Counter(word for tokens in counted for word in tokens if word in known)
    sentence_scores = {
        name: {system: score_sentences(statistics) for system, statistics in systems.items()}
        for name, systems in segments.items()
    }
    # An external score is the user's choice. Of the others, chrF says the most about a single sentence.
    external = (name for name in segments if name not in METRICS)
    sort_name = next(external, "chrf" if "chrf" in segments else next(iter(segments)))
    sign = -1 if sort_name in lower_is_better else 1
    return {
        "systems": list(test_set.outputs),
        "num_sentences": len(test_set.references),
        "num_bootstrap_samples": num_bootstrap_samples,
        "num_randomization_trials": num_randomization_trials,
        "lower_is_better": [name for name in segments if name in lower_is_better],
        **_test(segments, num_bootstrap_samples, num_randomization_trials),
        "lengths": _scores_by_length(segments, [len(tokens) for tokens in reference_words]),
        "words": _words_by_frequency(words, reference_words, frequencies),
        "words_counted_in": "references" if training_targets is None else "training targets",
        "sorted_by": sort_name,
        "differences": [
            _largest_differences(test_set, sentence_scores, sort_name, system, sign, num_sentences)
            for system in list(test_set.outputs)[1:]
        ],
        "sentence_scores": sentence_scores,
    }


def _test(segments: Mapping[str, Systems], num_resamples: int, num_trials: int) -> dict[str, Any]:
    """Return the scores with their intervals and probabilities, and the seed."""
    scores, seed = {}, None
    for name, systems in segments.items():
        first = next(iter(systems.values()))
        scorer = copy.copy(first.scorer)
        # The test gets statistics in place of outputs, and need not compute them again.
        scorer._extract_corpus_statistics = lambda statistics, _: statistics
        outputs = [(system, statistics.rows) for system, statistics in systems.items()]
        signatures, columns = PairedTest(outputs, {"score": scorer}, None, "bs", num_resamples)()
        [(label, signature)] = signatures.items()
        results, seed = columns[label], signature.info["seed"]
        rows = [
            {"system": system, "score": float(result.score), "mean": float(result.mean), "ci": float(result.ci)}
            | {"interval": systems[system].confidence(num_resamples)["confidence_interval"]}
            for system, result in zip(systems, results, strict=True)
        ]
        tests = zip(rows[1:], results[1:], _randomization(systems, num_trials, seed), strict=True)
        for row, result, p_randomization in tests:
            row["difference"] = row["score"] - rows[0]["score"]
            row["p_bootstrap"], row["p_randomization"] = float(result.p_value), p_randomization
        scores[name] = {"signature": first.signature, "systems": rows}
    return {"seed": seed, "scores": scores}


def score_sentences(segments: SegmentStatistics) -> list[float]:
    scorer = copy.copy(segments.scorer)
    # BLEU of a sentence leaves out n-grams that are longer than the sentence. Other scores do not read this.
    scorer.effective_order = True
    single = replace(segments, scorer=scorer)
    return [single.score([row]) for row in range(len(segments.rows))]


def _scores_by_length(segments: Mapping[str, Systems], lengths: list[int]) -> list[dict[str, Any]]:
    """Return the scores of about equally many sentences of like length, in words of the reference."""
    shares = np.arange(1, NUM_LENGTH_BUCKETS) / NUM_LENGTH_BUCKETS
    edges = np.unique(np.quantile(lengths, shares, method="lower"))
    numbers = np.searchsorted(edges, lengths)
    buckets = []
    for number in np.unique(numbers):
        rows = np.flatnonzero(numbers == number)
        scores = {
            name: {system: statistics.score(rows) for system, statistics in systems.items()}
            for name, systems in segments.items()
        }
        members = [lengths[row] for row in rows]
        buckets.append({"from": min(members), "to": max(members), "num_sentences": len(rows), "scores": scores})
    return buckets


def _words_by_frequency(
    words: Mapping[str, list[list[str]]], reference_words: list[list[str]], frequencies: Counter[str]
) -> list[dict[str, Any]]:
    """Return the F1 of the words of each frequency: words of an output that stand in its reference, too."""
    bounds = [*FREQUENCIES, None]

    def count(bags: Iterable[Counter[str]]) -> np.ndarray:
        totals = np.zeros(len(FREQUENCIES), dtype=np.int64)
        for word, number in itertools.chain.from_iterable(bag.items() for bag in bags):
            totals[np.searchsorted(FREQUENCIES, frequencies[word], side="right") - 1] += number
        return totals

    references = list(map(Counter, reference_words))
    expected, scores = count(references), {}
    for system, lines in words.items():
        outputs = list(map(Counter, lines))
        matches = count(output & reference for output, reference in zip(outputs, references, strict=True))
        scores[system] = 200 * matches / np.maximum(count(outputs) + expected, 1)
    return [
        {
            "from": low,
            "to": None if high is None else high - 1,
            "num_words": int(expected[index]),
            "f1": {system: float(values[index]) for system, values in scores.items()},
        }
        for index, (low, high) in enumerate(itertools.pairwise(bounds))
        if expected[index]
    ]


def _largest_differences(
    test_set: TestSet,
    sentence_scores: Mapping[str, Mapping[str, list[float]]],
    sort_name: str,
    system: str,
    sign: int,
    num_sentences: int,
) -> dict[str, Any]:
    """Return the sentences of which a system is the furthest above the baseline, and the furthest below."""
    pair = [next(iter(test_set.outputs)), system]
    first, second = (np.array(sentence_scores[sort_name][name]) for name in pair)
    gains = sign * (second - first)
    order = np.argsort(-gains, kind="stable")
    best = [int(row) for row in order[:num_sentences] if gains[row] > 0]
    worst = [int(row) for row in order[::-1][:num_sentences] if gains[row] < 0]

    def describe(row: int) -> dict[str, Any]:
        source = {} if test_set.sources is None else {"source": test_set.sources[row]}
        outputs = {name: test_set.outputs[name][row] for name in pair}
        scores = {key: {name: values[name][row] for name in pair} for key, values in sentence_scores.items()}
        return {"line": row + 1, **source, "reference": test_set.references[row], "outputs": outputs, "scores": scores}

    return {"system": system, "better": list(map(describe, best)), "worse": list(map(describe, worst))}
