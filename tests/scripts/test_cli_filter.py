import logging
import os

import pytest
from subcommands import execute

from metaphrase.analysis.scoring import dual_scores
from metaphrase.inference import Generator
from metaphrase.scripts import filter as script
from metaphrase.scripts.__main__ import run

SKIPPED = ["--skip_rules", "encoding"]


@pytest.fixture
def pairs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good = "A dog sleeps.\tUn perro duerme."
    lines = [good, "A cat.\tA cat.", "A bird sings.\tUn ave", good]
    (tmp_path / "pairs.tsv").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    for side, name in enumerate(("en", "es")):
        texts = "".join(f"{line.split(chr(9))[side]}\n" for line in lines)
        (tmp_path / f"pairs.{name}").write_text(texts, encoding="utf-8")
    return tmp_path


def test_one_file_and_two_files_give_the_same_pairs(pairs, caplog):
    caplog.set_level(logging.INFO)
    execute(script, ["pairs.tsv", "--output", "clean.tsv", *SKIPPED])
    execute(script, ["--source", "pairs.en", "--target", "pairs.es", "--output", "clean.en", "clean.es", *SKIPPED])
    assert (pairs / "clean.tsv").read_text(encoding="utf-8") == "A dog sleeps.\tUn perro duerme.\n"
    assert (pairs / "clean.en").read_text(encoding="utf-8") == "A dog sleeps.\n"
    assert (pairs / "clean.es").read_text(encoding="utf-8") == "Un perro duerme.\n"
    assert "end_punctuation" in caplog.text and "`copy` dropped 25 % of the pairs" in caplog.text


def test_a_finished_run_is_not_repeated_and_not_lost(pairs, capsys):
    words = ["pairs.tsv", "--output", "clean.tsv", *SKIPPED]
    execute(script, words)
    (pairs / "clean.tsv").write_text("mine\n", encoding="utf-8")
    execute(script, [*words, "--resume"])
    # Nor is it taken for a run of other options or files.
    assert run("filter", words) == run("filter", [*words, "--resume", "--report", "report.json"]) == 2
    # A file touched within one tick of the clock would be as old as the output.
    os.utime(pairs / "pairs.tsv", ns=((pairs / "clean.tsv").stat().st_mtime_ns + 10**9,) * 2)
    assert run("filter", [*words, "--resume"]) == 2
    assert capsys.readouterr().err.count("`output` must be a new file, got 'clean.tsv'") == 3
    assert (pairs / "clean.tsv").read_text(encoding="utf-8") == "mine\n"
    execute(script, [*words, "--overwrite"])
    assert (pairs / "clean.tsv").read_text(encoding="utf-8") != "mine\n"
    (pairs / "clean.tsv.partial").mkdir()
    assert run("filter", words) == 2
    assert "Pass --resume or --overwrite" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pairs.tsv", "--output", "clean.txt"], "`output` must be a .tsv or .jsonl file"),
        (["pairs.tsv", "--output", "a.en", "a.es", "--weight_column", "2"], "or two text files without weights"),
        (["pairs.tsv", "--output", "pairs.tsv"], "must be another one, got 'pairs.tsv' twice"),
        (["pairs.tsv", "--output", "a.tsv", "--rules", "language"], "`source_lang` or `target_lang` must be given"),
        (["pairs.tsv", "--output", "a.tsv", "--max_length_ratio", "0.1"], "`max_length_ratio` must be at least 1"),
        (["pairs.tsv", "--output", "a.tsv", "--rules", "dual_cross_entropy"], "`forward_model` or `backward_model`"),
        (
            ["pairs.tsv", "--output", "a.tsv", "--forward_model", "."],
            "`backward_model` must be given with `forward_model`",
        ),
        (
            ["--source", "pairs.en", "--output", "a.tsv"],
            "`source_file` with `target_file`, and `dataset_name`, got source_file",
        ),
        (["pairs.tsv", "--output", "a.tsv", "--source_lang", "en", "--rules", "copy"], "`language` must be one of"),
        (["keys.jsonl", "--output", "a.tsv"], "must hold at least one pair, got none in 2 records. keys.jsonl, line 1"),
    ],
)
def test_mistakes_are_refused_before_any_work(pairs, capsys, words, message):
    (pairs / "keys.jsonl").write_text('{"en": "a", "es": "b"}\n' * 2, encoding="utf-8")
    before = {path.name for path in pairs.iterdir()}
    assert run("filter", words) == 2
    assert message in capsys.readouterr().err
    assert {path.name for path in pairs.iterdir()} == before


def test_pairs_that_two_models_do_not_expect_are_dropped(pairs, cli_model, other_cli_model, caplog):
    rows = [line.split("\t") for line in (pairs / "pairs.tsv").read_text(encoding="utf-8").splitlines()][:3]
    forward, backward = (Generator.from_pretrained(name, device="cpu") for name in (cli_model, other_cli_model))
    scores = dual_scores(forward, backward, rows)
    least = sorted(scores)[1]
    words = ["pairs.tsv", "--output", "clean.tsv", "--rules", "duplicate", "dual_cross_entropy", "--device", "cpu"]
    words += ["--forward_model", cli_model, "--backward_model", other_cli_model, "--min_dual_score", str(least - 1e-9)]
    caplog.set_level(logging.INFO)
    execute(script, [*words, "--rejected", "rejected.tsv"])
    lines = {name: (pairs / name).read_text(encoding="utf-8").splitlines() for name in ("clean.tsv", "rejected.tsv")}
    assert lines["clean.tsv"] == ["\t".join(row) for row, score in zip(rows, scores, strict=True) if score >= least]
    assert sorted(line.split("\t")[0] for line in lines["rejected.tsv"]) == ["dual_cross_entropy", "duplicate"]
