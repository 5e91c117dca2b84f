"""Tests of what other packages expect of an encoder-decoder: shapes of caches and outputs, scaled rotations, and prefixes."""

import inspect

import pytest
import torch
from tiny_models import DESIGNS, random_batch, tiny_model
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from metaphrase.modeling.stacks import CACHE_NAME, CACHE_NAMES

NEW_TOKENS = 4
UNEVEN = {"decoder_attention_heads": 2, "decoder_layers": 3}
EVERYTHING = {"output_scores": True, "output_logits": True, "output_hidden_states": True, "output_attentions": True}


def endless_model(**fields):
    """A model whose texts all reach their greatest length."""
    model = tiny_model(**fields)
    model.generation_config.eos_token_id = None
    return model


def generate(model, **options):
    inputs = random_batch(model.config)
    del inputs["decoder_input_ids"]
    everything = EVERYTHING | {"return_dict_in_generate": True, "max_new_tokens": NEW_TOKENS}
    return model.generate(**inputs, **(everything | options))


def shapes_of(cache):
    return [tuple(states.shape) for layer in cache.layers for states in (layer.keys, layer.values)]


def expected_shapes(config, rows, length):
    """Shapes of a cache, in the names that transformers and peft read from a configuration."""
    decoder = config.get_text_config(decoder=True)
    return [(rows, decoder.num_key_value_heads, length, decoder.head_dim)] * (2 * decoder.num_hidden_layers)


@pytest.mark.parametrize("design", ["rotary", "alibi", "uneven"])
def test_caches_have_the_shape_of_the_configuration(design):
    model = endless_model(**(DESIGNS | {"uneven": UNEVEN})[design])
    output = generate(model, cache_implementation="static", output_attentions=False)
    cache = getattr(output, CACHE_NAME)
    assert isinstance(cache.self_attention_cache, StaticCache)
    assert shapes_of(cache.self_attention_cache) == expected_shapes(model.config, 3, NEW_TOKENS)
    dynamic = generate(model, output_attentions=False)
    assert torch.equal(output.sequences, dynamic.sequences)
    assert type(getattr(dynamic, CACHE_NAME)) is EncoderDecoderCache
    assert shapes_of(getattr(dynamic, CACHE_NAME).cross_attention_cache) == expected_shapes(model.config, 3, 7)


# The cache by either name


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
