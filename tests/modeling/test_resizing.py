"""Tests of resizing one vocabulary or two: sizes, ties, kept entries, new entries."""

import copy

import pytest
import torch
from tiny_models import random_batch, tiny_config, tiny_model
from weights import TIES, assert_same_tensors, assert_std, expected_groups, tie_groups

from metaphrase.modeling import MetaphraseEncoderModel, MetaphraseForConditionalGeneration, MetaphraseModel

MODEL_CLASSES = [MetaphraseForConditionalGeneration, MetaphraseModel, MetaphraseEncoderModel]


def logits_of(model, inputs):
    with torch.no_grad():
        return model(**inputs).logits


@pytest.mark.parametrize("is_source", [True, False])
@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize(("requested", "multiple"), [(45, None), (20, None), (None, 16)])
def test_resizing_a_vocabulary_keeps_its_common_entries(ties, is_source, requested, multiple, tmp_path):
    model = tiny_model(**TIES[ties])
    config, old = model.config, copy.deepcopy(model)
    if config.share_embeddings and not is_source:
        with pytest.raises(ValueError, match="`share_embeddings` must be false"):
            model.resize_decoder_token_embeddings(40)
        return
    inputs = random_batch(tiny_config(**(TIES[ties] | {"vocab_size": 20, "decoder_vocab_size": 20})))
    resize = model.resize_token_embeddings if is_source else model.resize_decoder_token_embeddings
    embeddings = resize(requested, pad_to_multiple_of=multiple)
    stacks = [stack.embed_tokens for stack in (model.get_encoder(), model.get_decoder())]
    assert embeddings is stacks[0 if is_source else 1] and model.get_input_embeddings() is stacks[0]
    assert type(stacks[0]) is type(stacks[1]) and embeddings.embed_scale == 32**0.5
    before = [stack.embed_tokens.weight for stack in (old.get_encoder(), old.get_decoder())]
    resized = [is_source, config.share_embeddings or not is_source]
    sizes = [len(weight) for weight in before]
    sizes = [(requested or -(-size // 16) * 16) if new else size for size, new in zip(sizes, resized, strict=True)]
    assert [config.vocab_size, config.decoder_vocab_size] == sizes == [len(table.weight) for table in stacks]
    assert sizes == [table.num_embeddings for table in stacks] and model.lm_head.out_features == sizes[1]
    assert model.lm_head.weight.shape == (sizes[1], 32) and model.lm_head.bias.shape == (sizes[1],)
    assert tie_groups(model) == expected_groups(config)
    for new, weight in zip([table.weight for table in stacks], before, strict=True):
        common = min(len(new), len(weight))
        assert torch.equal(new[:common], weight[:common])
    common = min(sizes[1], len(old.lm_head.weight))
    assert torch.equal(model.lm_head.weight[:common], old.lm_head.weight[:common])
    assert torch.equal(model.lm_head.bias[:common], old.lm_head.bias[:common])
    torch.testing.assert_close(logits_of(model, inputs)[..., :common], logits_of(old, inputs)[..., :common])
    # It trains, generates, and is the same model after saving.
    labels = torch.full((3, 4), config.decoder_vocab_size - 1)
    sources = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    model(**sources, labels=labels).loss.backward()
    assert model.lm_head.weight.grad[-1].any()
    generated = model.generate(**sources, max_new_tokens=3, num_beams=2)
    model.save_pretrained(tmp_path)
    loaded, info = MetaphraseForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert_same_tensors(loaded, model)
    assert tie_groups(loaded) == expected_groups(config)
    assert torch.equal(loaded.generate(**sources, max_new_tokens=3, num_beams=2), generated)


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("model_class", [MetaphraseModel, MetaphraseEncoderModel])
def test_models_without_a_head_resize(model_class, ties, tmp_path):
    model = tiny_model(model_class, **TIES[ties])
    model.resize_token_embeddings(50)
    assert model.get_input_embeddings().weight.shape == (50, 32)
    model.save_pretrained(tmp_path)
    assert_same_tensors(model_class.from_pretrained(tmp_path), model)
    if model_class is MetaphraseModel and not model.config.share_embeddings:
        assert model.resize_decoder_token_embeddings(45) is model.get_decoder().embed_tokens
        assert model.config.decoder_vocab_size == 45 and model.config.vocab_size == 50


@pytest.mark.parametrize("ties", TIES)
def test_resizing_keeps_what_was_frozen(ties):
    model = tiny_model(**TIES[ties]).requires_grad_(False)
    model.resize_token_embeddings(45)
    if not model.config.share_embeddings:
        model.resize_decoder_token_embeddings(45)
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("initializer_range", [None, 0.4])
def test_new_entries_are_initialized_like_old_ones(ties, initializer_range):
    model = tiny_model(**TIES[ties], initializer_range=initializer_range)
    model.resize_token_embeddings(237, mean_resizing=False)
    if not model.config.share_embeddings:
        model.resize_decoder_token_embeddings(231, mean_resizing=False)
    std = initializer_range or 32**-0.5
    assert_std(model.get_encoder().embed_tokens.weight[37:], std, "source")
    assert_std(model.get_decoder().embed_tokens.weight[-200:], std, "target")
    assert not model.lm_head.bias[-200:].any()


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_setting_embeddings(model_class):
    model = tiny_model(model_class, logits_bias=True)
    embeddings = copy.deepcopy(model.get_input_embeddings())
    model.set_input_embeddings(embeddings)
    assert model.get_input_embeddings() is model.encoder.embed_tokens if hasattr(model, "encoder") else True
    assert model.get_input_embeddings() is embeddings
    if model_class is MetaphraseForConditionalGeneration:
        head = torch.nn.Linear(32, 37)
        model.set_output_embeddings(head)
        assert model.get_output_embeddings() is head
        model.tie_weights()
        assert tie_groups(model) == {frozenset(("source", "target", "head"))}
    else:
        assert model.get_output_embeddings() is None
