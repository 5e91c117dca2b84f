"""Tests of `metaphrase.decoding.fast_generation`: the fast loops and transformers' loops find the same tokens."""

import functools

import pytest
import torch
from tiny_models import random_batch, random_sources, tiny_model
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from metaphrase.modeling import MetaphraseForConditionalGeneration

OPTIONS = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": [5, 11, 17]}


class Twice(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores * 2


def sources(model):
    return random_sources(model.config, batch=4)


def check_runs_in_transformers_loops(model, options, fast_loops, monkeypatch):
    """Check that no fast loop runs, and that the ids are those of an unchanged `generate()`."""
    output = model.generate(**options)
    assert not fast_loops
    for name in ("_sample", "_beam_search"):
        monkeypatch.setattr(MetaphraseForConditionalGeneration, name, getattr(GenerationMixin, name))
    expected = model.generate(**options)
    if options.get("return_dict_in_generate"):
        assert output.keys() == expected.keys()
        output, expected = output.sequences, expected.sequences
    assert output.tolist() == expected.tolist()


OF_TRANSFORMERS = {
    "output with a cache": {"return_dict_in_generate": True},
    "static cache": {"cache_implementation": "static"},
    "processor of the caller": {"logits_processor": LogitsProcessorList([Twice()])},
    "criterion of the caller": {"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(max_time=1e4)])},
    "length of the caller": {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(max_length=4)])},
    "end of the caller": {"stopping_criteria": StoppingCriteriaList([EosTokenCriteria(eos_token_id=[7, 8, 9])])},
    "allowed tokens": {"prefix_allowed_tokens_fn": lambda row, ids: [4, 6, 7 + row, 11]},
    "looks at the source": {"encoder_repetition_penalty": 1.5},
    "prompt with padding": {
        "decoder_input_ids": torch.tensor([[2, 7]] * 4),
        "decoder_attention_mask": torch.tensor([[1, 1]] * 4),
    },
    "source without a token": {"attention_mask": torch.tensor([[1] * 7, [1] * 5 + [0] * 2, [0] * 7, [1] + [0] * 6])},
}


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("case", OF_TRANSFORMERS)
def test_unsupported_options_run_in_transformers_loops(case, beams, fast_loops, monkeypatch):
    model = tiny_model()
    options = sources(model) | OPTIONS | {"num_beams": beams} | OF_TRANSFORMERS[case]
    check_runs_in_transformers_loops(model, options, fast_loops, monkeypatch)


def test_the_model_says_why_the_fast_loop_did_not_run():
    model = tiny_model()
    for options, reason in (
        ({"num_beams": 2}, None),
        ({"num_beams": 2, "do_sample": True}, "sampled beams"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
    ):
        model.generate(**sources(model), max_new_tokens=3, **options)
        assert model.search_obstacle == reason


@pytest.mark.parametrize("beams", [1, 3])
def test_a_cache_of_the_caller_is_filled(beams, fast_loops):
    model = tiny_model()
    cache, options = EncoderDecoderCache(DynamicCache(), DynamicCache()), OPTIONS | {"num_beams": beams}
    found = model.generate(**sources(model), **options, past_key_values=cache)
    assert not fast_loops and cache.get_seq_length() > 1
    assert found.tolist() == model.generate(**sources(model), **options).tolist()


def test_several_prompts_of_one_source_are_several(fast_loops):
    model = tiny_model()
    options = OPTIONS | {"input_ids": sources(model)["input_ids"][:1]}
    start = model.config.decoder_start_token_id
    prompts = torch.tensor([[start, 7], [start, 9], [start, 4]])
    found = model.generate(**options, decoder_input_ids=prompts)
    assert found[:, :2].tolist() == prompts.tolist() and not fast_loops
    for row, prompt in zip(found, prompts, strict=True):
        [alone] = model.generate(**options, decoder_input_ids=prompt[None])
        assert row[: len(alone)].tolist() == alone.tolist()


def test_labels_of_a_trainer_change_nothing(fast_loops):
    model = tiny_model()
    batch = random_batch(model.config, batch=4, with_labels=True)
    labels = batch.pop("labels")
    expected = model.generate(**batch, **OPTIONS)
    assert model.generate(**batch, labels=labels, **OPTIONS).tolist() == expected.tolist()
    assert len(fast_loops) == 2


class Doubled(MetaphraseForConditionalGeneration):
    def forward(self, *arguments, **options):
        output = super().forward(*arguments, **options)
        output.logits = output.logits.roll(1, dims=-1)
        return output


def roll(module, arguments, output):
    output.logits = output.logits.roll(1, dims=-1)
    return output


def replace_preparation(model):
    prepare = model.prepare_inputs_for_generation
    model.prepare_inputs_for_generation = lambda *arguments, **options: prepare(*arguments, **options)


def register_attention_kernel(model):
    def attend(module, query, key, value, attention_mask, scaling, **options):
        return ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, key, value, attention_mask, scaling=3 * scaling, **options
        )

    ALL_ATTENTION_FUNCTIONS.register("sharp", attend)
    model.set_attn_implementation("sharp")


CHANGES = {
    "hook of the model": lambda model: model.register_forward_hook(roll),
    "hook of a layer": lambda model: model.get_decoder().layers[0].register_forward_hook(lambda *_: None),
    "own forward": lambda model: setattr(model, "forward", functools.partial(model.forward, smoothing=0.0)),
    "own preparation": replace_preparation,
    "own attention kernel": register_attention_kernel,
    "subclass with its forward": lambda model: setattr(model, "__class__", Doubled),
    "training": lambda model: model.train(),
    "float16": lambda model: model.half(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_models_run_in_transformers_loops(change, fast_loops, monkeypatch):
    model = tiny_model()
    change(model)
    check_runs_in_transformers_loops(model, sources(model) | OPTIONS | {"num_beams": 3}, fast_loops, monkeypatch)


def test_a_model_that_accelerate_casts_searches_here_and_autocast_does_not(fast_loops):
    model = tiny_model()
    model._original_forward = model.forward
    model.forward = functools.partial(model.forward)
    model.generate(**sources(model), **OPTIONS)
    assert len(fast_loops) == 1
    with torch.autocast("cpu", torch.bfloat16):
        model.generate(**sources(model), **OPTIONS)
    assert len(fast_loops) == 1 and model.search_obstacle == "autocast"


def test_recorded_hidden_states_change_nothing(fast_loops):
    """transformers leaves hooks behind when hidden states or attention weights were asked for once."""
    model = tiny_model()
    expected = model.generate(**sources(model), **OPTIONS)
    model(**random_batch(model.config), output_hidden_states=True, output_attentions=True)
    assert any(module._forward_hooks for module in model.get_decoder().modules())
    assert torch.equal(model.generate(**sources(model), **OPTIONS), expected)
    assert len(fast_loops) == 2
