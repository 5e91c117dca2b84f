"""Tests of saving and loading: every class, every tie, every precision, and nothing to warn of."""

import copy

import pytest
import torch
from hub_copies import FLAT_FILES
from safetensors.torch import load_file
from tiny_models import CROSSED, DESIGNS, fields_of, random_batch, tiny_model
from transformers import AutoModel, AutoModelForSeq2SeqLM, AutoModelForTextEncoding
from weights import TIES, assert_same_tensors, expected_groups, tie_groups

from metaphrase.modeling import MetaphraseEncoderModel, MetaphraseForConditionalGeneration, MetaphraseModel

MODEL_CLASSES = [MetaphraseForConditionalGeneration, MetaphraseModel, MetaphraseEncoderModel]


@pytest.mark.parametrize("design", CROSSED)
def test_loaded_model_is_the_saved_one(design, tmp_path, warned):
    model = tiny_model(**CROSSED[design])
    model.save_pretrained(tmp_path)
    loaded, info = MetaphraseForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert not loaded.training
    assert_same_tensors(loaded, model)
    assert fields_of(loaded.config) == fields_of(model.config)
    inputs = random_batch(model.config)
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)
    assert not warned


@pytest.mark.parametrize("design", ["learned", "relative_per_layer"])
@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_every_class_loads_from_the_folder_of_the_whole_model(model_class, design, tmp_path, warned):
    whole = tiny_model(**DESIGNS[design])
    whole.save_pretrained(tmp_path)
    # Without the files of code, nothing but the package can be the source of the classes.
    for name in FLAT_FILES:
        (tmp_path / name).unlink()
    auto_class, part = {
        MetaphraseForConditionalGeneration: (AutoModelForSeq2SeqLM, whole),
        MetaphraseModel: (AutoModel, whole.model),
        MetaphraseEncoderModel: (AutoModelForTextEncoding, whole.model.encoder),
    }[model_class]
    for loader in (model_class, auto_class):
        loaded, info = loader.from_pretrained(tmp_path, output_loading_info=True)
        assert type(loaded) is model_class
        assert not info["missing_keys"] and not info["mismatched_keys"]
        # The head, unless tied, is what the model without one has no place for.
        of_head = {name for name in whole.state_dict() if not name.startswith("model.")}
        of_head -= {"lm_head.weight"} if whole.config.tie_word_embeddings else set()
        assert set(info["unexpected_keys"]) == (of_head if model_class is MetaphraseModel else set())
        assert_same_tensors(loaded.encoder if model_class is MetaphraseEncoderModel else loaded, part)
    inputs = random_batch(whole.config)
    if model_class is MetaphraseEncoderModel:
        del inputs["decoder_input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(loaded(**inputs)[0], part(**inputs)[0], rtol=0, atol=0)
    if model_class is not MetaphraseModel:
        assert not warned


@pytest.mark.parametrize("ties", TIES)
def test_ties_before_and_after_saving(ties, tmp_path):
    model = tiny_model(**TIES[ties])
    config = model.config
    assert tie_groups(model) == expected_groups(config)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors").keys()
    embeddings = {"model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"}
    assert len(embeddings & saved) == len(expected_groups(config))
    assert saved <= model.state_dict().keys()
    loaded = MetaphraseForConditionalGeneration.from_pretrained(tmp_path)
    assert tie_groups(loaded) == expected_groups(config)
    for clone in (copy.deepcopy(model), loaded.to(torch.float64)):
        assert tie_groups(clone) == expected_groups(config)


NAMES = {
    "source": "model.encoder.embed_tokens.weight",
    "target": "model.decoder.embed_tokens.weight",
    "head": "lm_head.weight",
}


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("saved", NAMES)
def test_checkpoint_with_any_name_of_a_tied_weight_is_complete(ties, saved, tmp_path):
    model = tiny_model(**TIES[ties])
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for group in expected_groups(model.config):
        for member in group - {saved} if saved in group else ():
            del state[NAMES[member]]
    loaded, info = MetaphraseForConditionalGeneration.from_pretrained(
        None, config=model.config, state_dict=state, output_loading_info=True
    )
    assert not any(info.values()), info
    assert_same_tensors(loaded, model)
    assert tie_groups(loaded) == expected_groups(model.config)


@pytest.mark.parametrize("design", ["relative", "rotary"])
def test_sharded_checkpoint_with_device_map(design, tmp_path):
    model = tiny_model(**DESIGNS[design])
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_same_tensors(MetaphraseForConditionalGeneration.from_pretrained(tmp_path, device_map="cpu"), model)
    assert_same_tensors(MetaphraseForConditionalGeneration.from_pretrained(tmp_path, low_cpu_mem_usage=True), model)


@pytest.mark.parametrize("design", DESIGNS)
def test_loading_in_bfloat16_keeps_the_tables_exact(design, tmp_path):
    model = tiny_model(**DESIGNS[design])
    model.save_pretrained(tmp_path)
    loaded = MetaphraseForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.dtype == torch.bfloat16 and loaded.config.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    buffers = dict(loaded.named_buffers())
    for name, buffer in model.named_buffers():
        assert torch.equal(buffers[name], buffer), name
