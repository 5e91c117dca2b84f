"""Tests of the ONNX export: graphs compute what the model computes, also at lengths that were not traced."""

import onnxruntime
import pytest
import torch
from subcommands import execute
from tiny_generator import save_generator, tiny_pair
from tiny_models import DESIGNS, random_batch, tiny_config, tiny_model

from metaphrase.conversion.onnx import export as onnx_export
from metaphrase.inference import Generator

GRAPHS = (onnx_export.ENCODER_NAME, onnx_export.DECODER_NAME)


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
    execute("export", [str(source), str(folder / "exported"), "--format", "onnx"])
    return generator.model, source, folder / "exported"


@pytest.mark.slow
def test_files_and_tensors_have_the_names_of_optimum(exported):
    model, _, folder = exported
    parts = ["decoder.key", "decoder.value", "encoder.key", "encoder.value"]
    past = [f"past_key_values.0.{part}" for part in parts]
    names = {}
    for name in GRAPHS:
        content = (folder / name).read_bytes()
        # Nothing shows where this machine has its files.
        assert b"stacks.py" not in content and b"site-packages" not in content
        graph = onnxruntime.InferenceSession(str(folder / name), providers=["CPUExecutionProvider"])
        names[name] = [[value.name for value in values] for values in (graph.get_inputs(), graph.get_outputs())]
        fixed = {axis for value in (*graph.get_inputs(), *graph.get_outputs()) for axis in value.shape[:2]}
        # Batch and lengths have names; the heads have not.
        heads = {model.config.num_key_value_heads, model.config.decoder_attention_heads}
        assert "batch_size" in fixed and not {2, 3, 4, 5, 7} & (fixed - heads)
    assert names == {
        onnx_export.ENCODER_NAME: [["input_ids", "attention_mask"], ["last_hidden_state"]],
        onnx_export.DECODER_NAME: [
            ["encoder_attention_mask", "input_ids", "encoder_hidden_states", *past],
            ["logits", *[name.replace("past_key_values", "present") for name in past], "cross_attentions.0"],
        ],
    }
    assert GRAPHS == ("encoder_model.onnx", "decoder_model_merged.onnx")


@pytest.mark.slow
def test_what_differs_is_found(exported):
    """One weight of each stack differs by a little more than the tolerance."""
    model, _, folder = exported
    onnx_export.check_graphs(model, folder)
    for stack, name in (
        (model.get_encoder(), onnx_export.ENCODER_NAME),
        (model.get_decoder(), onnx_export.DECODER_NAME),
    ):
        bias = stack.layers[0].mlp.down_proj.bias
        with torch.no_grad():
            old = bias.clone()
            bias[0] += 0.05
            with pytest.raises(RuntimeError, match=f"^{name} must compute what the model computes, within 0.0001 of"):
                onnx_export.check_graphs(model, folder)
            bias.copy_(old)


@pytest.mark.parametrize("name", ["sinusoidal", "half_split", "learned", "relative", "relative_per_layer"])
def test_tables_change_nothing(name):
    """The lengths reach beyond the last bucket and beyond the first table of sinusoids."""
    model = tiny_model(**DESIGNS[name])
    given = random_batch(model.config, batch=2, source=40, target=33)
    with torch.no_grad():
        expected = model(**given).logits
        onnx_export.use_tables(model)
        assert any(type(module).__name__.endswith("Table") for module in model.modules())
        torch.testing.assert_close(model(**given).logits, expected, rtol=0, atol=0)


SMALL = {name: fields | {"encoder_layers": 1, "decoder_layers": 1} for name, fields in DESIGNS.items()}
SMALL["windows"] |= {"encoder_layer_types": ["sliding_attention"]}
SMALL["merged"] = SMALL["rotary"] | {
    "merged_attention": True,
    "decoder_layer_types": ["sliding_attention"],
    "decoder_window": 3,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_every_design(name, tmp_path, monkeypatch):
    """The graphs of one design have their weights in separate files."""
    model = tiny_model(attn_implementation="eager", **SMALL[name])
    if name == "none":
        monkeypatch.setattr(onnx_export, "LARGEST_WEIGHTS_BYTES", 0)
    onnx_export.write_graphs(model, tmp_path)
    onnx_export.check_graphs(model, tmp_path)
    assert (tmp_path / f"{onnx_export.DECODER_NAME}_data").exists() == (name == "none")


LONGROPE = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 16}
REFUSED = {"dynamic": {"factor": 2.0}, "longrope": {"factor": 2.0, **LONGROPE}}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_exported_is_refused_by_name(kind, tmp_path):
    rotation = {"rope_type": kind, "rope_theta": 1e4, **REFUSED[kind]}
    source = save_generator(make_generator(rope_parameters=rotation), tmp_path / "model")
    with pytest.raises(ValueError, match=f"onnx cannot express `rope_parameters` with `rope_type` '{kind}'"):
        onnx_export.export_onnx(source, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()
    # The fields have no effect without rotary positions.
    assert not onnx_export.find_obstacles(tiny_config(position_embedding_type="none", rope_parameters=rotation))
