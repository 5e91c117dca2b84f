import errno
import io
import json
import os
import re
import sys
from pathlib import Path

import pytest
from cli_texts import contents, targets_of
from matplotlib.figure import Figure
from subcommands import execute, name_of
from tiny_generator import SOURCES, TARGETS, save_generator, tiny_generator, tiny_pair
from tiny_models import tiny_model

from metaphrase.inference import Generator, cross_attentions, format_pharaoh, word_alignment
from metaphrase.scripts import explain
from metaphrase.scripts.__main__ import run


def test_explain_writes_a_page_of_several_pairs(cli_model, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.chdir(tmp_path)
    words = [cli_model, "--device", "cpu", "--source", "the <b> cat", "--source", "two dogs", "--max_new_tokens", "3"]
    execute(explain, words)
    text = (tmp_path / "explanation.html").read_text(encoding="utf-8")
    assert "the \\u003cb\\u003e cat" in text and "two dogs" in text and "Written to explanation.html" in caplog.text
    assert "Targets that are unfinished at the length limit: 2 (sources: 2)." in caplog.text
    pairs = json.loads(re.search(r'id="data">(.*?)</script>', text)[1])["pairs"]
    targets = targets_of(["the <b> cat", "two dogs"], max_new_tokens=3)
    assert [pair["target"] for pair in pairs] == targets
    execute(explain, [*words, "--output", str(tmp_path / "again.html")])
    assert (tmp_path / "again.html").read_text(encoding="utf-8") == text


@pytest.mark.parametrize("kind", ["page", "picture"])
def test_a_full_disk_leaves_no_half_file_and_no_name_of_this_machine(cli_model, tmp_path, kind, monkeypatch, capsys):
    path = tmp_path / ("page.html" if kind == "page" else "map.png")
    words = [cli_model, "--device", "cpu", "--source", "the cat", "--target", "a", "--output", str(path)]
    module = explain if kind == "page" else "attention"
    execute(module, words)
    written = path.read_bytes()
    assert Path(cli_model).parent.name.encode() not in written
    if kind == "page":
        assert b"<title>Explanation of model</title>" in written

    def fill_disk(self, *arguments, **_):
        target = self if isinstance(self, Path) else arguments[0]
        target.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for owner, name in ((Path, "write_text"), (Figure, "savefig")):
        monkeypatch.setattr(owner, name, fill_disk)
    assert run(name_of(module), words) == 2 and "No space left on device" in capsys.readouterr().err
    assert path.read_bytes() == written and [file.name for file in tmp_path.iterdir()] == [path.name]


def test_attention_draws_a_picture(cli_model, tmp_path, caplog):
    caplog.set_level("INFO")
    pictures = {}
    for name, words in {"all": ["--layer", "mean"], "last": [], "head": ["--layer", "0", "--head", "1"]}.items():
        path = tmp_path / f"{name}.png"
        words += ["--source", "the cat", "--target", "die $x$", "--output", str(path)]
        execute("attention", [cli_model, "--device", "cpu", *words])
        pictures[name] = path.read_bytes()
    assert all(picture.startswith(b"\x89PNG") for picture in pictures.values()) and len(set(pictures.values())) == 3
    assert "Target: die $x$" in caplog.text


def test_attention_writes_links(cli_model, tmp_path, monkeypatch, capsys, caplog):
    caplog.set_level("INFO")
    files = {"source": [*SOURCES[:2], "", SOURCES[2]], "target": [*TARGETS[:2], "", TARGETS[2]]}
    for name, lines in files.items():
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    # The last layer is the default.
    words = [cli_model, "--device", "cpu", "--target_input", str(tmp_path / "target")]
    execute("attention", [*words, "--input", str(tmp_path / "source"), "--output", str(tmp_path / "words.align")])
    maps = cross_attentions(
        tiny_generator(kind="byte"), *([*side[:2], side[2]] for side in (SOURCES, TARGETS)), layer=-1
    )
    expected = [format_pharaoh(word_alignment(given)) for given in maps]
    expected.insert(2, "")
    assert (tmp_path / "words.align").read_text(encoding="utf-8").splitlines() == expected
    assert all(re.fullmatch(r"[0-9]+-[0-9]+( [0-9]+-[0-9]+)+", line) for line in expected if line)
    assert "Empty sources, which have an empty line: 1 of 4." in caplog.text and "Target:" not in caplog.text
    # The same from standard input to standard output, in small parts.
    monkeypatch.setattr(explain, "SENTENCES_AT_A_TIME", 2)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((tmp_path / "source").read_bytes())))
    execute("attention", [*words, "--format", "pharaoh"])
    assert capsys.readouterr().out.splitlines() == expected
    execute("attention", [cli_model, "--device", "cpu", "--source", "a", "--source", "the", "--format", "pharaoh"])
    assert len(capsys.readouterr().out.splitlines()) == caplog.text.count("Target: ") == 2


LINKS = ["--output", "words.align"]
WRONG_FOR_LINKS = {
    "--layer 9": "`layer` must be from -2 to 1, got 9",
    "--layer 0 --head 4": "`head` must be from -4 to 3",
}
WRONG_FOR_LINKS["--layer mean --head 0"] = "`layer` must be given with `head`"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--source", "the cat", "--layer", "2"], "`layer` must be from -2 to 1, got 2"),
        (["--source", "a", "--source", "b"], "A picture must show one sentence, got 2"),
        (["--input", "in.txt", "--output", "in.txt"], "`output` must be another file than `input`, got "),
        (["--target_input", "in.txt", "--output", "in.txt"], "`output` must be another file than `target_input`, got "),
        (["--source", " "], "A picture must show one sentence, got 0"),
        (["--source", "a", "--input", __file__], "`input`: not allowed with argument --source."),
        (
            ["--source", "a", "--target", "b", "--target_input", __file__],
            "`target_input`: not allowed with argument --target",
        ),
        (["--source", "a", "--target", "b", "--target", "c"], "`sources` and `targets` must be equally many, got 1"),
        (["--source", "a", "--target", "b", "--num_beams", "2"], "Generation options have no effect with a target"),
        (["--source", "a", "--format", "pharaoh", "--output", "o.gz"], "`output` must not end in .gz"),
        *((["--source", "a", *LINKS, *words.split()], said) for words, said in WRONG_FOR_LINKS.items()),
    ],
)
def test_attention_refuses_and_leaves_what_is_there(cli_model, words, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "in.txt").write_text("the cat\n", encoding="utf-8")
    (tmp_path / "words.align").write_text("0-0\n", encoding="utf-8")
    before = contents(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert run("attention", [cli_model, "--device", "cpu", *words]) == 2
    assert f"metaphrase attention: error: {message}" in capsys.readouterr().err
    assert contents(tmp_path) == before


def test_a_target_that_is_too_long_is_named_by_its_line(tmp_path, capsys):
    pair = tiny_pair()
    design = {"position_embedding_type": "learned", "max_position_embeddings": 12}
    folder = save_generator(Generator(tiny_model(**pair.config_fields(), **design), pair), tmp_path / "model")
    (tmp_path / "in.txt").write_text("a cat\n\nthe dog\na cat\n", encoding="utf-8")
    (tmp_path / "out.txt").write_text(f"a\nb\nc\n{'ab' * 9}\n", encoding="utf-8")
    files = ["--input", str(tmp_path / "in.txt"), "--target_input", str(tmp_path / "out.txt")]
    words = [str(folder), "--device", "cpu", *files, "--format", "pharaoh"]
    assert run("attention", words) == 2
    assert "A target must not have more tokens" in (said := capsys.readouterr().err) and "line 4)" in said
