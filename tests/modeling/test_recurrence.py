"""The recurrence SSRU: the scan is the plain recurrence, in training, with a cache and in all searches."""

import pytest
import torch
from tiny_generator import SOURCES as TEXTS
from tiny_generator import tiny_generator
from tiny_models import RECURRENT, SSRU, random_sources, tiny_model
from transformers import GenerationMixin

from metaphrase.conversion.onnx.export import find_obstacles
from metaphrase.inference import Generator


def recurrent_generator():
    generator = tiny_generator()
    return Generator(tiny_model(**SSRU, **generator.tokenizers.config_fields()), generator.tokenizers)


def plain_output(ssru, states):
    """The formulas of the paper, token by token."""
    state, outputs = torch.zeros_like(states[:, 0]), []
    for token in states.unbind(1):
        forget = torch.sigmoid(token @ ssru.forget_proj.weight.T + ssru.forget_proj.bias)
        state = forget * state + (1 - forget) * (token @ ssru.input_proj.weight.T)
        outputs.append(state.clamp(min=0))
    return torch.stack(outputs, dim=1)


@pytest.mark.parametrize("length", [1, 2, 7, 64, 65])
def test_the_layer_computes_the_formulas_of_the_paper(length):
    ssru = tiny_model(**SSRU).get_decoder().layers[0].self_attn
    torch.nn.init.normal_(ssru.forget_proj.bias)
    results, states, weights = [], torch.randn(3, length, 32), torch.randn(3, length, 32)
    for run in (lambda states: ssru(states)[0], lambda states: plain_output(ssru, states)):
        ssru.zero_grad()
        leaf = states.clone().requires_grad_()
        output = run(leaf)
        (output * weights).sum().backward()
        results.append([output.detach(), leaf.grad, *(parameter.grad.clone() for parameter in ssru.parameters())])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("fields", RECURRENT.values(), ids=RECURRENT)
def test_a_cache_changes_no_logits(fields):
    model = tiny_model(**fields)
    sources, targets = random_sources(model.config, batch=2), torch.randint(3, 30, (2, 9))
    expected = model(**sources, decoder_input_ids=targets).logits
    cache, logits = None, []
    for part in targets.split([4, 1, 1, 3], dim=1):
        output = model(**sources, decoder_input_ids=part, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits.append(output.logits)
    torch.testing.assert_close(torch.cat(logits, dim=1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2, "early_stopping": True},
        {"decoder_input_ids": torch.tensor([[2, 7, 9]] * 4), "num_beams": 2},
    ],
    ids=["greedy", "beams", "several targets", "prompt"],
)
@pytest.mark.parametrize("fields", RECURRENT.values(), ids=RECURRENT)
def test_fast_searches_write_the_tokens_of_transformers(fields, options):
    model = tiny_model(**fields)
    # With many end tokens, rows end at different steps.
    options = options | {"max_new_tokens": 12, "do_sample": False, "eos_token_id": [5, 11, 17]}
    inputs = random_sources(model.config, batch=4)
    loop = GenerationMixin._beam_search if options.get("num_beams") else GenerationMixin._sample
    expected = model.generate(**inputs, **options, custom_generate=loop)
    assert model.generate(**inputs, **options).tolist() == expected.tolist()
    assert model.search_obstacle is None


def test_caches_and_searches_that_a_recurrence_cannot_serve_are_refused():
    generator = recurrent_generator()
    with pytest.raises(ValueError, match=r"must be dynamic .* got a StaticLayer. Remove `cache_implementation`"):
        generator.model.generate(torch.tensor([[5, 6, 2]]), cache_implementation="static", max_new_tokens=3)
    with pytest.raises(ValueError, match=r"ssru with `assistant_model`"):
        generator.generate(["the dog"], assistant_model=generator)
    [obstacle] = find_obstacles(generator.model.config)
    assert "'ssru'" in obstacle


def test_an_ensemble_of_a_recurrence_and_an_attention_is_the_same_in_both_orders():
    recurrent, attending = recurrent_generator(), tiny_generator()
    for beams in (1, 3):
        options = {"num_beams": beams, "max_new_tokens": 8}
        twice = Generator(recurrent.model, recurrent.tokenizers, members=[recurrent])
        assert twice.generate(TEXTS, **options) == recurrent.generate(TEXTS, **options)
        mixed = Generator(recurrent.model, recurrent.tokenizers, members=[attending])
        turned = Generator(attending.model, attending.tokenizers, members=[recurrent])
        assert mixed.generate(TEXTS, **options) == turned.generate(TEXTS, **options)
