"""Code that comes with a model or a tokenizer: it runs where it is trusted, and is refused otherwise, without a question."""

import ast
import io
import json
import re
import sys
from pathlib import Path

import pytest
from tiny_generator import SOURCES, save_generator, tiny_generator

from metaphrase.scripts import generate
from metaphrase.scripts.__main__ import run
from metaphrase.tokenization import TokenizerPair

ROOT = Path(generate.__file__).parents[1]
CODE = """
from pathlib import Path
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

Path({ran!r}).touch()

class OwnTokenizer(PreTrainedTokenizerFast):
    pass

class OwnConfig(PreTrainedConfig):
    model_type = "own"
"""


def update(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | fields), encoding="utf-8")


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """A file that is there when the code of a folder has run; what was copied of the code goes with the test."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path / "ran"


@pytest.fixture(params=["source", "target"])
def folder(request, tmp_path, ran):
    """A model one of whose tokenizers is a class of its own."""
    folder = save_generator(tiny_generator(joint=False), tmp_path / "model")
    tokenizer_folder = folder if request.param == "source" else folder / "target_tokenizer"
    (tokenizer_folder / "own.py").write_text(CODE.format(ran=str(ran)), encoding="utf-8")
    named = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    if request.param == "target":
        # Code is looked for where the model lies.
        (folder / "own.py").write_text(CODE.format(ran=str(ran)), encoding="utf-8")
    update(tokenizer_folder / "tokenizer_config.json", **named)
    return folder


@pytest.mark.parametrize("is_trusted", [False, True])
def test_lines_are_never_answers(is_trusted, folder, ran, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(["y", *SOURCES]).encode())))
    words = [str(folder), "--device", "cpu", "--max_new_tokens", "3"]
    status = run("generate", words + ["--trust_remote_code"] * is_trusted)
    said = capsys.readouterr()
    if is_trusted:
        assert status == 0 and ran.exists() and len(said.out.splitlines()) == 1 + len(SOURCES)
    else:
        assert status == 2 and not ran.exists() and said.out == ""
        assert "contains custom code" in said.err and "trust_remote_code" in said.err


def test_pair_is_refused_without_a_question(folder, ran, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda question: pytest.fail(question))
    with pytest.raises(ValueError, match="contains custom code"):
        TokenizerPair.from_pretrained(folder)
    assert not ran.exists()
    pair = TokenizerPair.from_pretrained(folder, trust_remote_code=True)
    assert "OwnTokenizer" in {type(side).__name__ for side in (pair.source, pair.target)} and ran.exists()


def test_recipe_refuses_a_base_model_of_own_code_without_a_question(tmp_path, ran, monkeypatch, capsys):
    base = save_generator(tiny_generator(), tmp_path / "base")
    (base / "own.py").write_text(CODE.format(ran=str(ran)), encoding="utf-8")
    update(base / "config.json", model_type="own", auto_map={"AutoConfig": "own.OwnConfig"})
    (tmp_path / "train.tsv").write_text("a\tb\n", encoding="utf-8")
    monkeypatch.setattr("builtins.input", lambda question: pytest.fail(question))
    words = ["--train_file", str(tmp_path / "train.tsv"), "--model_name_or_path", str(base)]
    assert run("train", [*words, "--output_dir", str(tmp_path / "run"), "--use_cpu"]) == 2
    assert "contains custom code" in capsys.readouterr().err and not ran.exists()


@pytest.mark.parametrize("package", ["tokenization", "training", "inference", "conversion", "scripts", "hub_card"])
def test_every_load_by_an_auto_class_says_whether_code_is_trusted(package):
    silent = []
    for path in (ROOT / package).glob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            loads = isinstance(call, ast.Call) and re.fullmatch(r"Auto\w+\.from_\w+", ast.unparse(call.func))
            if loads and "trust_remote_code" not in {keyword.arg for keyword in call.keywords}:
                silent.append(f"{path.name}:{call.lineno}")
    assert silent == []
