"""Tests of judges: a MetricX of random weights beside a plain loop of transformers, functions, and the subcommands."""

import dataclasses
import json
import math
import sys

import numpy as np
import pytest
import torch
from subcommands import execute
from tiny_generator import save_generator, tiny_generator
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForSeq2SeqLM, PreTrainedTokenizerFast

from metaphrase.analysis.judges import load_judge
from metaphrase.conversion import convert

SOURCES = ["a dog runs", "the cat sleeps here", "a"]
TARGETS = ["ein Hund", "die Katze schläft", "b"]
REFERENCES = ["ein Hund läuft", "die Katze schläft hier", "ein"]


@pytest.fixture(scope="module")
def metricx(tmp_path_factory):
    """A folder of mT5 with a tokenizer of characters, as MetricX's class saves it."""
    folder = tmp_path_factory.mktemp("judge") / "metricx-24-tiny"
    entries = ["<pad>", "</s>", "<unk>", "<extra_id_10>", *map(chr, range(32, 127)), "ä"]
    inner = Tokenizer(models.WordLevel({entry: number for number, entry in enumerate(entries)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **special, extra_special_tokens=["<extra_id_10>"])
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    fields = {"vocab_size": len(entries), "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    config = AutoConfig.for_model("mt5", **fields, decoder_start_token_id=0, initializer_factor=8.0)
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    model.lm_head.weight.data[3] = model.lm_head.weight.data[3].abs()
    model.save_pretrained(folder)
    return folder


def plain_scores(folder, prompts, limit=1536):
    """Score one prompt after the other, as google-research/metricx does."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model, scores = AutoModelForSeq2SeqLM.from_pretrained(folder).eval(), []
    for prompt in prompts:
        ids = tokenizer(prompt, truncation=True, max_length=limit, return_tensors="pt").input_ids[:, :-1]
        with torch.no_grad():
            logits = model(input_ids=ids, decoder_input_ids=torch.zeros(1, 1).long()).logits
        scores.append(logits[0, 0, 3].clamp(0, 25).item())
    return scores


@pytest.mark.parametrize("year", ["24", "23"])
def test_metricx_equals_a_plain_loop(year, metricx, tmp_path):
    convert(metricx, tmp_path / f"metricx-{year}-ours")
    rows = list(zip(SOURCES, TARGETS, REFERENCES, strict=True))
    if year == "24":
        prompts = [f"source: {source} candidate: {target}" for source, target, _ in rows]
        with_reference = [f"{text} reference: {row[2]}" for text, row in zip(prompts, rows, strict=True)]
    else:
        prompts = [f"candidate: {target} source: {source}" for source, target, _ in rows]
        with_reference = [f"candidate: {target} reference: {reference}" for _, target, reference in rows]
    judge = load_judge(str(tmp_path / f"metricx-{year}-ours"))
    for references, texts in ((None, prompts), (REFERENCES, with_reference)):
        expected = plain_scores(metricx, texts)
        assert judge.score(SOURCES, TARGETS, references) == pytest.approx(expected, abs=1e-4) and max(expected) > 0
    assert judge.is_better_lower


def test_long_texts_are_cut_as_by_metricx(metricx):
    judge, target = load_judge(str(metricx)), "b" * 1600
    expected = plain_scores(metricx, [f"source: a candidate: {target}"])
    assert judge.score(["a"], [target], None) == pytest.approx(expected, abs=1e-4)


def length(sources, targets, references):
    return [len(target) for target in targets]


ALONE = ["the cat sleeps", "a dog", "the small cat sees a dog", "the cat sleeps"]
CALLS = []


def errors(sources, targets, references):
    """Count the letters that a target has more or less than its reference, or else its source."""
    CALLS.append(list(zip(sources, targets, references or sources, strict=True)))
    return [abs(len(target) - len(other)) for _, target, other in CALLS[-1]]


errors.lower_is_better = True


def broken(sources, targets, references):
    return [float("nan")] * len(targets)


@pytest.fixture
def module(monkeypatch):
    CALLS.clear()
    monkeypatch.setitem(sys.modules, "own_scores", sys.modules[__name__])
    return "own_scores"


def test_a_function_judges(module):
    judge = load_judge(f"{module}:length")
    segments = judge.segments(SOURCES, TARGETS, None)
    assert segments.score() == sum(map(len, TARGETS)) / 3 and not judge.is_better_lower
    with pytest.raises(ValueError, match="must return finite scores, got nan for 'ein Hund'"):
        load_judge(f"{module}:broken").segments(SOURCES, TARGETS, None)
    with pytest.raises(ValueError, match="must return 2 scores, got 3"):
        dataclasses.replace(judge, score=lambda *_: [1, 2, 3], _known={}).segments(SOURCES[:2], TARGETS[:2], None)


def test_equal_texts_are_scored_once(module, monkeypatch):
    monkeypatch.setattr("metaphrase.analysis.judges._MOST_ROWS", 2)
    judge = load_judge(f"{module}:errors")
    for _ in range(2):
        values = judge.values([*SOURCES, *SOURCES], [*TARGETS, *TARGETS], [*REFERENCES, *REFERENCES])
        assert values.tolist() == [6, 5, 2] * 2
    # Calls have two rows at most. Of the three scores, two are remembered.
    assert [len(call) for call in CALLS] == [2, 1, 1]
    # Without a reference, another score.
    assert judge.values(SOURCES[:1], TARGETS[:1]).tolist() == [2] and judge.utilities(["a"], ["abc"]).tolist() == [-2]
    assert judge.values([], []).tolist() == []


@pytest.mark.parametrize("name", ["own_scores:missing", "no_such_module:score"])
def test_a_function_that_is_missing_is_named(name, module):
    with pytest.raises(ValueError, match=f"A judge must name a module and its function, got '{name}'"):
        load_judge(name)


def test_evaluate_and_compare_take_judges(module, tmp_path, capsys):
    folder = save_generator(tiny_generator(kind="byte"), tmp_path / "model")
    for name, lines in (("source", SOURCES), ("target", REFERENCES), ("first", TARGETS), ("second", SOURCES)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    files = ["--source", str(tmp_path / "source"), "--target", str(tmp_path / "target")]
    words = [*files, "--metric", f"{module}:length", "--output", str(tmp_path / "metrics.json")]
    execute("evaluate", [str(folder), *words, "--max_new_tokens", "4", "--metrics", "chrf"])
    scores = json.loads((tmp_path / "metrics.json").read_text("utf-8"))["scores"]
    assert scores["length"]["score"] <= 4 and scores["length"]["signature"] == "mean|judge:length"
    outputs = [str(tmp_path / "first"), str(tmp_path / "second")]
    execute("compare", [*outputs, *files, "--metric", f"{module}:length", "--metrics", "chrf"])
    assert "length" in capsys.readouterr().out
    with pytest.raises(ValueError, match="`source` must be given with `metric`"):
        execute("compare", [*outputs, *files[2:], "--metric", f"{module}:length"])


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_text("".join(f"{line}\n" for line in ALONE), encoding="utf-8")
    rows = [*zip(SOURCES, TARGETS, strict=True), ("a dog runs", "ein"), ("the cat", "die Katze schläft hier")]
    (tmp_path / "pairs.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in rows), encoding="utf-8")
    return rows


@pytest.mark.parametrize("has_references", [True, False])
def test_distilled_targets_are_the_best_of_a_judge(has_references, module, files, tmp_path):
    generator = tiny_generator(kind="byte")
    folder, beams = save_generator(generator, tmp_path / "model"), {"num_beams": 4, "num_return_sequences": 4}
    sources = [row[0] for row in files] if has_references else ALONE
    others = [row[1] for row in files] if has_references else sources
    n_best = generator.generate_n_best(sources, **beams)
    words = ["--input", "pairs.tsv" if has_references else "in.txt", "--chunk_size", "3", "--output", "best.jsonl"]
    words += [word for name, value in beams.items() for word in (f"--{name}", str(value))]
    execute("distill", [str(folder), *words, "--metric", f"{module}:errors"])
    best = [
        min(row, key=lambda item, other=other: abs(len(item.text) - len(other))).text
        for row, other in zip(n_best, others, strict=True)
    ]
    rows = [json.loads(line) for line in (tmp_path / "best.jsonl").read_text("utf-8").splitlines()]
    assert [row["target"] for row in rows] == best
    assert (best != [row[0].text for row in n_best]) == has_references
    # One call for each chunk. The last source without references came before.
    assert len(CALLS) == (2 if has_references else 1)


def test_pairs_of_poor_quality_are_dropped_and_counted(module, files, tmp_path, monkeypatch):
    monkeypatch.setattr("metaphrase.filtering.run._PAIRS_PER_CHUNK_OF_MODELS", 3)
    words = ["pairs.tsv", "--output", "clean.tsv", "--rejected", "no.tsv", "--report", "report.json"]
    words += ["--rules", "quality"]
    execute("filter", [*words, "--metric", f"{module}:errors", "--worst_score", "2"])
    poor = [row for row in files if abs(len(row[0]) - len(row[1])) > 2]
    lines = {name: (tmp_path / name).read_text("utf-8").splitlines() for name in ("clean.tsv", "no.tsv")}
    assert lines["clean.tsv"] == ["\t".join(row) for row in files if row not in poor]
    assert lines["no.tsv"] == ["\t".join(("quality", *row)) for row in poor] and len(poor) == 2
    report = json.loads((tmp_path / "report.json").read_text("utf-8"))
    assert report["dropped"] == {"quality": 2} and report["settings"]["worst_score"] == 2
    assert [len(call) for call in CALLS] == [3, 2]
    # More is better in this score.
    execute("filter", [*words, "--overwrite", "--metric", f"{module}:length", "--worst_score", "8"])
    assert {line.split("\t")[2] for line in (tmp_path / "no.tsv").read_text("utf-8").splitlines()} == {"b", "ein"}
    # Scores become weights: of an error 1 / (1 + error). A weight of the pair is a factor.
    (tmp_path / "weighted.tsv").write_text("a\tabc\t0.5\nab\tb\t1\n", "utf-8")
    for name, weights in (("errors", [0.5 / 3, 0.5]), ("length", [0.5 * 3, 1])):
        words = ["weighted.tsv", "--source_column", "0", "--target_column", "1", "--weight_column", "2", "--overwrite"]
        words += ["--output", "w.tsv", "--rules", "quality", "--metric", f"{module}:{name}", "--add_weights"]
        execute("filter", [*words, "--worst_score", "9" if name == "errors" else "0"])
        rows = [line.split("\t") for line in (tmp_path / "w.tsv").read_text("utf-8").splitlines()]
        assert [float(row[2]) for row in rows] == pytest.approx(weights)


def test_a_judge_is_the_utility_of_minimum_bayes_risk(module):
    generator = tiny_generator(kind="byte", batch_size=2)
    n_best = generator.generate_n_best(SOURCES, num_beams=4, num_return_sequences=4, length_penalty=0.0)
    expected = []
    for row in n_best:
        weights = np.array([math.exp(item.score) for item in row])
        risks = [weights @ [abs(len(item.text) - len(other.text)) for other in row] / weights.sum() for item in row]
        expected.append((row[int(np.argmin(risks))].text, pytest.approx(-min(risks))))
    options = {"num_candidates": 4, "num_beams": 4, "length_penalty": 0.0}
    chosen = generator.generate_mbr(SOURCES, utility=f"{module}:errors", **options)
    assert [(item.text, item.score) for item in chosen] == expected
    assert [item.text for item in chosen] != [row[0].text for row in n_best]
    # One call for the pairs of a batch of two sources. Chunks of a stream share the judge and its scores.
    assert [len(call) for call in CALLS] == [len({*call}) for call in CALLS] and len(CALLS) == 2
    assert generator.generate_mbr(SOURCES, utility=f"{module}:errors", **options) == chosen and len(CALLS) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("distill model --input in.txt --metric own_scores:errors", "`num_return_sequences` above 1, got 1"),
        ("distill model --input in.txt --metric own_scores:errors --select bleu", "not allowed with argument --metric"),
        ("filter pairs.tsv --output a.tsv --metric own_scores:errors", "`worst_score` must be given with `metric`"),
        ("filter pairs.tsv --output a.tsv --rules quality", "`metric` or `worst_score` must be given with the rule"),
    ],
)
def test_half_a_request_is_refused(words, message, module, files, tmp_path):
    save_generator(tiny_generator(kind="byte"), tmp_path / "model")
    name, *rest = words.split()
    with pytest.raises(ValueError, match=message):
        execute(name, rest)
