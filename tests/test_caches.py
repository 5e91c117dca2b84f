import pytest
import torch
from tiny_models import CROSSED, DESIGNS, POSITIONS, padding_mask, random_batch, random_sources, tiny_model
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

CLOSE = {"atol": 1e-3, "rtol": 1e-3}
# Repeated tokens would hide a wrong step. With many end tokens, rows end at different steps.
END_TOKENS = [5, 11, 17, 23, 29]
VARIED = {"max_new_tokens": 7, "no_repeat_ngram_size": 1, "suppress_tokens": [0], "eos_token_id": END_TOKENS}
SEARCHES = {"greedy": VARIED, "beam": VARIED | {"num_beams": 3, "length_penalty": 0.7}}


def generate(model, inputs, **options):
    return model.generate(**inputs, return_dict_in_generate=True, output_logits=True, output_scores=True, **options)


def assert_same_text(outputs, expected):
    assert outputs.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(torch.stack(outputs.logits), torch.stack(expected.logits), **CLOSE)
    if "sequences_scores" in expected:
        torch.testing.assert_close(outputs.sequences_scores, expected.sequences_scores, **CLOSE)


def up_to_the_end(sequence):
    """Return a generated row up to its end token. Beam search pads differently after the end."""
    tokens = sequence.tolist()
    ends = [index for index, token in enumerate(tokens) if token in END_TOKENS]
    return tokens[: ends[0] + 1] if ends else tokens


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("design", CROSSED)
def test_cached_equals_uncached(design, search):
    model = tiny_model(**CROSSED[design], encoder_layers=1)
    inputs = random_sources(model.config)
    expected = generate(model, inputs, **SEARCHES[search], use_cache=False)
    assert expected.past_key_values is None
    outputs = generate(model, inputs, **SEARCHES[search])
    assert isinstance(outputs.past_key_values, EncoderDecoderCache)
    assert_same_text(outputs, expected)


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("design", DESIGNS)
def test_every_cache_gives_the_same_tokens(design, search):
    model = tiny_model(**DESIGNS[design])
    inputs = random_sources(model.config, padding="left")
    options = SEARCHES[search]
    expected = generate(model, inputs, **options)
    for implementation in ("dynamic", "static"):
        outputs = generate(model, inputs, cache_implementation=implementation, **options)
        assert outputs.past_key_values.self_attention_cache.is_compileable == ("static" in implementation)
        assert_same_text(outputs, expected)
    static = (StaticCache(config=model.config, max_cache_len=length) for length in (10, 7))
    for cache in (EncoderDecoderCache(DynamicCache(), DynamicCache()), DynamicCache(), EncoderDecoderCache(*static)):
        assert_same_text(generate(model, inputs, past_key_values=cache, **options), expected)


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("design", DESIGNS)
def test_sources_and_prompts_in_a_batch_equal_each_alone(design, padding, search):
    model = tiny_model(**DESIGNS[design])
    inputs = random_batch(model.config, target=4, padding=padding)
    prompts, mask = inputs["decoder_input_ids"], padding_mask([4, 2, 3], 4, "left")
    prompts[mask.bool() & (mask.cumsum(-1) == 1)] = model.config.decoder_start_token_id
    inputs |= {"decoder_input_ids": prompts.masked_fill(mask == 0, model.config.pad_token_id)}
    options = SEARCHES[search]
    texts = [
        model.generate(**inputs, decoder_attention_mask=mask, **options, **way)[:, 4:]
        for way in ({}, {"cache_implementation": "static"}, {"use_cache": False})
    ]
    for row in range(3):
        alone = model.generate(
            input_ids=inputs["input_ids"][row, inputs["attention_mask"][row].bool()][None],
            decoder_input_ids=prompts[row, mask[row].bool()][None],
            **options,
        )[0, mask[row].sum() :]
        for text in texts:
            assert up_to_the_end(text[row]) == up_to_the_end(alone)


@pytest.mark.parametrize("implementation", ["dynamic", "static"])
@pytest.mark.parametrize("design", DESIGNS)
def test_continuing_from_a_returned_cache(design, implementation):
    model = tiny_model(**DESIGNS[design])
    inputs = random_sources(model.config)
    options = VARIED | {"eos_token_id": None}
    expected = generate(model, inputs, **options)
    # The first call creates the static cache, so it must have room for the second call.
    first_options = {"max_new_tokens": 3, "cache_implementation": implementation, "max_cache_len": 12}
    first = generate(model, inputs, **(options | first_options))
    assert first.past_key_values.get_seq_length() == 3
    options |= {"max_new_tokens": 4, "decoder_input_ids": first.sequences, "past_key_values": first.past_key_values}
    # Without a mask, transformers does not skip the tokens that the cache holds.
    second = generate(model, inputs, **options, decoder_attention_mask=torch.ones_like(first.sequences))
    assert second.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(torch.stack(second.logits), torch.stack(expected.logits[3:]), **CLOSE)


@pytest.mark.parametrize("design", DESIGNS)
def test_steps_of_any_width_equal_one_pass(design):
    """Targets in pieces of 1, 3 and 2 tokens, in dynamic and static caches, with and without left padding."""
    model = tiny_model(**DESIGNS[design])
    inputs = random_batch(model.config, target=6)
    targets = inputs.pop("decoder_input_ids")
    for mask in (None, padding_mask([6, 4, 5], 6, "left")):
        with torch.no_grad():
            expected = model(**inputs, decoder_input_ids=targets, decoder_attention_mask=mask).logits
        for cache in (DynamicCache(), StaticCache(config=model.config, max_cache_len=9)):
            both = EncoderDecoderCache(cache, DynamicCache())
            pieces, start = [], 0
            for width in (1, 3, 2):
                end = start + width
                with torch.no_grad():
                    given = {"decoder_input_ids": targets[:, start:end], "past_key_values": both}
                    seen = None if mask is None else mask[:, :end]
                    outputs = model(**inputs, **given, decoder_attention_mask=seen)
                pieces.append(outputs.logits)
                start = end
            assert outputs.past_key_values is both and both.get_seq_length() == 6
            is_token = torch.ones(3, 6).bool() if mask is None else mask.bool()
            torch.testing.assert_close(torch.cat(pieces, dim=1)[is_token], expected[is_token], **CLOSE)


@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}, {"use_cache": False}])
def test_positions_past_the_configured_length(name, cache):
    short = tiny_model(**(POSITIONS[name] | {"max_position_embeddings": 8}))
    inputs = random_sources(short.config)
    if name == "learned":
        assert short.generate(**inputs, **cache, max_new_tokens=8, min_new_tokens=8).shape == (3, 9)
        with pytest.raises(ValueError, match="must not be longer than `max_position_embeddings`"):
            short.generate(**inputs, **cache, max_new_tokens=9, min_new_tokens=9)
        return
    long = tiny_model(**(POSITIONS[name] | {"max_position_embeddings": 64}))
    options = VARIED | {"max_new_tokens": 12, "min_new_tokens": 12}
    assert_same_text(generate(short, inputs, **cache, **options), generate(long, inputs, **options))
