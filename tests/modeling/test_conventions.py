"""Tests of what other packages expect of an encoder-decoder: shapes of caches and outputs, scaled rotations, and prefixes."""

import pytest
import torch
from tiny_models import DESIGNS, random_batch, tiny_config, tiny_model
from transformers import EncoderDecoderCache, StaticCache
from transformers.generation import CompileConfig

from metaphrase.modeling.compat import CACHE_NAME

NEW_TOKENS = 4
UNEVEN = {"decoder_attention_heads": 2, "decoder_layers": 3}
EVERYTHING = {"output_scores": True, "output_logits": True, "output_hidden_states": True, "output_attentions": True}
MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 2, "num_return_sequences": 2},
}


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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("design", [*DESIGNS, "uneven"])
def test_generation_returns_shapes_of_the_configuration(design, mode):
    fields = (DESIGNS | {"uneven": UNEVEN})[design]
    model = endless_model(**fields, attn_implementation="eager")
    output = generate(model, **MODES[mode])
    decoder, encoder = (model.config.get_text_config(**{side: True}) for side in ("decoder", "encoder"))
    rows, source, width = 3 * max(1, MODES[mode].get("num_return_sequences", 1)), 7, decoder.hidden_size
    cache = getattr(output, CACHE_NAME)
    assert type(cache) is EncoderDecoderCache
    assert shapes_of(cache.self_attention_cache) == expected_shapes(model.config, rows, NEW_TOKENS)
    assert shapes_of(cache.cross_attention_cache) == expected_shapes(model.config, rows, source)
    assert [len(outputs) for outputs in (output.scores, output.logits, output.decoder_attentions)] == [NEW_TOKENS] * 3
    assert {states.shape for states in (*output.scores, *output.logits)} == {(rows, decoder.vocab_size)}
    for step in range(NEW_TOKENS):
        for attentions, keys in ((output.decoder_attentions, step + 1), (output.cross_attentions, source)):
            shapes = [states.shape for states in attentions[step]]
            assert shapes == [(rows, decoder.num_attention_heads, 1, keys)] * decoder.num_hidden_layers
        shapes = [states.shape for states in output.decoder_hidden_states[step]]
        assert shapes == [(rows, 1, width)] * (decoder.num_hidden_layers + 1)
    shapes = [states.shape for states in output.encoder_attentions]
    assert shapes == [(3, encoder.num_attention_heads, source, source)] * encoder.num_hidden_layers


@pytest.mark.parametrize("design", [*DESIGNS, "uneven"])
def test_static_cache_has_the_shape_of_the_configuration(design):
    model = endless_model(**(DESIGNS | {"uneven": UNEVEN})[design])
    output = generate(model, cache_implementation="static", output_attentions=False)
    cache = getattr(output, CACHE_NAME)
    assert isinstance(cache.self_attention_cache, StaticCache)
    assert shapes_of(cache.self_attention_cache) == expected_shapes(model.config, 3, NEW_TOKENS)
    assert torch.equal(output.sequences, generate(model, output_attentions=False).sequences)


@pytest.mark.parametrize("design", ["relative", "rotary"])
def test_compiled_generation_returns_the_same_outputs(design):
    model = endless_model(**DESIGNS[design], attn_implementation="eager")
    options = CompileConfig(backend="eager", fullgraph=False, mode=None)
    options._compile_all_devices = True
    plain = generate(model, cache_implementation="static", disable_compile=True)
    torch.compiler.reset()
    compiled = generate(model, cache_implementation="static", compile_config=options)
    assert torch.equal(compiled.sequences, plain.sequences)
    for name in ("decoder_attentions", "cross_attentions", "decoder_hidden_states"):
        for steps in zip(getattr(compiled, name), getattr(plain, name), strict=True):
            torch.testing.assert_close(*steps)


def test_stacks_of_one_shape_share_the_configuration():
    config = tiny_config(encoder_ffn_dim=40, decoder_ffn_dim=40)
    assert config.get_text_config() is config.get_text_config(decoder=True) is config.get_text_config(encoder=True)
    config = tiny_config(**UNEVEN)
    encoder, decoder = config.get_text_config(encoder=True), config.get_text_config(decoder=True)
    assert (encoder.num_hidden_layers, encoder.num_attention_heads) == (2, 4)
    assert (decoder.num_hidden_layers, decoder.num_attention_heads) == (3, 2)
