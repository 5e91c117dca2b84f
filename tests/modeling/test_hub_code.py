"""The code that travels with a model: complete, free of everything but torch and transformers, and able to load alone."""

import ast
import json
import shutil
from pathlib import Path

import pytest
import torch
from hub_copies import FLAT_FILES, SOURCES, report_without_package
from model_results import results_of
from tiny_models import DESIGNS, random_batch, tiny_model
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel

from metaphrase.modeling import MetaphraseEncoderModel, MetaphraseForConditionalGeneration, MetaphraseModel

# A tiny model that version 0.1.0 at commit 2d8e445 saved, with a batch and its results.
EARLIER_MODEL = Path(__file__).parents[1] / "fixtures" / "model_saved_at_2d8e445.zip"
# Loading in a clean interpreter takes seconds for each. Other tests compare plain and fast code for all designs.
HUB_DESIGNS = ["relative", "rotary"]
MODEL_CLASSES = [MetaphraseModel, MetaphraseForConditionalGeneration, MetaphraseEncoderModel]
AUTO_CLASSES = dict(zip(("AutoModel", "AutoModelForSeq2SeqLM", "AutoModelForTextEncoding"), MODEL_CLASSES, strict=True))
HEADS = ("SequenceClassification", "TokenClassification", "QuestionAnswering")


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
    written = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert written["auto_map"] == {
        "AutoConfig": "configuration_metaphrase.MetaphraseConfig",
        **{name: f"modeling_metaphrase.{ours.__name__}" for name, ours in AUTO_CLASSES.items()},
        **{f"AutoModelFor{head}": f"modeling_metaphrase.MetaphraseFor{head}" for head in HEADS},
    }
    assert written["architectures"] == [model_class.__name__]


# Arguments: folders of models, each with inputs.pt and expected.pt beside the weights. Each is loaded, run, saved again, and
# loaded from there. The report has errors by folder.
CHECK_FOLDERS = """
import traceback
from pathlib import Path
from model_results import results_of
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoModelForTextEncoding


def run(folder, inputs):
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    assert type(config).__name__ == "MetaphraseConfig"
    assert type(config).__module__.startswith("transformers_modules.")
    classes = AutoModelForSeq2SeqLM, AutoModel, AutoModelForTextEncoding
    models = [auto_class.from_pretrained(folder, trust_remote_code=True).eval() for auto_class in classes]
    return models[0], results_of(*models, inputs)


def check(folder):
    inputs, expected = (torch.load(folder / name, weights_only=True) for name in ("inputs.pt", "expected.pt"))
    model, results = run(folder, inputs)
    model.save_pretrained(folder / "again")
    _, results_again = run(folder / "again", inputs)
    # Another processor made the earlier results.
    tolerance = 1e-5 if folder.name == "earlier" else 1e-6
    for name, value in expected.items():
        for actual in (results[name], results_again[name]):
            torch.testing.assert_close(actual, value, atol=tolerance, rtol=tolerance, msg=name)
    code = {path.name for path in folder.glob("*.py")}
    assert {path.name for path in (folder / "again").glob("*.py")} == code


def error_of(action, *arguments, **options):
    try:
        action(*arguments, **options)
    except Exception:
        return traceback.format_exc()
    return ""


folders = [Path(argument) for argument in sys.argv[1:]]
# First of all: a class that has been trusted once is known ever after.
report = {"untrusted": error_of(AutoModelForSeq2SeqLM.from_pretrained, folders[0], trust_remote_code=False)}
report |= {folder.name: error_of(check, folder) for folder in folders}
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Errors by folder, "" for none, of one clean interpreter for all: it takes seconds to start."""
    root = tmp_path_factory.mktemp("hub")
    for design in HUB_DESIGNS:
        model = tiny_model(**DESIGNS[design])
        model.save_pretrained(root / design)
        inputs = random_batch(model.config)
        torch.save(inputs, root / design / "inputs.pt")
        # The package computes with its operators and its fast decoder.
        expected = results_of(model, model.model, model.get_encoder(), inputs)
        torch.save(expected, root / design / "expected.pt")
        assert model.search_obstacle is None
    shutil.unpack_archive(EARLIER_MODEL, root / "earlier")
    shutil.copytree(root / "rotary", root / "incomplete")
    (root / "incomplete" / "positions.py").unlink()
    return report_without_package(
        CHECK_FOLDERS, root, *(root / name for name in [*HUB_DESIGNS, "earlier", "incomplete"])
    )


@pytest.mark.parametrize("folder", [*HUB_DESIGNS, "earlier"])
def test_model_without_the_package_gives_the_results_of_the_package(folder, report):
    assert report[folder] == ""


@torch.no_grad()
def test_model_of_an_earlier_version_gives_its_results_with_the_package(tmp_path):
    shutil.unpack_archive(EARLIER_MODEL, tmp_path)
    inputs, expected = (torch.load(tmp_path / name, weights_only=True) for name in ("inputs.pt", "expected.pt"))
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert type(model) is MetaphraseForConditionalGeneration
    torch.testing.assert_close(model(**inputs).logits, expected["logits"], atol=1e-5, rtol=1e-5)
    source = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    for name, num_beams in (("greedy", 1), ("beams", 2)):
        ids = model.generate(**source, max_new_tokens=5, num_beams=num_beams, do_sample=False)
        assert ids.tolist() == expected[name].tolist()


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_private_name_of_torch_or_transformers_is_read(path):
    """An attribute with an underscore is read from `self`, `cls` or `super()` alone: their own, or a hook of the base class."""
    private = [
        ast.unparse(node)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__")
    ]
    allowed = ("self._", "cls._", "super()._")
    # The name by which all of transformers' models read the attention kernel.
    others = [name for name in private if not name.startswith(allowed)]
    assert all(name.endswith("_attn_implementation") for name in others), others


def test_a_model_without_the_package_needs_all_its_files_and_trust(report):
    assert "positions" in report["incomplete"] and "trust_remote_code" in report["untrusted"].splitlines()[-1]
