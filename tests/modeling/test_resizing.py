"""Tests of resizing one vocabulary or two: sizes, ties, kept entries, new entries."""

import copy

import pytest
import torch
from tiny_models import random_batch, randomize, tiny_config, tiny_model
from weights import TIES, assert_same_tensors, assert_std, every_tensor, expected_groups, tie_groups

from metaphrase.modeling import MetaphraseEncoderModel, MetaphraseForConditionalGeneration, MetaphraseModel

MODEL_CLASSES = [MetaphraseForConditionalGeneration, MetaphraseModel, MetaphraseEncoderModel]


def logits_of(model, inputs):
    with torch.no_grad():
        return model(**inputs).logits


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize(("requested", "multiple", "size"), [(45, None, 45), (20, None, 20), (None, 16, 48)])
def test_resizing_the_source_or_both(ties, requested, multiple, size, tmp_path):
    model = tiny_model(**TIES[ties])
    config = model.config
    old_head, old_source = copy.deepcopy(model.lm_head), model.get_input_embeddings().weight.detach().clone()
    inputs = random_batch(tiny_config(**(TIES[ties] | {"vocab_size": 20, "decoder_vocab_size": 20})))
    before = logits_of(model, inputs)
    embeddings = model.resize_token_embeddings(requested, pad_to_multiple_of=multiple)

    assert embeddings is model.get_input_embeddings() is model.get_encoder().embed_tokens
    assert type(embeddings) is type(model.get_decoder().embed_tokens)
    assert embeddings.embed_scale == 32**0.5
    assert config.vocab_size == embeddings.num_embeddings == len(embeddings.weight) == size
    common = min(37, size)
    assert torch.equal(embeddings.weight[:common], old_source[:common])
    target_size = size if config.share_embeddings else 31
    assert config.decoder_vocab_size == target_size == model.get_decoder().embed_tokens.num_embeddings
    assert model.lm_head.weight.shape == (target_size, 32) and model.lm_head.bias.shape == (target_size,)
    assert model.lm_head.out_features == target_size
    assert tie_groups(model) == expected_groups(config)
    common = min(len(old_head.weight), target_size)
    assert torch.equal(model.lm_head.weight[:common], old_head.weight[:common])
    assert torch.equal(model.lm_head.bias[:common], old_head.bias[:common])
    assert every_tensor(model)["lm_head.weight"].isfinite().all() and model.lm_head.bias.isfinite().all()
    after = logits_of(model, inputs)
    assert after.shape[-1] == target_size
    torch.testing.assert_close(after[..., :common], before[..., :common])
    assert_usable_after_resizing(model, inputs, tmp_path)


@pytest.mark.parametrize("ties", ["tied-separate", "untied-separate"])
@pytest.mark.parametrize("of_the_head_model", [True, False])
@pytest.mark.parametrize(("requested", "multiple", "size"), [(45, None, 45), (20, None, 20), (None, 16, 32)])
def test_resizing_the_target_alone(ties, of_the_head_model, requested, multiple, size, tmp_path):
    model = tiny_model(MetaphraseForConditionalGeneration if of_the_head_model else MetaphraseModel, **TIES[ties])
    config = model.config
    old = copy.deepcopy(model)
    inputs = random_batch(tiny_config(vocab_size=20))
    embeddings = model.resize_decoder_token_embeddings(requested, pad_to_multiple_of=multiple)
    assert embeddings is model.get_decoder().embed_tokens
    assert config.decoder_vocab_size == embeddings.num_embeddings == len(embeddings.weight) == size
    assert config.vocab_size == 37
    assert torch.equal(model.get_input_embeddings().weight, old.get_input_embeddings().weight)
    common = min(31, size)
    assert torch.equal(embeddings.weight[:common], old.get_decoder().embed_tokens.weight[:common])
    if of_the_head_model:
        assert tie_groups(model) == expected_groups(config)
        assert model.lm_head.weight.shape == (size, 32) and model.lm_head.bias.shape == (size,)
        torch.testing.assert_close(logits_of(model, inputs)[..., :common], logits_of(old, inputs)[..., :common])
        assert_usable_after_resizing(model, inputs, tmp_path)


def assert_usable_after_resizing(model, inputs, folder):
    """It trains, generates, and is the same model after saving."""
    labels = torch.full((3, 4), model.config.decoder_vocab_size - 1)
    sources = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    model(**sources, labels=labels).loss.backward()
    assert model.lm_head.weight.grad[-1].any()
    generated = model.generate(**sources, max_new_tokens=3, num_beams=2)
    model.save_pretrained(folder)
    loaded, info = MetaphraseForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert_same_tensors(loaded, model)
    assert tie_groups(loaded) == expected_groups(model.config)
    assert torch.equal(loaded.generate(**sources, max_new_tokens=3, num_beams=2), generated)


def test_resizing_the_target_of_shared_embeddings_is_refused():
    with pytest.raises(ValueError, match="`share_embeddings` must be false"):
        tiny_model().resize_decoder_token_embeddings(40)


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
    assert_std(model.lm_head.weight[-200:], std, "head")
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


def test_encoder_model_resizes():
    model = tiny_model(MetaphraseEncoderModel, **TIES["tied-shared"])
    model.resize_token_embeddings(50)
    assert model.get_input_embeddings().weight.shape == (50, 32)
    randomize(model)
    assert model(torch.tensor([[49, 3]])).last_hidden_state.isfinite().all()
