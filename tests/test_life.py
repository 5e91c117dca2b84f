"""Tests of docs/life/: the code of each page runs and prints what the page shows, and the shown lines of the network exist."""

import ast
import importlib
import os
import re
import sys
from pathlib import Path

import pytest
from source_files import ROOT
from subcommands import execute

from metaphrase.demo.corpus import write_demo_corpus
from metaphrase.scripts import demo
from metaphrase.training.experiment import Experiment
from metaphrase.training.recipe.recipe import load_recipe

sys.path.append(str(ROOT / "docs"))
life = importlib.import_module("life")

PAGES = {name: path.read_text(encoding="utf-8") for name, path in life.PAGES.items()}
INCLUDES = [
    (page, *include)
    for page, text in PAGES.items()
    for include in re.findall(r"```\{literalinclude\} (\S+)\n(.*?)```", text, re.DOTALL)
]
DECIMAL = re.compile(r"\s*-?\d+\.\d+")


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    """A folder with the demo's model before training, in runs/demo. Its tokenizer is that of the demo."""
    folder = tmp_path_factory.mktemp("untrained")
    data, run = folder / "runs" / "demo" / "data", folder / "runs" / "demo"
    write_demo_corpus(data)
    fields = ["--data_dir", str(data), "--output_dir", str(run), "--disable_tqdm", "true"]
    experiment = Experiment(load_recipe(ROOT / "scripts" / "recipes" / "demo.yaml", fields))
    experiment.make_model().save_pretrained(run)
    experiment.prepare().tokenizers.save_pretrained(run)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with the trained demo in runs/demo. `METAPHRASE_DEMO` may name a run of the demo that exists."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "runs").mkdir()
    if "METAPHRASE_DEMO" in os.environ:
        (folder / "runs" / "demo").symlink_to(Path(os.environ["METAPHRASE_DEMO"]).resolve())
    else:
        execute(demo, ["--output_dir", str(folder / "runs" / "demo")])
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_code_runs_without_training(name, untrained, monkeypatch):
    """Each line of the output that training may change holds a decimal number. All other lines must be equal."""
    monkeypatch.chdir(untrained)
    for expected, output in life.run_page(PAGES[name], {"__name__": "page"}):
        lines = [[line for line in text.splitlines() if not DECIMAL.search(line)] for text in (expected, output)]
        assert lines[0] == lines[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_page_shows_output_of_trained_model(name, trained, monkeypatch):
    monkeypatch.chdir(trained)
    for expected, output in life.run_page(PAGES[name], {"__name__": "page"}):
        assert DECIMAL.sub(" #", output) == DECIMAL.sub(" #", expected)
        numbers = [[float(number) for number in DECIMAL.findall(text)] for text in (output, expected)]
        assert numbers[0] == pytest.approx(numbers[1], abs=0.1)


@pytest.mark.parametrize(("page", "path", "options"), INCLUDES)
def test_shown_lines_of_the_network_exist(page, path, options):
    source = (life.DOCS / "life" / path).read_text(encoding="utf-8")
    options = dict(re.findall(r"^:([\w-]+): ?(.*)$", options, re.MULTILINE))
    names, body = options.get("pyobject", "").split("."), ast.parse(source).body
    while any(names):
        body = next(node for node in body if getattr(node, "name", None) == names[0]).body
        names = names[1:]
    assert options.keys() & {"pyobject", "start-at"}
    assert all(options.get(mark, "") in source for mark in ("start-at", "end-at", "start-after", "end-before"))
    assert f"]({path})" in PAGES[page], "A link to the file must stand on the page."
