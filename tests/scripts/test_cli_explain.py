"""The command line: `metaphrase explain` on tiny models."""

import errno
import os
import re
from pathlib import Path

import pytest
from cli_texts import targets_of
from matplotlib.figure import Figure
from tiny_generator import SOURCES
from verbs import execute, name_of

from metaphrase.inference import Generator, explain
from metaphrase.scripts import attention
from metaphrase.scripts import explain as verb
from metaphrase.scripts.__main__ import run


def test_explain_writes_a_page_of_several_pairs(cli_model, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.chdir(tmp_path)
    words = [cli_model, "--device", "cpu", "--source", "the <b> cat", "--source", "two dogs", "--max_new_tokens", "3"]
    execute(verb, words)
    text = (tmp_path / "explanation.html").read_text(encoding="utf-8")
    assert "the \\u003cb\\u003e cat" in text and "two dogs" in text and "Written to explanation.html" in caplog.text
    assert "Targets that are unfinished at the length limit: 2 (sources: 2)." in caplog.text
    execute(verb, [*words, "--output", str(tmp_path / "again.html")])
    assert (tmp_path / "again.html").read_text(encoding="utf-8") == text


def test_explain_writes_text(cli_model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["--device", "cpu", "--source", "the \x1b[31m cat", "--target", "die Katze", "--max_new_tokens", "3"]
    execute(verb, [cli_model, *words, "--text"])
    text = capsys.readouterr().out
    assert not list(tmp_path.iterdir()) and "\x1b" not in text
    heads = [
        "TOKENS",
        "SHAPES",
        "POSITION ENCODINGS",
        "MASKS",
        "ATTENTION",
        "TEACHER FORCING",
        "NEXT TOKENS",
        "BEAM SEARCH",
    ]
    assert re.findall(r"^([A-Z]{4,}(?: [A-Z]+)?)\b", text, re.MULTILINE) == heads
    generator = Generator.from_pretrained(cli_model, device="cpu")
    shown = explain(generator, "the \x1b[31m cat", "die Katze", max_new_tokens=3)
    assert f"mean loss {shown.loss:.4f} nats" in text
    nodes = shown.beam_tree.nodes
    assert sum(line.endswith("pruned") for line in text.splitlines()) == sum(node.state == "pruned" for node in nodes)
    assert all(f"result {node.rank} with score {node.score:.4f}" in text for node in nodes if node.rank)


def test_explain_generates_the_target(cli_model, capsys):
    execute(verb, [cli_model, "--device", "cpu", "--source", SOURCES[0], "--text", "--max_new_tokens", "3"])
    tokens = re.search(r"target \(generated\): (.*)", capsys.readouterr().out)[1].split("  ")
    assert len(tokens) == 3 and targets_of(SOURCES[:1], max_new_tokens=3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--source", "a", "--source", "b", "--target", "c"],
            "`source` and `target` must be equally many, got 2 and 1",
        ),
        (["--source", "a"] * 51, "A page must show 1 to 50 pairs, got 51"),
    ],
)
def test_explain_refuses(cli_model, words, message, capsys):
    assert run("explain", [cli_model, "--device", "cpu", *words]) == 2
    assert f"metaphrase explain: error: {message}" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["page", "picture"])
def test_a_full_disk_leaves_no_half_file_and_no_name_of_this_machine(cli_model, tmp_path, kind, monkeypatch, capsys):
    path = tmp_path / ("page.html" if kind == "page" else "map.png")
    words = [cli_model, "--device", "cpu", "--source", "the cat", "--target", "a", "--output", str(path)]
    module = verb if kind == "page" else attention
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
    assert run(name_of(module), words) == 2 and "No space left" in capsys.readouterr().err
    assert path.read_bytes() == written and [file.name for file in tmp_path.iterdir()] == [path.name]
