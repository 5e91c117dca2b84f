"""The code that travels with a model: complete, free of everything but torch and transformers, and able to load alone."""

import ast
import json
import shutil
import subprocess
import sys

import pytest
import torch
from hub_copies import FLAT_FILES, SOURCES, offline_environment
from tiny_models import DESIGNS, random_batch, tiny_model
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSeq2SeqLM,
    AutoModelForTextEncoding,
    PreTrainedModel,
)

from metaphrase.modeling import MetaphraseEncoderModel, MetaphraseForConditionalGeneration, MetaphraseModel

MODEL_CLASSES = [MetaphraseModel, MetaphraseForConditionalGeneration, MetaphraseEncoderModel]
AUTO_CLASSES = {
    "AutoModel": (AutoModel, MetaphraseModel),
    "AutoModelForSeq2SeqLM": (AutoModelForSeq2SeqLM, MetaphraseForConditionalGeneration),
    "AutoModelForTextEncoding": (AutoModelForTextEncoding, MetaphraseEncoderModel),
}


def imported_modules(path):
    """Pairs of dots and name for every import statement of a file, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_files_import_nothing_but_torch_transformers_and_each_other(path):
    allowed = {"torch", "transformers", "huggingface_hub"} | set(sys.stdlib_module_names)
    for level, module in imported_modules(path):
        if level == 0:
            assert module.split(".")[0] in allowed, module
        else:
            # transformers copies what `from .name import` names; it fails on parents, sub-packages and `from . import`.
            assert level == 1 and module is not None and "." not in module
            assert f"{module}.py" in FLAT_FILES


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_imports_stand_at_the_top_and_no_docstring_line_looks_like_one(path):
    """transformers finds relative imports by a regular expression, in functions, conditions and docstrings too."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    top = {node.lineno for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)}
    everywhere = {node.lineno for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)}
    assert top == everywhere
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip().startswith(("from .", "import .")):
            assert number in top


def test_modeling_knows_nobody():
    """A fresh interpreter that imports the network imports nothing else of the project."""
    code = (
        "import sys, metaphrase.modeling\n"
        "names = {name.split('.')[1] for name in sys.modules if name.startswith('metaphrase.')}\n"
        "assert names == {'modeling'}, names\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=900)


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_saved_folder_is_complete_and_flat(model_class, tmp_path, monkeypatch):
    monkeypatch.setattr(PreTrainedModel, "push_to_hub", lambda *_, **__: pytest.fail("pushed to the Hub"))
    tiny_model(model_class).save_pretrained(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= FLAT_FILES
    others = {"config.json", "model.safetensors"}
    if model_class is MetaphraseForConditionalGeneration:
        others.add("generation_config.json")
    assert names - FLAT_FILES == others
    assert all(path.is_file() for path in tmp_path.iterdir())
    for path in SOURCES:
        if path.name in FLAT_FILES:
            assert (tmp_path / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_auto_map_is_complete_whichever_model_is_saved(model_class, tmp_path):
    tiny_model(model_class).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert written["auto_map"] == {
        "AutoConfig": "configuration_metaphrase.MetaphraseConfig",
        **{name: f"modeling_metaphrase.{ours.__name__}" for name, (_, ours) in AUTO_CLASSES.items()},
    }
    assert written["architectures"] == [model_class.__name__]
    assert written["model_type"] == "metaphrase"


@torch.no_grad()
def test_with_the_package_no_code_is_trusted(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    # Without its files nothing but the package can be the source of the classes.
    for name in FLAT_FILES:
        (tmp_path / name).unlink()
    assert type(AutoConfig.from_pretrained(tmp_path)) is type(model.config)
    inputs = random_batch(model.config)
    for auto_class, our_class in AUTO_CLASSES.values():
        loaded = auto_class.from_pretrained(tmp_path)
        assert type(loaded) is our_class
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(**inputs).logits, model(**inputs).logits, atol=0, rtol=0)


# Runs in an interpreter of its own that cannot import the package. Arguments: folders of models, each with inputs.pt and
# expected.pt beside the weights. Each is loaded, run, saved again, loaded from there; errors are reported by folder.
CLEAN_INTERPRETER = """
import json
import sys
import traceback
from pathlib import Path

sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
sys.path_hooks = [hook for hook in sys.path_hooks if "editable" not in repr(hook).lower()]
# Where the package is installed as a wheel there is no such finder: the name is closed as well.
sys.modules["metaphrase"] = None
try:
    import metaphrase.modeling
except ImportError:
    pass
else:
    raise AssertionError("the package can still be imported")

import torch
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoModelForTextEncoding

torch.set_num_threads(1)


def run(folder, inputs):
    trusted = {"trust_remote_code": True}
    config = AutoConfig.from_pretrained(folder, **trusted)
    assert type(config).__name__ == "MetaphraseConfig"
    assert type(config).__module__.startswith("transformers_modules.")
    source = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    head = AutoModelForSeq2SeqLM.from_pretrained(folder, **trusted).eval()
    body = AutoModel.from_pretrained(folder, **trusted).eval()
    encoder = AutoModelForTextEncoding.from_pretrained(folder, **trusted).eval()
    with torch.no_grad():
        results = {
            "logits": head(**inputs).logits,
            "hidden_states": body(**inputs).last_hidden_state,
            "memory": encoder(**source).last_hidden_state,
            "generated": head.generate(**source, max_new_tokens=5, num_beams=2, do_sample=False),
        }
    return head, results


def check(folder):
    inputs, expected = (torch.load(folder / name, weights_only=True) for name in ("inputs.pt", "expected.pt"))
    model, results = run(folder, inputs)
    model.save_pretrained(folder / "again")
    _, results_again = run(folder / "again", inputs)
    for name, value in expected.items():
        torch.testing.assert_close(results[name], value, atol=0, rtol=0, msg=name)
        torch.testing.assert_close(results_again[name], value, atol=0, rtol=0, msg=f"{name}, saved again")
    code = {path.name for path in folder.glob("*.py")}
    assert {path.name for path in (folder / "again").glob("*.py")} == code
    model(**inputs, labels=inputs["decoder_input_ids"]).loss.backward()


def untrusted(folder):
    AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=False)


def error_of(action, folder):
    try:
        action(folder)
    except Exception:
        return traceback.format_exc()
    return ""


folders = [Path(argument) for argument in sys.argv[1:]]
# First of all: a class that has been trusted once is known ever after.
report = {"untrusted": error_of(untrusted, folders[0])}
report |= {folder.name: error_of(check, folder) for folder in folders}
assert not [name for name in sys.modules if name.startswith("metaphrase.")]
print("REPORT " + json.dumps(report))
"""


@torch.no_grad()
def save_with_expectations(folder, design):
    model = tiny_model(**DESIGNS[design])
    model.save_pretrained(folder)
    inputs = random_batch(model.config)
    source = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    expected = {
        "logits": model(**inputs).logits,
        "hidden_states": model.model(**inputs).last_hidden_state,
        "memory": model.get_encoder()(**source).last_hidden_state,
        "generated": model.generate(**source, max_new_tokens=5, num_beams=2, do_sample=False),
    }
    torch.save(inputs, folder / "inputs.pt")
    torch.save(expected, folder / "expected.pt")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Errors by folder, "" for none, of one clean interpreter for all: it takes seconds to start."""
    root = tmp_path_factory.mktemp("hub")
    for design in DESIGNS:
        save_with_expectations(root / design, design)
    shutil.copytree(root / "rotary", root / "incomplete")
    (root / "incomplete" / "normalization.py").unlink()
    result = subprocess.run(
        [sys.executable, "-c", CLEAN_INTERPRETER, *(str(root / name) for name in [*DESIGNS, "incomplete"])],
        cwd=root,
        env=offline_environment(root),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("REPORT ")]
    return json.loads(line.removeprefix("REPORT "))


@pytest.mark.parametrize("design", list(DESIGNS))
def test_model_loads_without_the_package(design, report):
    assert report[design] == ""


def test_a_missing_file_is_noticed(report):
    """That the interpreter is clean indeed: a folder without one of its files cannot be loaded there."""
    assert "normalization" in report["incomplete"]


def test_a_model_without_the_package_asks_for_trust(report):
    assert "trust_remote_code" in report["untrusted"].splitlines()[-1]


def test_code_of_a_copied_folder_is_that_of_the_folder(tmp_path):
    """A model that is saved, copied and loaded again with the package keeps its weights and gains no file."""
    model = tiny_model()
    model.save_pretrained(tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "second")
    loaded.save_pretrained(tmp_path / "third")
    names = [{path.name for path in (tmp_path / folder).iterdir()} for folder in ("first", "third")]
    assert names[0] == names[1]
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])
