"""Tests of `SharedSourceCache`: all hypotheses of a source attend to one row of its keys and values."""

import pytest
import torch
from tiny_models import DESIGNS, padding_mask, random_batch, random_sources, tiny_model
from transformers import DynamicCache, EncoderDecoderCache, GenerationMixin

from metaphrase.decoding.fast_generation import SharedSourceCache
from metaphrase.modeling.layers import fold_copies, unfold_copies

CLOSE = {"atol": 1e-4, "rtol": 1e-4}
COPIES = 3
SEARCH = {
    "num_beams": COPIES,
    "max_new_tokens": 6,
    "no_repeat_ngram_size": 1,
    "eos_token_id": [5, 11, 17],
    "do_sample": False,
}


def shared_and_repeated(model, target=4):
    """Arguments with each source once, and with each as often as it has targets."""
    batch = random_batch(model.config, source=7, padding="left")
    mask = batch["attention_mask"]
    generator = torch.Generator().manual_seed(1)
    rows = COPIES * mask.shape[0]
    targets = torch.randint(3, model.config.decoder_vocab_size, (rows, target), generator=generator)
    given = {
        "decoder_input_ids": targets,
        "decoder_attention_mask": padding_mask([target - row % 2 for row in range(rows)], target, "right"),
    }
    with torch.no_grad():
        encoder_output = model.get_encoder()(batch["input_ids"], mask).last_hidden_state
    repeated = [tensor.repeat_interleave(COPIES, dim=0) for tensor in (encoder_output, mask)]
    return tuple(
        {"encoder_outputs": (encoder_output,), "attention_mask": mask} | given
        for encoder_output, mask in ((encoder_output, mask), repeated)
    )


def test_folding_puts_the_rows_of_a_source_side_by_side():
    states = torch.arange(2 * 3 * 4 * 5 * 2).view(2 * 3, 4, 5, 2)
    folded = fold_copies(states, 3)
    assert folded.shape == (2, 4, 15, 2)
    assert torch.equal(folded[1, 2, 1 * 5 + 4], states[1 * 3 + 1, 2, 4])
    assert torch.equal(unfold_copies(folded, 3), states)


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("design", DESIGNS)
def test_shared_and_repeated_sources_give_the_same(design, kernel):
    model = tiny_model(**DESIGNS[design] | {"attn_implementation": kernel, "num_key_value_heads": 2})
    shared, repeated = shared_and_repeated(model)
    outputs, expected = (model(**given, output_attentions=kernel == "eager") for given in (shared, repeated))
    torch.testing.assert_close(outputs.logits, expected.logits, **CLOSE)
    if kernel == "eager":
        torch.testing.assert_close(outputs.cross_attentions, expected.cross_attentions, **CLOSE)
    gradients = [
        torch.autograd.grad(result.logits.square().mean(), model.parameters(), allow_unused=True)
        for result in (outputs, expected)
    ]
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours is None) is (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, **CLOSE)


def test_targets_must_be_a_multiple_of_the_sources():
    model = tiny_model()
    shared, _ = shared_and_repeated(model)
    for name in ("decoder_input_ids", "decoder_attention_mask"):
        shared[name] = shared[name][:-1]
    with pytest.raises(ValueError, match="as many as sources, or a multiple of them, got 8 and 3"):
        model(**shared)


@pytest.fixture
def caches(monkeypatch):
    """Rows of the hypotheses and of the sources in the caches of searches, at their end."""
    seen = []
    spread = SharedSourceCache.spread

    def spy(cache):
        parts = (cache.self_attention_cache, cache.cross_attention_cache)
        seen.append([layers.layers[0].keys.shape[0] for layers in parts])
        return spread(cache)

    monkeypatch.setattr(SharedSourceCache, "spread", spy)
    return seen


@pytest.mark.parametrize("implementation", ["dynamic", "static"])
@pytest.mark.parametrize("design", DESIGNS)
def test_beams_find_the_same_as_with_a_source_each(design, implementation, monkeypatch, caches):
    model = tiny_model(**DESIGNS[design])
    inputs = random_sources(model.config)
    options = SEARCH | {"cache_implementation": implementation, "return_dict_in_generate": True, "output_scores": True}
    outputs = model.generate(**inputs, **options)
    assert caches == [[COPIES * 3, 3]]

    for name in ("_expand_inputs_for_generation", "_prepare_cache_for_generation"):
        monkeypatch.setattr(type(model), name, vars(GenerationMixin)[name])
    expected = model.generate(**inputs, **options)
    assert type(expected.past_key_values) is EncoderDecoderCache
    assert expected.past_key_values.cross_attention_cache.layers[0].keys.shape[0] == COPIES * 3
    assert outputs.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(outputs.sequences_scores, expected.sequences_scores, **CLOSE)


def test_a_static_cache_fits_the_next_call_too():
    """As many hypotheses as before, but of other numbers of sources."""
    model = tiny_model()
    one = random_sources(model.config, batch=1)
    three = {name: tensor.repeat(COPIES, 1) for name, tensor in one.items()}
    options = SEARCH | {"cache_implementation": "static", "return_dict_in_generate": True}
    model.generate(**one, **options)
    outputs = model.generate(**three, **options | {"num_beams": 1})
    assert outputs.sequences.tolist() == model.generate(**three, **SEARCH | {"num_beams": 1}).tolist()


def test_a_cache_of_the_caller_keeps_a_source_for_each_hypothesis():
    model = tiny_model()
    inputs = random_sources(model.config)
    cache = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
    outputs = model.generate(**inputs, **SEARCH, past_key_values=cache)
    assert cache.cross_attention_cache.layers[0].keys.shape[0] == COPIES * 3
    assert outputs.tolist() == model.generate(**inputs, **SEARCH).tolist()


def test_samples_of_a_source_share_it(caches):
    model = tiny_model()
    inputs = random_sources(model.config)
    options = {"do_sample": True, "num_return_sequences": COPIES, "max_new_tokens": 6, "return_dict_in_generate": True}
    torch.manual_seed(0)
    outputs = model.generate(**inputs, **options)
    assert caches == [[COPIES * 3, 3]]
    assert outputs.past_key_values.cross_attention_cache.layers[0].keys.shape[0] == COPIES * 3
    cache = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
    torch.manual_seed(0)
    assert outputs.sequences.tolist() == model.generate(**inputs, **options, past_key_values=cache).sequences.tolist()
