"""Tests of `metaphrase.decoding.fast_generation`: its loops and transformers' find the same tokens and scores."""

import functools

import pytest
import torch
from other_families import other_model
from tiny_generator import SOURCES, tiny_pair
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

from metaphrase.decoding import fast_generation
from metaphrase.decoding.fast_generation import SequenceScores
from metaphrase.inference.batches import decode, pad_sources
from metaphrase.modeling import MetaphraseForConditionalGeneration

OPTIONS = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": [5, 11, 17]}


class Twice(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores * 2


@pytest.fixture
def fast_loops(monkeypatch):
    called = []
    for name in ("sample", "beam_search"):
        loop = getattr(fast_generation, name)
        monkeypatch.setattr(fast_generation, name, lambda *a, n=name, f=loop: called.append(n) or f(*a))
    return called


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


def test_labels_of_a_trainer_and_recorded_hidden_states_change_nothing(fast_loops):
    model = tiny_model()
    batch = random_batch(model.config, batch=4, with_labels=True)
    labels = batch.pop("labels")
    expected = model.generate(**batch, **OPTIONS)
    assert torch.equal(model.generate(**batch, labels=labels, **OPTIONS), expected)
    # transformers leaves hooks behind when hidden states or attention weights were asked for once.
    model(**random_batch(model.config), output_hidden_states=True, output_attentions=True)
    assert any(module._forward_hooks for module in model.get_decoder().modules())
    assert torch.equal(model.generate(**batch, **OPTIONS), expected)
    assert len(fast_loops) == 3


class Doubled(MetaphraseForConditionalGeneration):
    def forward(self, *arguments, **options):
        output = super().forward(*arguments, **options)
        output.logits = output.logits.roll(1, dims=-1)
        return output


def roll(module, arguments, output):
    output.logits = output.logits.roll(1, dims=-1)
    return output


def register_attention_kernel(model):
    def attend(module, query, key, value, attention_mask, scaling, **options):
        return ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, key, value, attention_mask, scaling=3 * scaling, **options
        )

    ALL_ATTENTION_FUNCTIONS.register("sharp", attend)
    model.set_attn_implementation("sharp")


PREPARE = "prepare_inputs_for_generation"
CHANGES = {
    "hook of the model": lambda model: model.register_forward_hook(roll),
    "hook of a layer": lambda model: model.get_decoder().layers[0].register_forward_hook(lambda *_: None),
    "own forward": lambda model: setattr(model, "forward", functools.partial(model.forward, smoothing=0.0)),
    "own preparation": lambda model: setattr(model, PREPARE, functools.partial(getattr(model, PREPARE))),
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


# Scores in transformers' loops


SCORED = {
    "greedy": {},
    "beams": {"num_beams": 4, "num_return_sequences": 3},
    "penalties": {"num_beams": 3, "length_penalty": 0.5, "repetition_penalty": 1.5},
    "samples": {"do_sample": True, "top_k": 9, "num_return_sequences": 3},
    "sampled beams": {"do_sample": True, "num_beams": 3},
}
LIMITS = {"max_new_tokens": 8, "eos_token_id": 22}


def kept_scores(model, sources, options):
    kept = dict.fromkeys(("return_dict_in_generate", "output_scores", "output_logits"), True)
    output = model.generate(**pad_sources(sources, model), **options, **LIMITS, **kept)
    if options.get("num_beams", 1) > 1:
        return output.sequences_scores.tolist()
    # Samples are scored by the whole distribution.
    steps = output.logits if options.get("do_sample") else output.scores
    transitions = model.compute_transition_scores(output.sequences, steps, normalize_logits=True)
    totals = []
    for row, ids in zip(transitions.tolist(), output.sequences[:, -transitions.shape[1] :].tolist(), strict=True):
        totals.append(sum(row[: ids.index(22) + 1 if 22 in ids else None]))
    return totals


@pytest.mark.parametrize("options", SCORED.values(), ids=SCORED)
def test_scores_are_those_of_transformers_and_no_step_is_kept(options, monkeypatch):
    model, sources = other_model("t5"), sorted(tiny_pair().encode_sources(SOURCES), key=len, reverse=True)
    torch.manual_seed(3)
    expected = kept_scores(model, sources, options)
    steps, read = [], SequenceScores.__call__
    monkeypatch.setattr(SequenceScores, "__call__", lambda *args, **_: (read(*args), steps.append(args[2][-1]))[0])
    torch.manual_seed(3)
    found = decode(model, sources, return_scores=True, **options, **LIMITS)
    assert [h.score for row in found for h in row] == pytest.approx(expected, abs=1e-5)
    assert len({round(score, 3) for score in expected}) > 2
    assert len(steps) > 2 and all(step.numel() == 0 for step in steps)
    torch.manual_seed(3)
    unscored = decode(model, sources, **options, **LIMITS)
    assert [[h.ids for h in row] for row in unscored] == [[h.ids for h in row] for row in found]


def test_drafted_tokens_are_scored_too():
    model, sources = other_model("bart"), tiny_pair().encode_sources(SOURCES)
    plain = decode(model, sources, return_scores=True, **LIMITS)
    drafted = decode(model, sources, return_scores=True, prompt_lookup_num_tokens=3, **LIMITS)
    for [expected], [found] in zip(plain, drafted, strict=True):
        assert found.ids == expected.ids and found.score == pytest.approx(expected.score, abs=1e-4)
