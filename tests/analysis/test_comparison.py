import numpy as np
import pytest
from sacrebleu import significance
from sacrebleu.metrics import BLEU, CHRF, TER
from sacrebleu.significance import PairedTest

from metaphrase.analysis.comparison import TestSet as Texts
from metaphrase.analysis.comparison import _test, compare, compute_segments, external_segments
from metaphrase.analysis.pages import score_rows
from metaphrase.evaluation.metrics import MAX_RESAMPLED_BYTES, METRICS, compute_metrics

WORDS = ["the", "cat", "dog", "sleeps", "runs", "on", "mat", "in", "house", "big", "small"]


def noisy(texts, share, seed):
    random = np.random.default_rng(seed)
    return [
        " ".join(word if random.random() > share else str(random.choice(WORDS)) for word in text.split())
        for text in texts
    ]


@pytest.fixture(scope="module")
def texts():
    random = np.random.default_rng(0)
    references = [" ".join(random.choice(WORDS, size=random.integers(3, 12))) + "." for _ in range(120)]
    outputs = {"A": noisy(references, 0.3, 1), "B": noisy(references, 0.2, 2), "C": ["", *references[1:]]}
    return Texts(outputs, references)


@pytest.fixture(scope="module")
def report(texts):
    segments = compute_segments(texts, list(METRICS), {"bleu": {"lowercase": True}})
    lower = ["ter", "wer", "cer"]
    return compare(texts, segments, lower_is_better=lower, num_bootstrap_samples=200, num_randomization_trials=300)


SCORERS = {
    "bleu": ("BLEU", BLEU, {"lowercase": True}),
    "chrf": ("chrF2", CHRF, {}),
    "chrf++": ("chrF2++", CHRF, {"word_order": 2}),
    "ter": ("TER", TER, {}),
}


@pytest.mark.parametrize("name", SCORERS)
def test_figures_are_those_of_sacrebleu_to_the_last_digit(name, texts, report, monkeypatch):
    label, scorer_class, options = SCORERS[name]
    systems, rows = list(texts.outputs.items()), report["scores"][name]["systems"]

    def with_ties(differences, observed):
        # Trials with the observed difference count, too.
        return (np.sum(differences >= observed).item() + 1) / (len(differences) + 1)

    for kind, key, count in (("bs", "p_bootstrap", 200), ("ar", "p_randomization", 300)):
        scorer = scorer_class(**options, references=[texts.references])
        with monkeypatch.context() as patched:
            if kind == "ar":
                patched.setattr(significance, "_compute_p_value", with_ties)
            signatures, results = PairedTest(systems, {"score": scorer}, None, kind, count)()
        assert report["seed"] == signatures[label].info["seed"]
        for row, result in zip(rows, results[label], strict=True):
            assert (row["score"], row.get(key)) == (result.score, result.p_value)
            if kind == "bs":
                assert (row["mean"], row["ci"]) == (result.mean, result.ci)
                low, high = row["interval"]
                assert high - low == pytest.approx(2 * result.ci) and low <= result.mean <= high
    scorer = scorer_class(**options | ({"effective_order": True} if name == "bleu" else {}))
    pairs = zip(texts.outputs["A"], zip(texts.references), strict=True)
    assert report["sentence_scores"][name]["A"] == [scorer.sentence_score(*pair).score for pair in pairs]


def test_two_sentences_of_a_thousand_may_be_chance():
    """By hand: both fall to one side in half of the trials."""
    references = [f"word {number}" for number in range(1000)]
    outputs = {"A": references, "B": ["no", "no", *references[2:]]}
    segments = compute_segments(Texts(outputs, references), ["exact_match"], {})
    report = compare(Texts(outputs, references), segments, num_sentences=1)
    row = report["scores"]["exact_match"]["systems"][1]
    assert row["p_randomization"] == pytest.approx(0.5, abs=0.02)
    assert not any("*" in cell for line in score_rows(report) for cell in line)


@pytest.mark.parametrize("kind", ["match", "score"])
def test_one_comparison_in_twenty_of_equal_systems_is_marked(kind):
    random, count, num_marked = np.random.default_rng(0), 200, 0
    for _ in range(count):
        values = random.random((2, 300)) if kind == "score" else random.random((2, 300)) < 0.5
        systems = external_segments({"A": values[0].astype(float), "B": values[1].astype(float)})
        [row] = _test({"score": systems}, 200, 200)["scores"]["score"]["systems"][1:]
        num_marked += max(row["p_bootstrap"], row["p_randomization"]) < 0.05
    assert 0.03 < num_marked / count < 0.07


def test_every_score_is_that_of_evaluate_and_its_sentences(texts, report):
    for system, outputs in texts.outputs.items():
        expected = compute_metrics(outputs, texts.references, list(METRICS), {"bleu": {"lowercase": True}})
        single = compute_metrics(outputs[:1], texts.references[:1], list(METRICS))
        for name, part in report["scores"].items():
            [row] = [row for row in part["systems"] if row["system"] == system]
            assert row["score"] == pytest.approx(expected[name]["score"], rel=1e-12)
            assert part["signature"] == expected[name]["signature"] and abs(row["mean"] - row["score"]) < row["ci"]
            if name != "bleu":
                assert report["sentence_scores"][name][system][0] == pytest.approx(single[name]["score"])


def test_a_mean_of_external_scores_is_tested_by_the_same_bootstrap(texts):
    values = {"A": [0.5, 0.7, 0.2, 0.9], "B": [0.65, 0.8, 0.1, 0.95]}
    few = Texts({name: texts.outputs[name][:4] for name in "AB"}, texts.references[:4])
    segments = compute_segments(few, ["bleu"], {}) | {"COMET": external_segments(values)}
    report = compare(few, segments, num_bootstrap_samples=500, num_randomization_trials=500)
    first, second = report["scores"]["COMET"]["systems"]
    draws = np.random.default_rng(12345).choice(4, size=(500, 4))
    means = np.sort(np.array(values["B"])[draws].mean(axis=1))
    assert (first["score"], second["difference"]) == (pytest.approx(0.575), pytest.approx(0.05))
    assert second["mean"] == pytest.approx(means.mean()) and second["ci"] == pytest.approx((means[-13] - means[12]) / 2)
    assert second["interval"] == pytest.approx((means[12], means[-13]))
    assert report["sorted_by"] == "COMET" and report["sentence_scores"]["COMET"] == values
    reverse = compare(few, segments, lower_is_better=["COMET"], num_bootstrap_samples=2, num_randomization_trials=2)
    for compared, better, worse in ((report, [1, 2, 4], [3]), (reverse, [3], [1, 2, 4])):
        entries = compared["differences"][0]
        assert [sorted(entry["line"] for entry in entries[name]) for name in ("better", "worse")] == [better, worse]


def test_sentences_with_the_largest_differences(texts, report):
    assert report["sorted_by"] == "chrf" and [part["system"] for part in report["differences"]] == ["B", "C"]
    scores = report["sentence_scores"]["chrf"]
    for part in report["differences"]:
        gains = np.array(scores[part["system"]]) - scores["A"]
        for direction, sign in (("better", 1), ("worse", -1)):
            shown = [sign * gains[entry["line"] - 1] for entry in part[direction]]
            assert shown == sorted(sign * gains[sign * gains > 0])[::-1][:20]
    [empty] = report["differences"][1]["worse"]
    assert empty["line"] == 1 and empty["outputs"] == {"A": texts.outputs["A"][0], "C": ""} and "source" not in empty
    assert empty["reference"] == texts.references[0] and empty["scores"]["ter"]["C"] == 100


def test_words_by_frequency_by_hand():
    texts = Texts({"A": ["a a b", "c x"], "B": ["a b", "C d"]}, ["a b b", "c d"])
    segments = compute_segments(texts, ["bleu"], {})
    options = {"num_bootstrap_samples": 2, "num_randomization_trials": 2}

    def words(**more):
        report = compare(texts, segments, **options, **more)
        return [(row["from"], row["to"], row["num_words"], *row["f1"].values()) for row in report["words"]]

    # Once: a, c, d. Outputs of A hold a, a, c, of which a and c are right; B holds a, d.
    assert words() == [(1, 1, 3, pytest.approx(200 * 2 / 6), pytest.approx(200 * 2 / 5)), (2, 9, 2, *[200 / 3] * 2)]
    assert words(lowercase=True)[0] == (1, 1, 3, pytest.approx(200 * 2 / 6), 100)
    # Training targets know b and nothing else.
    assert [row[:3] for row in words(training_targets=iter(["b z"] * 10))] == [(0, 0, 3), (10, 99, 2)]


@pytest.mark.parametrize(
    ("matches", "total", "interval"),
    # The limit of n matches is n / (n + 1.96 ** 2).
    [(150, 150, (97.5030, 100)), (0, 150, (0, 2.4970)), (9, 10, (59.5850, 98.2124)), (75, 150, (42.0990, 57.9010))],
)
def test_interval_of_exact_match_is_that_of_wilson(matches, total, interval):
    outputs = ["a"] * matches + ["b"] * (total - matches)
    [result] = compute_metrics(outputs, ["a"] * total, ["exact_match"], num_bootstrap_samples=10).values()
    assert result["confidence_interval"] == pytest.approx(interval, abs=2e-4)


def test_interval_of_evaluate_is_sacrebleus_and_stays_small(texts):
    outputs = texts.outputs["A"]
    results = compute_metrics(outputs, texts.references, ["bleu", "exact_match"], num_bootstrap_samples=100)
    expected = BLEU().corpus_score(outputs, [texts.references], n_bootstrap=100)
    assert results["bleu"]["confidence_mean"] == pytest.approx(expected._mean, rel=1e-12)
    assert results["bleu"]["confidence_var"] == expected._ci > 0 < results["exact_match"]["confidence_var"]
    assert (results["bleu"]["bs"], results["bleu"]["seed"]) == (100, "12345")
    low, high = results["bleu"]["confidence_interval"]
    assert high - low == pytest.approx(2 * expected._ci) and low < results["bleu"]["score"] < high
    for count in (MAX_RESAMPLED_BYTES // (4 * 120 * 4) + 1, 1):
        result = compute_metrics(outputs, texts.references, ["exact_match"], num_bootstrap_samples=count)["exact_match"]
        assert not {"confidence_mean", "bs"} & result.keys()
