"""The code that travels with a model: complete, free of everything but torch and transformers, and able to load alone."""

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

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

# A tiny model that version 0.1.0 at commit 2d8e445 saved, with a batch and its results.
EARLIER_MODEL = Path(__file__).parents[1] / "fixtures" / "model_saved_at_2d8e445.zip"
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
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    statements = [*tree.body, *(statement for block in blocks for statement in block.body)]
    top = {node.lineno for node in statements if isinstance(node, ast.Import | ast.ImportFrom)}
    everywhere = {node.lineno for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)}
    assert top == everywhere
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip().startswith(("from .", "import .")):
            assert number in top


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_saved_folder_is_complete_and_flat(model_class, tmp_path, monkeypatch):
    monkeypatch.setattr(PreTrainedModel, "push_to_hub", lambda *_, **__: pytest.fail("pushed to the Hub"))
    tiny_model(model_class).save_pretrained(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= FLAT_FILES
    data_files = {"config.json", "model.safetensors"}
    if model_class is MetaphraseForConditionalGeneration:
        data_files.add("generation_config.json")
    assert names - FLAT_FILES == data_files
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
            "encoder_output": encoder(**source).last_hidden_state,
            "greedy": head.generate(**source, max_new_tokens=5, num_beams=1, do_sample=False),
            "beams": head.generate(**source, max_new_tokens=5, num_beams=2, do_sample=False),
        }
        torch.manual_seed(3)
        # Ends of rows would move the random numbers of the rows that remain.
        sampling = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": True, "top_p": 0.9, "num_return_sequences": 3}
        results["samples"] = head.generate(**source, **sampling)
    head.train()
    results["loss"] = head(**inputs, labels=inputs["decoder_input_ids"]).loss
    results["loss"].backward()
    results["gradients"] = [parameter.grad for parameter in head.parameters()]
    return head.eval(), results


def check(folder):
    inputs, expected = (torch.load(folder / name, weights_only=True) for name in ("inputs.pt", "expected.pt"))
    model, results = run(folder, inputs)
    model.save_pretrained(folder / "again")
    _, results_again = run(folder / "again", inputs)
    for name, value in expected.items():
        torch.testing.assert_close(results[name], value, atol=1e-6, rtol=1e-6, msg=name)
        torch.testing.assert_close(results_again[name], value, atol=1e-6, rtol=1e-6, msg=f"{name}, saved again")
    code = {path.name for path in folder.glob("*.py")}
    assert {path.name for path in (folder / "again").glob("*.py")} == code


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


def save_with_expectations(folder, design):
    """Save a model, a batch, and the results of the package with its operators and its fast decoder."""
    model = tiny_model(**DESIGNS[design])
    model.save_pretrained(folder)
    inputs = random_batch(model.config)
    source = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        expected = {
            "logits": model(**inputs).logits,
            "hidden_states": model.model(**inputs).last_hidden_state,
            "encoder_output": model.get_encoder()(**source).last_hidden_state,
            "greedy": model.generate(**source, max_new_tokens=5, num_beams=1, do_sample=False),
            "beams": model.generate(**source, max_new_tokens=5, num_beams=2, do_sample=False),
        }
        assert model.last_search.loop == "fast"
        torch.manual_seed(3)
        sampling = {
            "max_new_tokens": 5,
            "min_new_tokens": 5,
            "do_sample": True,
            "top_p": 0.9,
            "num_return_sequences": 3,
        }
        expected["samples"] = model.generate(**source, **sampling)
    model.train()
    expected["loss"] = model(**inputs, labels=inputs["decoder_input_ids"]).loss
    expected["loss"].backward()
    expected["gradients"] = [parameter.grad for parameter in model.parameters()]
    torch.save(inputs, folder / "inputs.pt")
    torch.save(expected, folder / "expected.pt")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Errors by folder, "" for none, of one clean interpreter for all: it takes seconds to start."""
    root = tmp_path_factory.mktemp("hub")
    for design in DESIGNS:
        save_with_expectations(root / design, design)
    shutil.unpack_archive(EARLIER_MODEL, root / "earlier")
    shutil.copytree(root / "rotary", root / "incomplete")
    (root / "incomplete" / "normalization.py").unlink()
    result = subprocess.run(
        [sys.executable, "-c", CLEAN_INTERPRETER, *(str(root / name) for name in [*DESIGNS, "earlier", "incomplete"])],
        cwd=root,
        env=offline_environment(root),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("REPORT ")]
    return json.loads(line.removeprefix("REPORT "))


@pytest.mark.parametrize("folder", [*DESIGNS, "earlier"])
def test_model_without_the_package_gives_the_results_of_the_package(folder, report):
    assert report[folder] == ""


@torch.no_grad()
def test_model_of_an_earlier_version_gives_its_results_with_the_package(tmp_path):
    shutil.unpack_archive(EARLIER_MODEL, tmp_path)
    inputs, expected = (torch.load(tmp_path / name, weights_only=True) for name in ("inputs.pt", "expected.pt"))
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert type(model) is MetaphraseForConditionalGeneration
    torch.testing.assert_close(model(**inputs).logits, expected["logits"], atol=1e-6, rtol=1e-6)
    source = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    for name, num_beams in (("greedy", 1), ("beams", 2)):
        ids = model.generate(**source, max_new_tokens=5, num_beams=num_beams, do_sample=False)
        assert ids.tolist() == expected[name].tolist()


def test_what_travels_is_small():
    assert len(FLAT_FILES) <= 19
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES) <= 4000


@pytest.mark.parametrize("path", [path for path in SOURCES if path.name != "compat.py"], ids=lambda path: path.name)
def test_no_private_name_of_torch_or_transformers_is_read(path):
    """An attribute with an underscore is read from `self`, `cls` or `super()` alone: their own, or a hook of the base class."""
    private = [
        ast.unparse(node)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__")
    ]
    allowed = ("self._", "cls._", "super()._")
    # The name by which all of transformers' models read the attention kernel.
    assert [
        name for name in private if not name.startswith(allowed) and not name.endswith("_attn_implementation")
    ] == []


def test_a_missing_file_is_noticed(report):
    """Check that the interpreter has no package: a folder without a file cannot be loaded."""
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
