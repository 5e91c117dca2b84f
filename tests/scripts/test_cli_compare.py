import json
import re

import pytest
from subcommands import execute
from tiny_generator import SOURCES, TARGETS

from metaphrase.scripts import compare
from metaphrase.scripts.__main__ import run

EVIL = """</td><script>window.hacked=1</script><b id="x">& 'q' שלום \u202e \x1b[31m"""
FEW = ["--paired_bs_n", "20", "--paired_ar_n", "30"]


@pytest.fixture
def systems(files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("\n".join([*TARGETS[:3], "", "Katze"]) + "\n", encoding="utf-8")
    (tmp_path / "b.txt").write_text("\n".join([*reversed(TARGETS[:3]), *TARGETS[3:]]) + "\n", encoding="utf-8")
    return ["a.txt", "b.txt", "--source", "test.en", "--target", "test.de", *FEW]


def test_figures_are_written_and_printed(systems, tmp_path, capsys):
    execute(compare, [*systems, "--metrics", "bleu", "chrf", "ter", "--output", "new/r.json"])
    scores = json.loads((tmp_path / "new" / "r.json").read_text(encoding="utf-8"))["scores"]
    text = capsys.readouterr().out
    row, other = scores["chrf"]["systems"]
    interval = "{:.2f} to {:.2f}".format(*row["interval"])
    assert re.search(rf"^chrF +a.txt +{row['score']:.2f} +{interval} +baseline$", text, re.MULTILINE)
    assert re.search(rf"^ +b.txt +{other['score']:.2f} .* \+{other['difference']:.2f}  ", text, re.MULTILINE)
    assert "TER (lower is better)  a.txt" in text and f"chrF: {scores['chrf']['signature']}" in text
    assert "20 paired bootstrap resamples by sacreBLEU, 30 trials of approximate randomization, seed 12345" in text
    assert f"line 4\n  source          {SOURCES[3]}\n" in text.partition("b.txt IS BETTER THAN a.txt")[2]


def test_external_scores_names_and_training_targets(systems, tmp_path, capsys):
    for name, values in {"a": "1 2 3 4 5", "b": "1 2 3 4 6"}.items():
        (tmp_path / f"{name}.metricx").write_text(values.replace(" ", "\n") + "\n", encoding="utf-8")
    words = [*systems, "--names", "old", "new", "--scores", "a.metricx", "b.metricx", "--scores_name", "MetricX"]
    execute(compare, [*words, "--scores_lower_is_better", "--train_target_file", "a.txt", "--output", "r.json"])
    report = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert report["systems"] == ["old", "new"] and report["words_counted_in"] == "training targets"
    assert [row["score"] for row in report["scores"]["MetricX"]["systems"]] == [3.0, 3.2]
    assert report["lower_is_better"] == ["MetricX"] and report["words"][0]["from"] == 0
    text = capsys.readouterr().out
    assert "MetricX (lower is better)  old     3.0000" in text and "new IS WORSE THAN old" in text
    assert "IS BETTER" not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.txt", "--target", "test.de"], "`outputs` must be at least two files"),
        (["--names", "x", "x"], "and `names` one for each and different, got 'a.txt b.txt' and 'x x'."),
        (["--target", "short.de"], "must have as many lines as `target`, got 5 in 'a.txt' and 2 in 'short.de'."),
        (["--target", "empty.de"], "`target` must have at least one line, got the empty file 'empty.de'."),
        (["--output", "r.txt"], "`output` must end in .json or .html, got 'r.txt'."),
        (["--output", "link.json"], "`output` must be another file than `outputs[1]`, got 'link.json' for both."),
        (["--metrics", "comet"], "A name in `metrics` must be one of"),
        (["--scores_name", "x"], "`scores` must be given with `scores_name`, got None and 'x'."),
        (["--scores", "short.de"], "`scores` must be one file for each system, got 1 files for 2 systems."),
        (["--scores", "nan", "nan"], "`scores` must hold a finite number on each line, got others in 'nan'."),
        (["--scores", "a.txt", "a.txt"], "`scores` must hold a finite number on each line, got others in 'a.txt'."),
        (["--scores", "nan", "nan", "--scores_name", "chrf"], "`scores_name` must not be the name of one of `metrics`"),
    ],
    ids=str,
)
def test_mistakes_are_found_before_any_work(words, message, systems, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "compute_segments", lambda *_: pytest.fail("Work has begun."))
    for name, text in {"short.de": "eine\nKatze\n", "empty.de": "", "nan": "nan\n" * 5}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "link.json").symlink_to("b.txt")
    words = words if words[0] == "a.txt" else [*systems, *words]
    assert run("compare", words) == 2
    said = capsys.readouterr().err
    assert said.startswith("metaphrase compare: error: ") and message in said
    assert (tmp_path / "b.txt").stat().st_size


def test_files_of_one_name_are_named_by_their_paths(systems, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "a.txt").write_bytes((tmp_path / "b.txt").read_bytes())
    execute(compare, ["a.txt", "run/a.txt", *systems[2:]])
    assert "run/a.txt IS BETTER THAN a.txt" in capsys.readouterr().out


def test_page_stands_alone_and_texts_are_inert(systems, tmp_path, capsys):
    (tmp_path / "b.txt").write_text("\n".join([EVIL, *TARGETS[1:4], "Katze " * 60]) + "\n", encoding="utf-8")
    (tmp_path / "test.en").write_text("\n".join([EVIL, *SOURCES[1:]]) + "\n", encoding="utf-8")
    execute(compare, [*systems, "--names", "a<b", "system_" * 9, "--output", "r.html"])
    assert "\x1b" not in capsys.readouterr().out
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|@import|url\(|<script|<link|<img|<iframe|\{\{", text)
    assert "&lt;/td&gt;" in text and "\u202e" not in text and "\\x1b[31m" in text
    assert "<title>" + "system_" * 9 + " against a&lt;b</title>" in text
    assert '<dd dir="auto">Katze<mark> Katze Katze' in text
