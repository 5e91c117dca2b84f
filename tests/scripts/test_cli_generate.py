import contextlib
import gzip
import io
import itertools
import re
import sys

import pytest
import torch
from cli_texts import ODD_LINES, as_lines, damaged, targets_of
from subcommands import execute
from tiny_generator import SOURCES, save_generator, tiny_generator

from metaphrase.inference import Generator, ScoredText
from metaphrase.scripts import generate
from metaphrase.scripts.__main__ import run


def run_generate(folder, text, monkeypatch, *options):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        execute(generate, [folder, "--device", "cpu", *options])
    assert output.getvalue() == "" or output.getvalue().endswith("\n")
    return output.getvalue().split("\n")[:-1]


@pytest.mark.parametrize(("chunk_size", "end"), [("1", "\n"), ("4", "\r\n"), ("100", "")])
def test_generate_writes_a_line_for_each_line(cli_model, monkeypatch, chunk_size, end):
    text = ((end or "\n").join(ODD_LINES[:5]) + end).encode()
    lines = run_generate(cli_model, text, monkeypatch, "--chunk_size", chunk_size)
    assert lines == as_lines(targets_of(ODD_LINES[:5])) and lines[3:] == ["", ""] and "" not in lines[:3]
    assert run_generate(cli_model, b"", monkeypatch) == []


def test_generate_reads_and_writes_files(cli_model, tmp_path, monkeypatch):
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes("\n".join(ODD_LINES).encode())
    execute(generate, [cli_model, "--device", "cpu", "--input", str(source), "--output", str(target)])
    written = target.read_bytes().decode().split("\n")
    assert written == [*as_lines(targets_of(ODD_LINES)), ""]
    assert run_generate(cli_model, source.read_bytes(), monkeypatch) == written[:-1]
    assert run_generate(cli_model, b"\xef\xbb\xbf" + source.read_bytes(), monkeypatch) == written[:-1]


def test_generate_n_best(cli_model, tmp_path, monkeypatch):
    options = ["--num_beams", "3", "--num_return_sequences", "3"]
    lines = run_generate(cli_model, ("\n".join(SOURCES) + "\n\n").encode(), monkeypatch, *options)
    rows = [line.split(" ||| ") for line in lines]
    assert [row[0] for row in rows] == [str(index) for index in range(6) for _ in range(3)]
    for index, best in enumerate(as_lines(targets_of(SOURCES, num_beams=3))):
        scores = [float(row[-1]) for row in rows[3 * index : 3 * index + 3]]
        assert " ||| ".join(rows[3 * index][1:-1]) == best and scores == sorted(scores, reverse=True) and scores[0] < 0
    assert lines[-3:] == ["5 |||  ||| 0.000000"] * 3
    # The model's own setting counts for n-best lists alone.
    generator = tiny_generator()
    generator.model.generation_config.update(num_beams=2, num_return_sequences=2)
    folder = str(save_generator(generator, tmp_path))
    assert len(run_generate(folder, b"the cat\n\na cat\n", monkeypatch)) == 3
    assert len(run_generate(folder, b"the cat\n\na cat\n", monkeypatch, "--n_best")) == 6


def test_generate_by_way_of_a_third_language(cli_model, other_cli_model, tmp_path, monkeypatch):
    pivot = ["--pivot", other_cli_model]
    other = Generator.from_pretrained(other_cli_model, device="cpu")
    expected = as_lines(other.generate(targets_of(SOURCES)))
    text = "\n".join(SOURCES).encode()
    for chunk_size in ("2", "100"):
        assert run_generate(cli_model, text, monkeypatch, *pivot, "--chunk_size", chunk_size) == expected
    n_best = ["--n_best", "--num_beams", "2", "--num_return_sequences", "2"]
    assert len(run_generate(cli_model, text, monkeypatch, *pivot, *n_best)) == 2 * len(SOURCES)
    (tmp_path / "in").write_bytes(text)
    words = [cli_model, "--device", "cpu", *pivot, "--input", str(tmp_path / "in"), "--chunk_size", "2"]
    (tmp_path / "out").write_text("".join(line + "\n" for line in expected[:3]), encoding="utf-8")
    execute(generate, [*words, "--output", str(tmp_path / "out"), "--resume"])
    assert (tmp_path / "out").read_text(encoding="utf-8").split("\n")[:-1] == expected
    pages = run_generate(cli_model, b"<p>a cat</p>\n<p>the dog</p>", monkeypatch, *pivot, "--format", "html")
    assert [page[:3] + page[-4:] for page in pages] == ["<p></p>"] * 2
    with pytest.raises(ValueError, match="`num_processes` must be left out with `pivot`"):
        run_generate(cli_model, b"", monkeypatch, *pivot, "--num_processes", "2")


def test_generate_takes_phrases(cli_model, monkeypatch):
    text = ("\n".join(SOURCES) + "\n").encode()
    words = ["--must_contain", "ab", "cd", "--never_contain", "e", "g", "--must_contain", "f"]
    options = {"must_contain": [["ab", "cd"], ["f"]], "never_contain": ["e", "g"]}
    assert run_generate(cli_model, text, monkeypatch, *words) == as_lines(targets_of(SOURCES, **options))


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3, "early_stopping": "never", "length_penalty": -5.0},
        {"num_beams": 3, "min_new_tokens": 7, "renormalize_logits": True},
        {"num_beams": 1, "min_new_tokens": 7, "no_repeat_ngram_size": 1, "forced_eos_token_id": 40},
        {"num_beams": 3, "forced_bos_token_id": 40},
    ],
    ids=str,
)
def test_options_mean_what_they_mean_to_transformers(cli_model, monkeypatch, options):
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    lines = run_generate(cli_model, ("\n".join(SOURCES) + "\n").encode(), monkeypatch, *words)
    generator = tiny_generator(kind="byte")
    expected = []
    for ids in generator.encode(SOURCES):
        written = generator.model.generate(torch.tensor([ids]), **options)[:, 1:]
        end = generator.tokenizers.target.eos_token_id
        rows = [row[: row.index(end)] if end in row else row for row in written.tolist()]
        expected += generator.tokenizers.decode_targets(rows)
    assert lines == as_lines(expected)


def test_an_ensemble_writes_what_its_generator_does(cli_model, other_cli_model, monkeypatch):
    text = "\n".join(SOURCES).encode()
    lines = run_generate(cli_model, text, monkeypatch, "--ensemble", other_cli_model)
    together = Generator.from_pretrained([cli_model, other_cli_model], device="cpu")
    assert lines == as_lines(together.generate(SOURCES)) != as_lines(targets_of(SOURCES))


def test_an_assistant_changes_nothing_and_its_tokens_are_counted(cli_model, other_cli_model, monkeypatch, caplog):
    text, plain = "\n".join(SOURCES).encode(), as_lines(targets_of(SOURCES))
    assert run_generate(cli_model, text, monkeypatch, "--assistant_model", other_cli_model) == plain
    caplog.set_level("INFO")
    options = ["--assistant_model", cli_model, "--num_assistant_tokens", "1"]
    assert run_generate(cli_model, text, monkeypatch, *options) == plain
    assert re.search(r"Of \d+ drafted tokens 100\.0 % were accepted", caplog.text)


def test_minimum_bayes_risk_writes_what_its_generator_does(cli_model, monkeypatch):
    text = ("\n".join(SOURCES) + "\n\n").encode()
    options = {"num_beams": 4, "num_candidates": 4}
    expected = tiny_generator(kind="byte").generate_mbr([*SOURCES, ""], utility="bleu", **options)
    words = ["--num_beams", "4", "--mbr_candidates", "4", "--mbr_utility", "bleu", "--window", "2"]
    assert run_generate(cli_model, text, monkeypatch, *words) == as_lines([scored.text for scored in expected])
    rows = run_generate(cli_model, text, monkeypatch, *words, "--n_best")
    scores = [float(row.split(" ||| ")[-1]) for row in rows]
    assert scores == pytest.approx([scored.score for scored in expected], abs=1e-3)
    sampled = [run_generate(cli_model, text, monkeypatch, "--mbr_candidates", "3", "--seed", seed) for seed in "112"]
    assert sampled[0] == sampled[1] != sampled[2] and len(sampled[0]) == 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--overwrite --num_beams 2 --num_return_sequences 4", "num_return_sequences"),
        ("--overwrite --mbr_candidates 4 --num_return_sequences 3", "num_return_sequences"),
        ("--overwrite --must_contain=", "A phrase must be a text"),
        ("--overwrite --chunk-size 0", "`chunk_size` must be at least 1, got 0."),
        ("--overwrite --max_line_characters 4", "at most 4 characters, but line 1 has more"),
        *((f"--{word} --output o.gz", "`output` must not end in .gz, ") for word in ("overwrite", "resume")),
        ("--num_return_sequences 0 --n_best --resume", "num_return_sequences"),
        ("--overwrite --mbr_utility bleu", "`mbr_candidates` must be given with `mbr_utility`, got None and 'bleu'"),
        ("--overwrite --num_assistant_tokens 3", "`assistant_model` must be given with `num_assistant_tokens`"),
        ("--overwrite --input out", "`output` must be another file than `input`"),
        ("--overwrite --input none", "`input` must be a file that exists, got"),
        ("", "`output` must be a new file, got 'out'. Pass --overwrite"),
    ],
)
def test_mistakes_do_not_empty_the_output(cli_model, words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").write_text("a cat\n", encoding="utf-8")
    (tmp_path / "out").write_text("an older target\n", encoding="utf-8")
    files = ["--input", "in", "--output", "out"]
    assert run("generate", [cli_model, "--device", "cpu", *files, *words.split()]) == 2
    assert message in capsys.readouterr().err
    assert (tmp_path / "out").read_text(encoding="utf-8") == "an older target\n"


@pytest.mark.parametrize("num_lines", [0, 1])
def test_an_interruption_names_resume_if_there_is_an_output(num_lines, cli_model, tmp_path, monkeypatch, capsys):
    def interrupted(generator, lines, **options):
        yield from [[ScoredText("ein", 0.0)] for _ in itertools.islice(lines, num_lines)]
        raise KeyboardInterrupt

    (tmp_path / "in").write_text("a cat\na dog\n", encoding="utf-8")
    monkeypatch.setattr(Generator, "generate_stream", interrupted)
    files = ["--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]
    assert run("generate", [cli_model, "--device", "cpu", *files]) == 130
    hint = f" {tmp_path / 'out'} ends with source 1. Use --resume to go on." if num_lines else ""
    assert capsys.readouterr().err.endswith(f"metaphrase generate: interrupted.{hint}\n")


def test_a_model_whose_logits_are_no_numbers_is_named_where_it_samples(tmp_path, monkeypatch, capsys):
    generator = tiny_generator()
    generator.model.lm_head.weight.data.fill_(3e38)
    folder = save_generator(generator, tmp_path / "model")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a cat\n")))
    assert run("generate", [str(folder), "--device", "cpu", "--do_sample"]) == 2
    assert "Each row of logits must have a finite entry" in capsys.readouterr().err


def test_standard_output_is_utf_8_with_line_feeds_whatever_the_locale(cli_model, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(ODD_LINES).encode())))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", newline="\r\n"))
    execute(generate, [cli_model, "--device", "cpu"])
    assert written.getvalue().decode() == "".join(line + "\n" for line in as_lines(targets_of(ODD_LINES)))


@pytest.mark.parametrize("name", ["plain.gz", "damaged.gz", "cut.gz", "checksum.gz"])
def test_a_damaged_input_is_a_mistake_of_one_line(name, cli_model, tmp_path, capsys):
    whole = gzip.compress("".join(f"the cat {number}\n" for number in range(900)).encode())
    made = {"plain.gz": b"the cat\n", "damaged.gz": damaged(whole), "cut.gz": whole[: len(whole) // 2]}
    made["checksum.gz"] = whole[:-6] + b"??" + whole[-4:]
    (tmp_path / name).write_bytes(made[name])
    assert run("generate", [cli_model, "--device", "cpu", "--input", str(tmp_path / name)]) == 2
    said = capsys.readouterr().err
    assert "metaphrase generate: error: " in said and "Traceback" not in said
    assert f"`{tmp_path / name}` must be a compressed file that is whole, got: " in said
