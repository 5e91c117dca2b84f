import inspect

import pytest
import torch
from tiny_models import random_batch, tiny_model
from transformers import DynamicCache, EncoderDecoderCache

from metaphrase.modeling.compat import CACHE_NAME, CACHE_NAMES


def new_cache() -> EncoderDecoderCache:
    return EncoderDecoderCache(DynamicCache(), DynamicCache())


def part_of(model, part):
    """Return a module and its inputs for decoding from a cache."""
    inputs = random_batch(model.config)
    if part == "decoder":
        encoder_output = model.get_encoder()(input_ids=inputs["input_ids"]).last_hidden_state
        return model.get_decoder(), "input_ids", {"encoder_hidden_states": encoder_output}, inputs["decoder_input_ids"]
    called = model.base_model if part == "model" else model
    return called, "decoder_input_ids", {"input_ids": inputs["input_ids"]}, inputs["decoder_input_ids"]


@torch.no_grad()
@pytest.mark.parametrize("name", CACHE_NAMES)
@pytest.mark.parametrize("part", ["decoder", "model", "head"])
def test_a_cache_is_read_by_either_name(part, name):
    called, ids, inputs, targets = part_of(tiny_model(initializer_range=0.2), part)
    whole = called(**inputs, **{ids: targets})[0]
    cache = new_cache()
    for index in range(targets.shape[1]):
        output = called(**inputs, **{ids: targets[:, index : index + 1], name: cache})
        torch.testing.assert_close(output[0][:, 0], whole[:, index], rtol=1e-5, atol=1e-5)
    assert getattr(output, CACHE_NAME) is cache and cache.get_seq_length() == targets.shape[1]
    assert name in inspect.signature(called.forward).parameters


@pytest.mark.parametrize("name", sorted({"past_key_values", CACHE_NAME}))
def test_a_cache_of_the_caller_is_filled_in_generation(name):
    model = tiny_model(initializer_range=0.2)
    inputs = {"input_ids": random_batch(model.config)["input_ids"], "max_new_tokens": 4, "do_sample": False}
    expected = model.generate(**inputs)
    cache = new_cache()
    assert torch.equal(model.generate(**inputs, **{name: cache}), expected)
    assert cache.get_seq_length() == expected.shape[1] - 1


def test_what_is_not_to_be_gathered_in_evaluation_and_not_to_be_moved_has_both_names():
    model = tiny_model()
    assert set(CACHE_NAMES) == set(model.config.keys_to_ignore_at_inference) == set(model._skip_keys_device_placement)


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_layers_that_are_computed_again_do_not_fill_a_cache_twice(name):
    model = tiny_model(initializer_range=0.2).train()
    inputs = random_batch(model.config, with_labels=True)
    model(**inputs).loss.backward()
    expected = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(**inputs, **{name: new_cache()}).loss.backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[key], rtol=1e-5, atol=1e-6, msg=key)
