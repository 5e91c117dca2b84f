"""Tests of the conversion of folders, also from the Hub: files, dtypes, ties, tokenizers, settings, refusals, memory."""

import io
import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from converted_models import bart_like, draw, encoder_decoder_like, fill_randomly
from hub_copies import FLAT_FILES
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from small_runs import read
from subcommands import execute
from tiny_generator import SOURCES, TARGETS, tiny_pair
from tiny_models import tiny_model

from metaphrase.conversion import FAMILIES, checkpoints, convert
from metaphrase.conversion.folders import _tokenizer_class
from metaphrase.modeling import MetaphraseConfig, MetaphraseForConditionalGeneration
from metaphrase.scripts.__main__ import run
from metaphrase.tokenization import TokenizerPair

TINY = {"vocab_size": 37, "hidden_size": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
TINY |= {f"{stack}_{field}": 4 for stack in ("encoder", "decoder") for field in ("layers", "attention_heads")}


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


def test_converted_folder_needs_no_package_and_stores_tied_weights_once(bart, tmp_path):
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
    convert(tmp_path / "ours", tmp_path / "theirs", to="bart")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    names = [name for name in ours if "embed_tokens" in name or "lm_head.w" in name]
    assert names == ["model.encoder.embed_tokens.weight"]
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
        assert_equal_logits(transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / name), model)


def test_each_weight_keeps_its_type(tmp_path):
    sizes = {"vocab_size": 37, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0)).bfloat16()
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
    assert_equal_logits(ours, transformers.BartForConditionalGeneration.from_pretrained(source))


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
    assert_equal_logits(transformers.MarianMTModel.from_pretrained(tmp_path / "again"), theirs)


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
    loaded = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "theirs")
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
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "theirs")
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
    weights = load_file(source / "model.safetensors")
    weights["model.encoder.layers.0.fc1.weight"] = weights["model.encoder.layers.0.fc1.weight"].to(torch.float8_e4m3fn)
    save_file(weights, source / "model.safetensors")
    with pytest.raises(ValueError, match=r"must hold plain weights, got `model\.encoder.+ in F8_E4M3"):
        convert(source, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("form", ["whole", "before torch 1.6", "sharded"])
def test_weights_that_torch_saved_are_read(bart, form, tmp_path):
    folder, _ = bart
    convert(folder, tmp_path / "expected")
    source = shutil.copytree(folder, tmp_path / "theirs")
    # transformers wrote tied weights under all their names.
    weights = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).state_dict()
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
    legacy = torch_bytes({"weight": torch.ones(9)}, _use_new_zipfile_serialization=False)
    wrong = (["no names"], {"weight": 1})
    damaged = [
        legacy[:1],
        legacy[:-300],
        legacy.replace(b"_rebuild_tensor_v2", b"_rebuild_tensor_\xff2"),
        b"ustar" + bytes(600),
    ]
    for content in (hostile, pickle.dumps({"weight": Path("other")}), b"", *damaged, *map(torch_bytes, wrong)):
        (source / "pytorch_model.bin").write_bytes(content)
        with pytest.raises(ValueError, match=r"pytorch_model\.bin must be a whole file of named tensors"):
            convert(source, tmp_path / "ours")
    assert not opened.exists() and not (tmp_path / "ours").exists()


def torch_bytes(value, **options):
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def test_what_cannot_be_converted_is_refused(bart, tmp_path, capsys):
    folder, _ = bart
    tiny_model().save_pretrained(tmp_path / "ours")
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "taken").mkdir()
    for words, said in (
        ([tmp_path / "ours", tmp_path / "a"], "`to` must be one of t5, mt5"),
        ([folder, tmp_path / "a", "--to", "t5"], "`to` must be left out for a bart, got 't5'"),
        ([tmp_path / "ours", tmp_path / "a", "--to", "brat"], "got 'brat'"),
        ([tmp_path / "llama", tmp_path / "a"], "`model_type` must be one of t5, mt5"),
        ([folder, tmp_path / "taken"], "`output` must not exist"),
        ([folder, tmp_path / "taken", "--overwrite"], "`output` must hold only the files that conversion.json lists"),
        ([folder, folder / "inside"], "`output` must lie apart from what is converted"),
    ):
        assert run("convert", [str(word) for word in words]) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(ValueError, match=rf"`model_type` must be metaphrase, got 'bart'.*`metaphrase convert {folder}"):
        load_ours(folder)


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


def test_checkpoint_on_the_hub_is_converted(tmp_path, monkeypatch):
    hub, cache, calls = tmp_path / "hub", tmp_path / "cache", []

    def download(name, revision, **patterns):
        calls.append((name, revision))
        files = [path.relative_to(hub).as_posix() for path in hub.rglob("*") if path.is_file()]
        for file in filter_repo_objects(files, **patterns):
            (cache / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(hub / file, cache / file)
        return str(cache)

    monkeypatch.setattr(checkpoints, "snapshot_download", download)
    theirs = bart_like("bart", draw("bart", 101), tie_word_embeddings=True)
    theirs.save_pretrained(hub)
    torch.save(theirs.state_dict(), hub / "pytorch_model.bin")
    (hub / "tf_model.h5").write_bytes(b"another")
    (hub / "checkpoint-10").mkdir()
    (hub / "checkpoint-10" / "model.safetensors").write_bytes(b"of a run")
    execute("convert", ["somebody/bart", str(tmp_path / "ours"), "--revision", "v1"])
    written = load_file(tmp_path / "ours" / "model.safetensors")
    assert torch.equal(written["model.encoder.embed_tokens.weight"], theirs.get_input_embeddings().weight)
    provenance = json.loads((tmp_path / "ours" / "conversion.json").read_text(encoding="utf-8"))
    assert provenance["source"] == "somebody/bart" and calls == [("somebody/bart", "v1")]
    # Weights in a second format, and those that a run left behind, are not even fetched.
    assert {path.name for path in cache.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}
    # Many older models have nothing else.
    (hub / "model.safetensors").unlink()
    (cache / "model.safetensors").unlink()
    execute("convert", ["somebody/bart", str(tmp_path / "old"), "--revision", "v1"])
    old = load_file(tmp_path / "old" / "model.safetensors")
    assert old.keys() == written.keys() and all(torch.equal(old[name], written[name]) for name in old)


@pytest.fixture
def source(bart, tmp_path):
    """A folder with a BART and a tokenizer."""
    folder = shutil.copytree(bart[0], tmp_path / "theirs")
    tiny_pair().save_pretrained(folder)
    return folder


def change(path, removed=(), **fields):
    """Change some fields of a JSON file."""
    content = json.loads(path.read_text(encoding="utf-8")) | fields
    path.write_text(json.dumps({name: content[name] for name in content if name not in removed}), encoding="utf-8")


def test_tokenizers_and_generation_settings_come_along(source, tmp_path):
    (source / "LICENSE").write_text("free", encoding="utf-8")
    change(source / "generation_config.json", num_beams=3, forced_bos_token_id=7, max_length=11)
    convert(source, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "again", to="bart")
    for name in ("ours", "again"):
        pair = TokenizerPair.from_pretrained(tmp_path / name)
        assert pair.encode_sources(SOURCES) == tiny_pair().encode_sources(SOURCES)
        assert (tmp_path / name / "LICENSE").read_text(encoding="utf-8") == "free"
        written = read(tmp_path / name / "generation_config.json")
        assert written["num_beams"] == 3 and written["forced_bos_token_id"] == 7 and written["max_length"] == 11


@pytest.mark.parametrize("named", [None, "BertTokenizer"])
def test_tokenizer_without_a_class_takes_that_of_the_configuration_or_family(named, source, tmp_path):
    change(source / "tokenizer_config.json", removed=["tokenizer_class"])
    change(source / "config.json", tokenizer_class=named)
    convert(source, tmp_path / "ours")
    expected = named or "RobertaTokenizer"
    assert read(tmp_path / "ours" / "tokenizer_config.json")["tokenizer_class"] == expected
    assert type(transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")).__name__ == expected


def test_tokenizer_of_an_encoder_decoder_is_that_of_its_encoder(tmp_path):
    encoder_decoder_like("roberta", draw("roberta", 0)).save_pretrained(tmp_path / "theirs")
    tiny_pair().save_pretrained(tmp_path / "theirs")
    change(tmp_path / "theirs" / "tokenizer_config.json", removed=["tokenizer_class"])
    convert(tmp_path / "theirs", tmp_path / "ours")
    assert read(tmp_path / "ours" / "tokenizer_config.json")["tokenizer_class"] == "RobertaTokenizer"


@pytest.mark.parametrize(
    ("model_type", "named"),
    [("bart", None), ("bart", "BertTokenizer"), ("umt5", "T5Tokenizer"), ("umt5", None), ("t5", "TokenizersBackend")],
)
def test_tokenizer_class_is_the_one_that_transformers_takes(model_type, named, source):
    removed = ["tokenizer_class"] if named is None else []
    change(source / "tokenizer_config.json", removed, **({} if named is None else {"tokenizer_class": named}))
    change(source / "config.json", model_type=model_type)
    assert type(transformers.AutoTokenizer.from_pretrained(source)).__name__ == _tokenizer_class(model_type, named)


def test_nothing_of_a_training_comes_along(source, bart, tmp_path):
    pair = tiny_pair(False)
    pair.save_pretrained(source)
    for name in ("target_vocab.json", "bpe.codes"):
        (source / name).write_text("{}", encoding="utf-8")
    shutil.copytree(bart[0], source / "checkpoint-5")
    pair.source.save_pretrained(source / "checkpoint-5")
    (source / "target_tokenizer" / "notes.md").write_text("mine", encoding="utf-8")
    convert(source, tmp_path / "ours")
    assert {path.name for path in (tmp_path / "ours").iterdir() if path.is_dir()} == {"target_tokenizer"}
    assert all((tmp_path / "ours" / name).is_file() for name in ("target_vocab.json", "bpe.codes"))
    assert not (tmp_path / "ours" / "target_tokenizer" / "notes.md").exists()
    assert TokenizerPair.from_pretrained(tmp_path / "ours").encode_targets(TARGETS) == pair.encode_targets(TARGETS)


def test_settings_of_older_days_are_in_the_configuration(source, tmp_path):
    (source / "generation_config.json").unlink()
    change(source / "config.json", num_beams=4, max_length=13)
    convert(source, tmp_path / "ours")
    written = read(tmp_path / "ours" / "generation_config.json")
    assert written["num_beams"] == 4 and written["max_length"] == 13 and written["forced_eos_token_id"] == 2
    assert "d_model" not in written and "architectures" not in written


PROGRAM = """
import sys
from metaphrase.conversion import convert
from metaphrase.conversion.folders import *  # all that a conversion imports

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024

before = peak()
convert(sys.argv[1], sys.argv[2], max_shard_size="20MB", **dict(word.split("=") for word in sys.argv[3:]))
print(peak() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak from /proc")
@pytest.mark.slow
def test_peak_is_within_one_and_a_half_checkpoints(tmp_path):
    config = transformers.T5Config(d_model=512, d_kv=64, d_ff=1024, num_layers=4, num_heads=8, vocab_size=20000)
    with torch.device("meta"):
        theirs = transformers.T5ForConditionalGeneration(config)
    theirs.to_empty(device="cpu").tie_weights()
    for weight in theirs.parameters():
        # Memory that was not written may hold NaN, which a conversion refuses.
        torch.nn.init.ones_(weight)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20MB")
    size = sum(path.stat().st_size for path in (tmp_path / "theirs").glob("*.safetensors"))
    assert size > 100 * 10**6
    for words in ((tmp_path / "theirs", tmp_path / "ours"), (tmp_path / "ours", tmp_path / "again", "to=t5")):
        command = [sys.executable, "-c", PROGRAM, *map(str, words)]
        peak = int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout)
        # The mapped files count, though the system could take their pages back.
        assert peak < 1.5 * size
