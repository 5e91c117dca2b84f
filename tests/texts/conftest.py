"""Alignments and the command line of the tests of whole texts."""

import pytest
from identity_engine import align_by
from subcommands import execute
from tiny_generator import tiny_generator

from metaphrase.scripts import generate
from metaphrase.texts.whole_texts import TextDecoder


@pytest.fixture
def align(monkeypatch):
    """Sets the alignment: which source word a target word has. By default it is the word with the same number."""

    def align(chooser=lambda index, count: index if index < count else None):
        monkeypatch.setattr(TextDecoder, "_align", align_by(chooser))

    align()
    return align


@pytest.fixture
def run_generate(monkeypatch):
    """Runs `generate` with a model that is given, or a tiny one."""

    def run(*words, generator=None):
        monkeypatch.setattr(generate.Generator, "from_pretrained", lambda *_, **__: generator or tiny_generator())
        execute(generate, ["model", *map(str, words)])

    return run


@pytest.fixture
def output_of(run_generate, tmp_path):
    def run(text, *words, **options):
        (tmp_path / "in").write_text(text, encoding="utf-8")
        run_generate("--input", tmp_path / "in", "--output", tmp_path / "out", *words, **options)
        return (tmp_path / "out").read_text(encoding="utf-8")

    return run
