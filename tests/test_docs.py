"""The README is a promise: its Python runs, its commands are understood, its recipe is one."""

import importlib
import io
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from tiny_generator import save_generator, tiny_generator
from transformers import T5Config, T5ForConditionalGeneration

from metaphrase.conversion import convert
from metaphrase.conversion.ctranslate2.export import export_ctranslate2
from metaphrase.demo.corpus import write_demo_corpus
from metaphrase.scripts.__main__ import VERBS
from metaphrase.training.recipe.recipe import load_recipe

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = [
    line.partition("  #")[0].strip()
    for language, text in BLOCKS
    if language == "bash"
    for line in text.splitlines()
    if line.startswith("metaphrase ")
]
# Verbs that would take their time.
TRAINING = ("train", "demo")


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    """A folder as the README takes it for granted: a trained model in runs/demo, a recipe, some input."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("demo", "demo_seed_2", "demo_small", "text_to_text"):
        # Of one layer: its ONNX graphs take as long as all other commands together.
        save_generator(tiny_generator(layers=1), folder / "runs" / name)
    paths = write_demo_corpus(folder / "runs" / "demo" / "data", num_train=2000, num_validation=20, num_test=20)
    few = paths["test"].read_text(encoding="utf-8").splitlines(keepends=True)[:3]
    paths["test"].write_text("".join(few), encoding="utf-8")
    for step in range(5):
        save_generator(tiny_generator(), folder / "runs" / "multi30k" / f"checkpoint-{step + 1}")
    for side in ("en", "de"):
        (folder / f"train.{side}").write_text("the cat sleeps\neine Katze schläft\n", encoding="utf-8")
    (folder / "input.txt").write_text("the cat sleeps\na dog\n", encoding="utf-8")
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 37}
    T5ForConditionalGeneration(T5Config(**sizes)).save_pretrained(folder / "models" / "t5-small")
    convert(folder / "models" / "t5-small", folder / "runs" / "my-t5")
    recipe = next(text for language, text in BLOCKS if language == "yaml")
    (folder / "my_recipe.yaml").write_text(recipe, encoding="utf-8")
    return folder


@pytest.fixture
def project(untouched, tmp_path, monkeypatch):
    """A copy of it, from which commands are called."""
    shutil.copytree(untouched, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_there_is_something_to_test():
    assert {command.split()[1] for command in COMMANDS} >= {
        *("train", "generate", "evaluate", "attention", "push", "convert"),
    }
    assert sum(language == "python" for language, _ in BLOCKS) >= 3


@pytest.mark.parametrize("code", [text for language, text in BLOCKS if language == "python"])
def test_python_runs(code, project, capsys):
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert bool(capsys.readouterr().out.strip()) == ("print(" in code)


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.split()[1] not in TRAINING])
def test_command_runs(command, project, monkeypatch, capsys):
    words, _, target = command.partition(" > ")
    words, _, source = words.partition(" < ")
    if source:
        text = (project / source.strip()).read_bytes()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text), encoding="utf-8"))
    verb, *rest = shlex.split(words)[1:]
    if "--engine" in rest:
        # The command before this one makes it.
        export_ctranslate2(project / "runs" / "demo", project / rest[0])
    importlib.import_module(f"metaphrase.scripts.{verb}").main(rest)
    if target:
        assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.split()[1] in TRAINING])
def test_training_command_is_understood(command, project, monkeypatch):
    verb, *words = shlex.split(command)[1:]
    module = importlib.import_module(f"metaphrase.scripts.{verb}")

    class Understood(Exception):
        pass

    def stop(recipe, **_):
        raise Understood(recipe.output_dir)

    monkeypatch.setattr(module, "Experiment", stop)
    monkeypatch.setattr(module, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(module, "keep_few_kernels", lambda: None)
    with pytest.raises(Understood, match="runs/"):
        module.main(words)


def test_recipe_is_one(project):
    assert load_recipe(project / "my_recipe.yaml").preset == "metaphrase-small"


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[1] / "scripts" / "recipes").glob("*.yaml")), ids=lambda p: p.stem
)
def test_packaged_recipes_load_and_name_no_folder(path):
    recipe = load_recipe(path)
    assert recipe.data_dir is None
    for value in yaml.safe_load(path.read_text(encoding="utf-8")).values():
        assert not (isinstance(value, str) and value.startswith(("/", "~", "..")))


def test_every_verb_has_its_file_and_says_what_it_takes(capsys):
    for verb in VERBS:
        with pytest.raises(SystemExit) as stop:
            importlib.import_module(f"metaphrase.scripts.{verb}").main(["--help"])
        assert stop.value.code == 0
        assert f"metaphrase {verb}" in capsys.readouterr().out
