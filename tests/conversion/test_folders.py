"""Tests of the conversion of folders: files, dtypes, ties, tokenizers, settings and refusals."""

import io
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from converted_models import bart_like, draw, fill_randomly
from hub_copies import FLAT_FILES
from safetensors.torch import load_file, save_file
from small_runs import read
from tiny_models import tiny_model
from transformers import (
    AutoModelForSeq2SeqLM,
    BartForConditionalGeneration,
    MarianMTModel,
    T5Config,
    T5ForConditionalGeneration,
)

from metaphrase.conversion import FAMILIES, convert
from metaphrase.modeling import MetaphraseConfig, MetaphraseForConditionalGeneration
from metaphrase.scripts.__main__ import run

TINY = {"vocab_size": 37, "hidden_size": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
TINY |= {f"{stack}_{field}": 4 for stack in ("encoder", "decoder") for field in ("layers", "attention_heads")}


def tiny_t5(**fields):
    config = T5Config(
        vocab_size=37, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0, **fields
    )
    model = T5ForConditionalGeneration(config).eval()
    fill_randomly(model, 0)
    return model


def logits_of(model):
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    with torch.no_grad():
        return model.eval()(input_ids=ids, decoder_input_ids=ids.flip(1)).logits


def load_ours(folder):
    return MetaphraseForConditionalGeneration.from_pretrained(folder)


def assert_equal_logits(model, expected):
    torch.testing.assert_close(logits_of(model), logits_of(expected), atol=1e-5, rtol=1e-5)


def changed(folder, output, change):
    """A copy of a folder whose weights were changed."""
    shutil.copytree(folder, output)
    tensors = load_file(output / "model.safetensors")
    change(tensors)
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    return output


def test_converted_folder_needs_no_package(bart, tmp_path):
    folder, _ = bart
    convert(folder, tmp_path / "ours")
    names = {path.name for path in (tmp_path / "ours").iterdir()}
    assert names == FLAT_FILES | {"config.json", "generation_config.json", "model.safetensors", "conversion.json"}
    written = read(tmp_path / "ours" / "config.json")
    assert written["auto_map"]["AutoModelForSeq2SeqLM"] == "modeling_metaphrase.MetaphraseForConditionalGeneration"
    assert written["architectures"] == ["MetaphraseForConditionalGeneration"]
    provenance = read(tmp_path / "ours" / "conversion.json")
    assert provenance.pop("files") == sorted(names - {"conversion.json"})
    assert provenance == {"source": "bart", "from": "bart", "to": "metaphrase"}


def test_tied_weights_are_stored_once(bart, tmp_path):
    folder, _ = bart
    convert(folder, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "theirs", to="bart")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert [name for name in ours if "embed_tokens" in name or "lm_head.w" in name] == [
        "model.encoder.embed_tokens.weight"
    ]
    assert set(theirs) == set(load_file(folder / "model.safetensors"))
    names = {path.name for path in (tmp_path / "theirs").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors", "conversion.json"}


def test_weights_may_lie_in_many_files(bart, tmp_path):
    _, model = bart
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    convert(tmp_path / "shards", tmp_path / "ours", max_shard_size="20000")
    convert(tmp_path / "ours", tmp_path / "theirs", to="bart")
    files = list((tmp_path / "ours").glob("*.safetensors"))
    assert len(files) > 2 and len(list((tmp_path / "theirs").glob("*.safetensors"))) == 1
    for path in files:
        tensors = load_file(path).values()
        assert sum(tensor.nbytes for tensor in tensors) <= 20_000 or len(tensors) == 1
    for name in ("ours", "theirs"):
        assert_equal_logits(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / name), model)


def test_each_weight_keeps_its_type(tmp_path):
    model = tiny_t5().bfloat16()
    model.config.dtype = torch.bfloat16
    model.save_pretrained(tmp_path / "theirs")

    def in_part(tensors):
        for name in tensors:
            if name.endswith("wo.weight"):
                tensors[name] = tensors[name].float()

    folder = changed(tmp_path / "theirs", tmp_path / "mixed", in_part)
    convert(folder, tmp_path / "ours")
    kinds = {name: value.dtype for name, value in load_file(tmp_path / "ours" / "model.safetensors").items()}
    assert {kind for name, kind in kinds.items() if "down_proj" in name} == {torch.float32}
    assert {kind for name, kind in kinds.items() if "down_proj" not in name} == {torch.bfloat16}
    assert read(tmp_path / "ours" / "config.json")["dtype"] == "bfloat16"
    assert load_ours(tmp_path / "ours").dtype == torch.bfloat16
    convert(tmp_path / "ours", tmp_path / "again", to="t5")
    first, again = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "again"))
    assert first.keys() == again.keys()
    assert all(first[name].dtype == again[name].dtype and torch.equal(first[name], again[name]) for name in first)


def test_checkpoint_of_the_model_without_a_head(bart, tmp_path):
    _, model = bart
    model.model.save_pretrained(tmp_path / "bare")
    assert not any(name.startswith("model.") for name in load_file(tmp_path / "bare" / "model.safetensors"))
    convert(tmp_path / "bare", tmp_path / "ours")
    ours = load_ours(tmp_path / "ours")
    bias = model.final_logits_bias
    torch.testing.assert_close(logits_of(ours) + bias, logits_of(model), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("factor", [1, 2])
def test_head_that_differs_from_the_embedding_is_not_tied(factor, bart, tmp_path):
    def add_head(tensors):
        tensors["lm_head.weight"] = tensors["model.shared.weight"] * factor

    source = changed(bart[0], tmp_path / "theirs", add_head)
    ours = load_ours(convert(source, tmp_path / "ours"))
    assert ours.config.tie_word_embeddings is (factor == 1)
    assert_equal_logits(ours, BartForConditionalGeneration.from_pretrained(source))


def test_embeddings_that_are_equal_but_not_tied_stay_apart(bart, tmp_path):
    def copy(tensors):
        for name in ("lm_head.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"):
            tensors[name] = tensors["model.shared.weight"].clone()

    source = changed(bart[0], tmp_path / "theirs", copy)
    config = read(source / "config.json") | {"tie_word_embeddings": False}
    (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
    ours = load_ours(convert(source, tmp_path / "ours"))
    assert not ours.config.tie_word_embeddings and not ours.config.share_embeddings
    assert_equal_logits(ours, bart[1])


def test_trained_positions_of_marian_become_learned(tmp_path):
    ids = {"pad_token_id": 28, "decoder_start_token_id": 28, "eos_token_id": 0, "forced_eos_token_id": 0}
    theirs = bart_like("marian", draw("marian", 100), tie_word_embeddings=True, **ids).eval()
    theirs._keys_to_ignore_on_save = None
    with torch.no_grad():
        theirs.model.decoder.embed_positions.weight += 0.1
    theirs.save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours")
    ours = load_ours(tmp_path / "ours")
    assert ours.config.position_embedding_type == "learned"
    assert_equal_logits(ours, theirs)
    convert(tmp_path / "ours", tmp_path / "again", to="marian")
    assert_equal_logits(MarianMTModel.from_pretrained(tmp_path / "again"), theirs)


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_a_lost_layerdrop_is_reported(share, tmp_path, caplog):
    bart_like("bart", draw("bart", 0), decoder_layerdrop=share).save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours")
    assert ("LayerDrop is left out" in caplog.text) == (share > 0)


def test_t5_says_whether_it_is_tied_to_older_versions_too(tmp_path):
    config = MetaphraseConfig.from_preset("t5-v1.1-small", **TINY, head_dim=8)
    MetaphraseForConditionalGeneration(config).save_pretrained(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "theirs", to="t5")
    written = read(tmp_path / "theirs" / "config.json")
    assert written["tie_word_embeddings"] is False
    loaded = T5ForConditionalGeneration.from_pretrained(tmp_path / "theirs")
    assert loaded.config.scale_decoder_outputs is False
    assert not torch.equal(loaded.lm_head.weight, loaded.shared.weight)


PRESETS = {"bart-base": "bart", "marian": "marian", "t5-v1.1-base": "t5"}


@pytest.mark.parametrize("preset", PRESETS)
def test_published_presets_fit_their_family(preset, tmp_path):
    family = PRESETS[preset]
    ids = {"pad_token_id": 36, "decoder_start_token_id": 36} if family == "marian" else {}
    head = {"head_dim": 8} if family == "t5" else {}
    config = MetaphraseConfig.from_preset(preset, **TINY, **ids, **head)
    ours = MetaphraseForConditionalGeneration(config)
    fill_randomly(ours, 1)
    ours.save_pretrained(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "theirs", to=family)
    theirs = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "theirs")
    assert theirs.config.model_type == family
    if family == "bart":
        # The rows above the first position, which nothing reads.
        assert not theirs.model.decoder.embed_positions.weight[:2].any()
    assert_equal_logits(theirs, ours)
    convert(tmp_path / "theirs", tmp_path / "again")
    again = load_ours(tmp_path / "again")
    assert_equal_logits(again, ours)


def test_every_option_in_the_way_is_named(tmp_path):
    tiny_model(num_key_value_heads=2, head_dim=6, position_offset=5).save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match="The model is no bart") as error:
        convert(tmp_path / "ours", tmp_path / "theirs", to="bart")
    said = str(error.value)
    fields = ("position_embedding_type", "norm_type", "norm_position", "norm_eps", "embedding_norm", "final_norm")
    for field in (*fields, "gated_mlp", "num_key_value_heads", "head_dim", "position_offset"):
        assert f"`{field}` must be" in said
    assert not (tmp_path / "theirs").exists()


def test_every_field_is_mapped_fixed_or_free():
    """A field that a family forgets would change what its model computes, unseen."""
    declared = {name for name in MetaphraseConfig.__annotations__ if name in MetaphraseConfig.__dataclass_fields__}
    common = {"decoder_vocab_size", "num_key_value_heads", "head_dim", "tie_word_embeddings", "share_embeddings"}
    common |= {"position_embedding_type", "position_offset", "sinusoidal_layout", "max_position_embeddings"}
    common |= {"activation_function", "decoder_attention_heads", "decoder_ffn_dim"}
    common |= {name for name in declared if name.endswith("_token_id")}
    for family in FAMILIES.values():
        known = common | family.variable_fields | family.free | {*family.field_names, *family.fixed}
        assert declared - known == set(), family.name


@pytest.mark.parametrize("to", [None, "bart"])
def test_weights_must_be_those_of_the_class(to, bart, tmp_path):
    folder, name = bart[0], "model.decoder.layers.0.fc1.weight"
    edits = {
        "are missing": lambda tensors: tensors.pop(name),
        "must have the shape": lambda tensors: tensors.update({name: tensors[name][1:].clone()}),
    }
    if to is not None:
        folder, name = tmp_path / "ours", "model.encoder.layers.1.mlp.up_proj.weight"
        MetaphraseForConditionalGeneration(MetaphraseConfig.from_preset("bart-base", **TINY)).save_pretrained(folder)
        edits["no place in the model: extra"] = lambda tensors: tensors.update(extra=torch.zeros(2))
    for message, edit in edits.items():
        with pytest.raises(ValueError, match=message):
            convert(changed(folder, tmp_path / message, edit), tmp_path / "output", to=to)
    assert not (tmp_path / "output").exists() and not list(tmp_path.glob(".*partial"))


def test_weights_that_the_class_does_not_read_are_left_behind_and_named(bart, tmp_path, caplog):
    folder, model = bart

    def add(tensors):
        for number in range(7):
            tensors[f"model.decoder.adapter.{number}.weight"] = torch.zeros(2)

    source = changed(folder, tmp_path / "more", add)
    convert(source, tmp_path / "ours")
    ours = load_ours(tmp_path / "ours")
    assert_equal_logits(ours, model)
    [said] = [record.getMessage() for record in caplog.records if "left behind" in record.getMessage()]
    assert "model.decoder.adapter.0.weight, " in said and said.endswith("model.decoder.adapter.4.weight and 2 more.")


def test_quantized_weights_are_refused(bart, tmp_path):
    source = shutil.copytree(bart[0], tmp_path / "quantized")
    config = read(source / "config.json")
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ValueError, match="must hold plain weights, got `quantization_config`"):
        convert(source, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("form", ["whole", "before torch 1.6", "sharded"])
def test_weights_that_torch_saved_are_read(bart, form, tmp_path):
    folder, _ = bart
    convert(folder, tmp_path / "expected")
    source = shutil.copytree(folder, tmp_path / "theirs")
    # transformers wrote tied weights under all their names.
    weights = AutoModelForSeq2SeqLM.from_pretrained(folder).state_dict()
    (source / "model.safetensors").unlink()
    if form == "sharded":
        names = sorted(weights)
        files = {name: f"pytorch_model-{1 + index % 2:05d}-of-00002.bin" for index, name in enumerate(names)}
        (source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
        for file in set(files.values()):
            torch.save({name: weights[name] for name in names if files[name] == file}, source / file)
    else:
        torch.save(weights, source / "pytorch_model.bin", _use_new_zipfile_serialization=form == "whole")
    convert(source, tmp_path / "ours")
    written, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "expected"))
    assert written.keys() == expected.keys() and all(torch.equal(written[name], expected[name]) for name in expected)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_pickle_runs_no_code(bart, tmp_path):
    folder, _ = bart
    source, opened = shutil.copytree(folder, tmp_path / "theirs"), tmp_path / "opened"
    (source / "model.safetensors").unlink()
    hostile = f"cos\nsystem\n(S'touch {opened}'\ntR.".encode()
    for content in (hostile, pickle.dumps({"weight": Path("other")}), b"", torch_bytes(["no names"])):
        (source / "pytorch_model.bin").write_bytes(content)
        with pytest.raises(ValueError, match=r"pytorch_model\.bin must be a whole file of named tensors"):
            convert(source, tmp_path / "ours")
    assert not opened.exists() and not (tmp_path / "ours").exists()


def torch_bytes(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def test_what_cannot_be_converted_is_refused(bart, tmp_path, capsys):
    folder, _ = bart
    tiny_model().save_pretrained(tmp_path / "ours")
    for name in ("llama", "switch_transformers"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": name}))
    (tmp_path / "taken").mkdir()
    for words, said in (
        ([tmp_path / "ours", tmp_path / "a"], "`to` must be one of t5, mt5"),
        ([folder, tmp_path / "a", "--to", "t5"], "`to` must be left out for a bart, got 't5'"),
        ([tmp_path / "ours", tmp_path / "a", "--to", "brat"], "got 'brat'"),
        ([tmp_path / "llama", tmp_path / "a"], "`model_type` must be one of t5, mt5"),
        ([tmp_path / "switch_transformers", tmp_path / "a"], "switch_transformers cannot be converted: it has experts"),
        ([folder, tmp_path / "taken"], "`output` must not exist"),
        ([folder, tmp_path / "taken", "--overwrite"], "`output` must hold only the files that conversion.json lists"),
        ([folder, folder / "inside"], "`output` must lie apart from what is converted"),
    ):
        assert run("convert", [str(word) for word in words]) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(ValueError, match=rf"`model_type` must be metaphrase, got 'bart'.*`metaphrase convert {folder}"):
        load_ours(folder)


def test_conversion_may_be_overwritten(bart, tmp_path):
    folder, _ = bart
    convert(folder, tmp_path / "ours")
    (tmp_path / "ours" / "model.safetensors").unlink()
    (tmp_path / "ours" / "README.md").write_text("A card of my own.")
    assert run("convert", [str(folder), str(tmp_path / "ours"), "--overwrite"]) == 0
    assert (tmp_path / "ours" / "model.safetensors").is_file()
    assert (tmp_path / "ours" / "README.md").read_text() == "A card of my own."


def test_a_link_out_of_the_folder_is_not_copied(bart, tmp_path):
    folder = Path(shutil.copytree(bart[0], tmp_path / "hub" / "snapshots" / "main"))
    (tmp_path / "key").write_text("private")
    (folder / "NOTICE").write_text("by nobody")
    (folder / "LICENSE").symlink_to("NOTICE")
    convert(folder, tmp_path / "one")
    (folder / "LICENSE").unlink()
    (folder / "LICENSE").symlink_to(tmp_path / "key")
    with pytest.raises(ValueError, match=r"`source` must hold no link to a file outside of it, got .*LICENSE -> .*key"):
        convert(folder, tmp_path / "two")
    assert not (tmp_path / "two").exists()
    # The cache of the Hub keeps the content of files there.
    (tmp_path / "hub" / "blobs").mkdir()
    (tmp_path / "key").rename(tmp_path / "hub" / "blobs" / "0123")
    (folder / "LICENSE").unlink()
    (folder / "LICENSE").symlink_to("../../blobs/0123")
    assert (convert(folder, tmp_path / "two") / "LICENSE").read_text() == "private"
