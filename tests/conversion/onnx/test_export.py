"""Tests of the ONNX export: graphs compute what the model computes, also at lengths that were not traced."""

import builtins
import json
import shutil
import sys

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

import onnx
import onnxruntime
import torch
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument
from tiny_generator import save_generator, tiny_generator, tiny_pair
from tiny_models import DESIGNS, POSITIONS, padding_mask, random_batch, tiny_config, tiny_model
from transformers import AutoConfig, GenerationConfig, T5Config
from verbs import execute

from metaphrase.conversion.onnx import export as onnx_export
from metaphrase.conversion.onnx.export import (
    DECODER_NAME,
    DECODER_WITH_PAST_NAME,
    ENCODER_NAME,
    TOLERANCE,
    check_graphs,
    export_onnx,
    past_names,
    refuse_unsupported,
    with_tables,
    write_graphs,
)
from metaphrase.inference import Generator
from metaphrase.modeling import MetaphraseConfig
from metaphrase.scripts import export
from metaphrase.tokenization import TokenizerPair

GRAPHS = (ENCODER_NAME, DECODER_NAME, DECODER_WITH_PAST_NAME)


def session(path):
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def assert_close(found, expected):
    assert found.shape == tuple(expected.shape)
    assert float((torch.from_numpy(found) - expected).abs().max()) <= TOLERANCE * float(expected.abs().max())


def greedy(folder, input_ids, attention_mask, max_new_tokens):
    """Decode as a runner of optimum's exports does, by tensor names, and return ids with the start token."""
    config = AutoConfig.from_pretrained(folder)
    encoder, first, later = (session(folder / name) for name in GRAPHS)
    mask = attention_mask.numpy()
    memory = encoder.run(["last_hidden_state"], {"input_ids": input_ids.numpy(), "attention_mask": mask})[0]
    ids = np.full((len(mask), 1), config.decoder_start_token_id)
    is_finished, past = np.zeros(len(mask), dtype=bool), {}
    for _ in range(max_new_tokens):
        given = {"input_ids": ids[:, -1:], "encoder_attention_mask": mask, **past}
        step = later if past else first
        if not past:
            given["encoder_hidden_states"] = memory
        outputs = dict(zip([output.name for output in step.get_outputs()], step.run(None, given), strict=True))
        chosen = np.where(is_finished, config.pad_token_id, outputs.pop("logits")[:, -1].argmax(-1))
        past |= {name.replace("present", "past_key_values"): value for name, value in outputs.items()}
        ids = np.concatenate((ids, chosen[:, None]), axis=1)
        is_finished |= chosen == config.eos_token_id
        if is_finished.all():
            break
    return torch.from_numpy(ids)


def make_generator(seed=0, **fields):
    pair = tiny_pair(False)
    fields = DESIGNS["rotary"] | {"encoder_layers": 1, "decoder_layers": 1} | fields
    model = tiny_model(seed=seed, **(fields | pair.config_fields() | {"share_embeddings": False}))
    model.generation_config.max_new_tokens = 12
    return Generator(model, pair)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model (rotary, gated, grouped heads, normed queries, two vocabularies), its folder, and its export."""
    folder = tmp_path_factory.mktemp("onnx")
    generator = make_generator()
    source = save_generator(generator, folder / "model")
    execute(export, [str(source), str(folder / "exported"), "--format", "onnx"])
    return generator.model, source, folder / "exported"


# the whole export


@pytest.mark.parametrize("side", ["left", "right"])
def test_greedy_decoding_gives_the_tokens_of_generate(side, exported):
    model, _, folder = exported
    draw = torch.Generator().manual_seed(1)
    mask = padding_mask([11, 4, 1, 7, 9, 2], 11, side)
    ids = torch.randint(4, model.config.vocab_size, mask.shape, generator=draw)
    expected = model.generate(input_ids=ids, attention_mask=mask, do_sample=False, num_beams=1, max_new_tokens=20)
    found = greedy(folder, ids, mask, 20)
    assert found.tolist() == expected.tolist()
    # An output that is the same whatever is read would prove nothing.
    assert len({tuple(row) for row in expected.tolist()}) > 3
    # What stands on padding must not matter.
    assert greedy(folder, ids.where(mask == 1, 3), mask, 20).tolist() == found.tolist()


def test_files_and_tensors_have_the_names_of_optimum(exported):
    model, _, folder = exported
    parts = ["decoder.key", "decoder.value", "encoder.key", "encoder.value"]
    past = [f"past_key_values.0.{part}" for part in parts]
    names = {}
    for name in GRAPHS:
        graph = session(folder / name)
        names[name] = [[value.name for value in values] for values in (graph.get_inputs(), graph.get_outputs())]
        fixed = {axis for value in (*graph.get_inputs(), *graph.get_outputs()) for axis in value.shape[:2]}
        # Batch and lengths have names; one new token, and the heads, have not.
        assert "batch_size" in fixed and not {2, 3, 7} & (fixed - {model.config.num_key_value_heads})
    assert names == {
        ENCODER_NAME: [["input_ids", "attention_mask"], ["last_hidden_state"]],
        DECODER_NAME: [
            ["encoder_attention_mask", "input_ids", "encoder_hidden_states"],
            ["logits", *[name.replace("past_key_values", "present") for name in past]],
        ],
        DECODER_WITH_PAST_NAME: [
            ["encoder_attention_mask", "input_ids", *past],
            ["logits", *[name.replace("past_key_values", "present") for name in past if ".decoder." in name]],
        ],
    }
    assert (ENCODER_NAME, DECODER_NAME) == ("encoder_model.onnx", "decoder_model.onnx")
    assert DECODER_WITH_PAST_NAME == "decoder_with_past_model.onnx"


def test_what_a_runner_needs_lies_beside_the_graphs(exported):
    model, source, folder = exported
    config = MetaphraseConfig.from_pretrained(folder)
    assert config.decoder_vocab_size == model.config.decoder_vocab_size and config.eos_token_id == 2
    assert GenerationConfig.from_pretrained(folder).max_new_tokens == 12
    pair, ours = TokenizerPair.from_pretrained(folder), TokenizerPair.from_pretrained(source)
    assert pair.target.get_vocab() == ours.target.get_vocab() != pair.source.get_vocab()
    provenance = json.loads((folder / "export.json").read_text())
    assert {*GRAPHS, "config.json"} < set(provenance.pop("files"))
    assert provenance == {"source": "model", "from": "metaphrase", "to": "onnx"}


def test_nothing_of_this_machine_is_in_the_graphs(exported):
    _, _, folder = exported
    for name in GRAPHS:
        content = (folder / name).read_bytes()
        for path in (b"stacks.py", b"site-packages"):
            assert path not in content


def test_what_differs_is_found(exported):
    """One weight of each stack differs by a little more than the tolerance."""
    model, _, folder = exported
    check_graphs(model, folder)
    for stack, name in ((model.get_encoder(), ENCODER_NAME), (model.get_decoder(), DECODER_NAME)):
        bias = stack.layers[0].mlp.down_proj.bias
        with torch.no_grad():
            old = bias.clone()
            bias[0] += 0.05
            with pytest.raises(RuntimeError, match=f"^{name} must compute what the model computes, within 0.0001 of"):
                check_graphs(model, folder)
            bias.copy_(old)
    later = folder.with_name("later")
    shutil.copytree(folder, later)
    graph = onnx.load(later / DECODER_WITH_PAST_NAME)
    head = next(weight for weight in graph.graph.initializer if tuple(weight.dims)[:1] == (model.config.hidden_size,))
    values = onnx.numpy_helper.to_array(head) * 1.5
    head.CopyFrom(onnx.numpy_helper.from_array(values, head.name))
    onnx.save(graph, later / DECODER_WITH_PAST_NAME)
    with pytest.raises(RuntimeError, match=f"^{DECODER_WITH_PAST_NAME} must compute"):
        check_graphs(model, later)


def test_an_export_that_fails_its_check_leaves_nothing(exported, tmp_path, monkeypatch):
    """The graphs have other weights than the model."""
    _, _, folder = exported

    def write_others(model, partial):
        for name in GRAPHS:
            shutil.copy(folder / name, partial / name)

    monkeypatch.setattr(onnx_export, "write_graphs", write_others)
    source = save_generator(make_generator(seed=1), tmp_path / "model")
    with pytest.raises(RuntimeError, match="must compute what the model computes"):
        export_onnx(source, tmp_path / "exported")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_is_there_is_replaced_only_if_asked_and_written_here(exported, tmp_path):
    _, source, folder = exported
    with pytest.raises(ValueError, match=r"`output` must not exist, got .*Pass --overwrite to replace it"):
        export_onnx(source, folder)
    with pytest.raises(ValueError, match=r"must hold only the files that export\.json lists"):
        export_onnx(source, tmp_path, overwrite=True)


# positions


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "none" else [pytest.mark.slow])
        for name in POSITIONS
        if name not in ("rotary", "half_split", "relative_per_layer")
    ],
)
def test_later_steps_of_every_position(name, tmp_path, monkeypatch):
    """Check models of one layer. One graph has its weights in a separate file."""
    model = tiny_model(attn_implementation="eager", **(DESIGNS[name] | {"encoder_layers": 1, "decoder_layers": 1}))
    path, is_large = tmp_path / DECODER_WITH_PAST_NAME, name == "none"
    if is_large:
        monkeypatch.setattr(onnx_export, "LARGEST_WEIGHTS_BYTES", 0)
    write_graphs(model, tmp_path, [DECODER_WITH_PAST_NAME])
    assert path.with_name(path.name + "_data").exists() == is_large
    graph = session(path)
    for batch, source, target in ((3, 12, 9), (1, 1, 2), (2, 5, 30)):
        given = random_batch(model.config, batch, source, target)
        with torch.no_grad():
            expected = model(**given, use_cache=False).logits[:, -1:]
            given["decoder_input_ids"], last = given["decoder_input_ids"].split((target - 1, 1), dim=1)
            past = model(**given, use_cache=True).past_key_values
        caches = past.self_attention_cache.layers[0], past.cross_attention_cache.layers[0]
        states = [states.numpy() for cache in caches for states in (cache.keys, cache.values)]
        inputs = {"input_ids": last.numpy(), "encoder_attention_mask": given["attention_mask"].numpy()}
        logits = graph.run(["logits"], inputs | dict(zip(past_names(1), states, strict=True)))[0]
        assert_close(logits, expected)
    if name == "learned":
        # A position past the table is an error, and never a wrong result.
        places = model.config.max_position_embeddings
        keys = np.zeros((2, 4, places, 8), np.float32)
        past = dict(zip(past_names(1), [keys, keys, *states[2:]], strict=True))
        with pytest.raises(InvalidArgument, match="out of data bounds"):
            graph.run(["logits"], inputs | past)


@pytest.mark.parametrize("name", ["sinusoidal", "half_split", "learned", "relative", "relative_per_layer"])
def test_tables_change_nothing_and_are_gone_afterwards(name):
    """The lengths reach beyond the last bucket and beyond the first table of sinusoids."""
    model = tiny_model(**DESIGNS[name])
    before = list(model.state_dict())
    given = random_batch(model.config, batch=2, source=40, target=33)
    with torch.no_grad():
        expected = model(**given).logits
        with with_tables(model):
            assert any(type(module).__name__.endswith("Table") for module in model.modules())
            torch.testing.assert_close(model(**given).logits, expected, rtol=0, atol=0)
    assert not any(type(module).__name__.endswith("Table") for module in model.modules())
    assert list(model.state_dict()) == before


@pytest.mark.slow
@pytest.mark.parametrize("name", DESIGNS)
def test_whole_designs(name, tmp_path):
    model = tiny_model(attn_implementation="eager", **DESIGNS[name])
    write_graphs(model, tmp_path)
    check_graphs(model, tmp_path)


# refusals

LONGROPE = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 16}
REFUSED = {"dynamic": {"factor": 2.0}, "longrope": {"factor": 2.0, **LONGROPE}}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_exported_is_refused_by_name(kind, tmp_path):
    rotation = {"rope_type": kind, "rope_theta": 1e4, **REFUSED[kind]}
    message = f"ONNX cannot express `rope_parameters` with `rope_type` '{kind}'"
    with pytest.raises(ValueError, match=message):
        write_graphs(tiny_model(rope_parameters=rotation), tmp_path)
    source = save_generator(make_generator(rope_parameters=rotation), tmp_path / "model")
    with pytest.raises(ValueError, match=message):
        export_onnx(source, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()
    # The fields have no effect without rotary positions.
    refuse_unsupported(tiny_config(position_embedding_type="none", rope_parameters=rotation))


def test_other_families_and_quantization_are_refused(tmp_path):
    T5Config().save_pretrained(tmp_path / "t5")
    with pytest.raises(ValueError, match="`model_type` must be metaphrase, got 't5'"):
        export_onnx(tmp_path / "t5", tmp_path / "exported")
    with pytest.raises(ValueError, match="`--quantization` must be left out with --format onnx, got 'int8'"):
        execute(export, ["model", str(tmp_path / "exported"), "--format", "onnx", "--quantization", "int8"])


@pytest.mark.parametrize("missing", ["onnx", "onnxscript", "onnxruntime"])
def test_without_the_packages_the_error_says_what_to_install(missing, tmp_path, monkeypatch):
    source = save_generator(tiny_generator(), tmp_path / "model")
    for name in list(sys.modules):
        if name.startswith("metaphrase.conversion.onnx"):
            monkeypatch.delitem(sys.modules, name)
    whole = builtins.__import__

    def absent(name, *args, **kwargs):
        if name.split(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {missing!r}")
        return whole(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ImportError, match=r"pip install metaphrase\[onnx\]"):
        execute(export, [str(source), str(tmp_path / "exported"), "--format", "onnx"])
