import json

import numpy as np
import pytest
from subcommands import execute
from tiny_generator import save_generator, tiny_generator

from metaphrase.analysis.judges import Judge, choose, compute_features, read_candidates, tune

INDICES = np.array([0, 0, 0, 1, 1, 2])
TEXTS = ["a b", "a b c", "c", "d e", "d e f", "g"]
SCORES = np.array([-1.0, -1.5, -2.0, -0.5, -0.6, -0.1])
SOURCES = ["x", "y", "z"]
REFERENCES = ["a b c", "d e f", "g"]


def test_choices_follow_the_weights():
    features = {"forward": SCORES, "length": np.array([2.0, 3, 1, 2, 3, 1])}
    assert choose(features, {"forward": 1.0}, INDICES).tolist() == [0, 3, 5]
    assert choose(features, {"forward": 1.0, "length": 1.0}, INDICES).tolist() == [1, 4, 5]
    # The first of equal candidates.
    assert choose({"forward": np.zeros(6)}, {"forward": 1.0}, INDICES).tolist() == [0, 3, 5]


@pytest.mark.parametrize("metric", ["chrf", "wer"])
def test_tuned_weights_find_the_references(metric):
    features = {"forward": SCORES, "length": np.array([2.0, 3, 1, 2, 3, 1]), "noise": np.array([0.0, 1, 2, 3, 2, 1])}
    weights, best, first = tune(features, INDICES, TEXTS, REFERENCES, metric)
    assert [TEXTS[row] for row in choose(features, weights, INDICES)] == REFERENCES
    assert (best, first == best) == (pytest.approx(0 if metric == "wer" else 100), False) and weights["forward"] == 1


def test_backward_is_the_mean_of_the_source():
    reverse = tiny_generator(kind="byte")
    features = compute_features(SOURCES, INDICES, ["a dog", "a", "", "b", "c", "d"], SCORES, reverse)
    expected = [
        score.mean for score in reverse.score(["a dog", "a", "-", "b", "c", "d"], ["x", "x", "x", "y", "y", "z"])
    ]
    np.testing.assert_allclose(features["backward"], expected)
    assert features["length"].tolist() == [2, 1, 0, 1, 1, 1]


@pytest.mark.parametrize("is_better_lower", [True, False])
def test_more_is_better_in_all_scores(is_better_lower):
    judge = Judge("errors", lambda sources, targets, references: [len(text) for text in targets], is_better_lower)
    features = compute_features(SOURCES, INDICES, TEXTS, SCORES, judges=[judge])
    sign = -1 if is_better_lower else 1
    assert features["errors"].tolist() == [sign * len(text) for text in TEXTS]


@pytest.mark.parametrize(
    "lines", [["0 ||| a"], ["x ||| a ||| 1"], ["1 ||| a ||| 1"], ["0 ||| a ||| 1", "2 ||| b ||| 1"], []]
)
def test_other_lists_are_refused(lines):
    with pytest.raises(ValueError, match=r"list\.txt must hold"):
        read_candidates(iter(lines), "list.txt")


def test_candidates_of_a_model_are_reranked(tmp_path, capsys):
    folder, reverse = (save_generator(tiny_generator(kind="byte"), tmp_path / name) for name in ("model", "reverse"))
    for name, lines in (("source", ["a dog", "the cat"]), ("target", ["dog", "the"])):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    source, weights, nbest = (str(tmp_path / name) for name in ("source", "weights.json", "nbest"))
    options = "--num_beams 4 --num_return_sequences 4 --max_new_tokens 6 --n_best".split()  # noqa: SIM905
    execute("generate", [str(folder), "--input", source, *options, "--output", nbest])
    (tmp_path / "scores").write_text("0.5\n" * 8, encoding="utf-8")
    words = [nbest, "--source", source, "--weights", weights, "--scores", str(tmp_path / "scores")]
    words += ["--reverse_model", str(reverse)]
    execute("rerank", [*words, "--target", str(tmp_path / "target"), "--tuned_metric", "cer"])
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "weights.json").read_text("utf-8"))
    assert json.loads((tmp_path / "weights.json").read_text("utf-8")).keys() >= {"scores_1", "backward"}
    execute("rerank", [*words, "--output", str(tmp_path / "out")])
    candidates = [line.split(" ||| ")[1] for line in (tmp_path / "nbest").read_text("utf-8").splitlines()]
    chosen = (tmp_path / "out").read_text("utf-8").splitlines()
    assert [line in candidates[start : start + 4] for line, start in zip(chosen, (0, 4), strict=True)] == [True, True]
    with pytest.raises(ValueError, match=r"`weights` must have the scores of this command"):
        execute("rerank", [*words[:-2], "--output", str(tmp_path / "other")])
    with pytest.raises(ValueError, match="one of the arguments --target --output is required"):
        execute("rerank", words)
