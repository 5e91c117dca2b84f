"""Generators on the engine CTranslate2, in Python and on the command line: what they write, what they refuse."""

import importlib
import json
import sys

import pytest

pytest.importorskip("ctranslate2")

import torch
from subcommands import execute
from tiny_generator import SOURCES, save_generator, tiny_generator

from metaphrase.conversion.ctranslate2.export import export_ctranslate2
from metaphrase.engines.ctranslate2_engine import CTranslate2Engine
from metaphrase.inference import Generator, cross_attention
from metaphrase.scripts import evaluate

BEAMS = {"num_beams": 4, "num_return_sequences": 4, "early_stopping": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Of a model and of its export, by whether it has one tokenizer."""
    folder, made = tmp_path_factory.mktemp("generators"), {}
    for is_joint in (True, False):
        source = save_generator(tiny_generator(is_joint), folder / f"model_{is_joint}")
        made[is_joint] = source, export_ctranslate2(source, folder / f"exported_{is_joint}")
    return made


def load(folder, **options):
    return Generator.from_pretrained(folder, engine="ctranslate2", device="cpu", **options)


@pytest.mark.parametrize("is_joint", [True, False])
@pytest.mark.parametrize("is_exported", [True, False])
def test_generator_writes_the_same(is_joint, is_exported, folders):
    ours = tiny_generator(is_joint, source_prefix="a ")
    theirs = load(folders[is_joint][is_exported], source_prefix="a ")
    texts = [SOURCES[0], "", *SOURCES]
    assert theirs.generate(texts) == ours.generate(texts)
    assert theirs.num_unfinished == ours.num_unfinished
    expected, results = (generator.generate_n_best(texts, **BEAMS) for generator in (ours, theirs))
    assert [[c.text for c in row] for row in results] == [[c.text for c in row] for row in expected]
    for row, scored in zip(expected, results, strict=True):
        assert [c.score for c in scored] == pytest.approx([c.score for c in row], abs=1e-3)
    stream = theirs.generate_stream(texts, chunk_size=2, return_scores=False)
    assert [row[0].text for row in stream] == ours.generate(texts)


def test_the_converted_copy_lasts_as_long_as_the_generator(folders):
    generator = load(folders[True][0])
    copy = generator.model.folder
    assert copy.is_dir() and copy != folders[True][0]
    # It is loaded anew to sample.
    assert len(generator.generate(SOURCES, do_sample=True)) == len(SOURCES)
    del generator
    assert not copy.exists()


@pytest.mark.parametrize(
    ("dtype", "compute_type"),
    [("auto", "float32"), ("int8", "int8_float32"), ("float32", "float32"), (torch.float32, "float32")],
)
def test_type_of_the_weights(dtype, compute_type, folders):
    generator = load(folders[True][1], dtype=dtype)
    assert generator.model.translator.compute_type == compute_type
    assert all(generator.generate(SOURCES))


def test_folders_types_and_devices_that_cannot_be_loaded(folders, tmp_path):
    with pytest.raises(ValueError, match="ompute type"):
        load(folders[True][1], dtype="int4")
    for path, device in ((tmp_path, "cpu"), (folders[True][1], "cuda:99"), (folders[True][1], "foo")):
        with pytest.raises(ValueError, match=r"cannot load|device"):
            CTranslate2Engine(path, device=device)


def test_a_start_that_changes_is_given_with_each_call(tmp_path):
    """As mBART's, whose decoder starts with the code of a language."""
    generator = tiny_generator()
    generator.model.config.decoder_start_from_labels = True
    folder = export_ctranslate2(save_generator(generator, tmp_path / "model"), tmp_path / "exported")
    assert json.loads((folder / "config.json").read_text())["decoder_start_token"] is None
    theirs = load(folder)
    for options in ({}, {"decoder_start_token_id": 7}, {"decoder_start_token_id": 7, "forced_bos_token_id": 9}):
        for beams in ({}, {"num_beams": 4, "early_stopping": True}):
            assert theirs.generate(SOURCES, **options, **beams) == generator.generate(SOURCES, **options, **beams)


def test_what_needs_a_model_in_torch_is_refused(folders):
    generator = load(folders[True][1])
    for call in (generator.score, lambda sources, targets: cross_attention(generator, sources[0])):
        with pytest.raises(ValueError, match="`generator` must be a single torch model here, got CTranslate2Engine"):
            call(SOURCES[:1], SOURCES[:1])
    with pytest.raises(ValueError, match="ctranslate2 and `use_vmap` need one model"):
        Generator.from_pretrained([folders[True][1]] * 2, engine="ctranslate2")


def test_evaluation_by_command_line_is_without_a_loss(folders, files, tmp_path):
    output = tmp_path / "metrics.json"
    words = ["--source", files[0], "--target", files[1], "--output", str(output), "--num_beams", "3"]
    results = []
    for more in ([], ["--engine", "ctranslate2", "--dtype", "float32"]):
        execute(evaluate, [str(folders[True][0]), "--device", "cpu", "--early_stopping", *words, *more])
        results.append(json.loads(output.read_text(encoding="utf-8")))
    ours, theirs = results
    assert ours["loss"] > 0 and "loss" not in theirs
    assert theirs["scores"] == ours["scores"] and theirs["num_unfinished"] == ours["num_unfinished"]
    assert theirs["inference"] == {"engine": "ctranslate2", "dtype": "float32", "models": 1}


def test_versions_with_wrong_results_are_refused(monkeypatch):
    names = "metaphrase.conversion.ctranslate2", "metaphrase.engines.ctranslate2_engine"
    for name in names:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("ctranslate2.__version__", "4.8.4")
    for name in names:
        with pytest.raises(ImportError, match=r"must be at least 4\.8\.5, got 4\.8\.4"):
            importlib.import_module(name)
