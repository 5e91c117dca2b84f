"""Tests of what our own search does, and of what is left to transformers' loops: the text is the same either way."""

import functools

import pytest
import torch
from tiny_models import DESIGNS, random_batch, tiny_model
from transformers import (
    DynamicCache,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteriaList,
    TextStreamer,
)
from transformers.generation import MaxTimeCriteria

from metaphrase.inference.decoding import decode
from metaphrase.modeling import generation
from metaphrase.modeling.decoder_state import DecoderState

OPTIONS = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": [5, 11, 17]}


class Twice(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores * 2


class Silent(TextStreamer):
    def __init__(self):
        self.seen = []

    def put(self, value):
        self.seen.append(value)

    def end(self):
        pass


@pytest.fixture(autouse=True)
def states(monkeypatch):
    """The states that searches of our own made."""
    made = []
    first = DecoderState.__init__
    monkeypatch.setattr(DecoderState, "__init__", lambda self, *arguments: made.append(self) or first(self, *arguments))
    return made


def sources(model):
    inputs = random_batch(model.config, batch=4)
    del inputs["decoder_input_ids"]
    return inputs


OF_TRANSFORMERS = {
    "output with a cache": {"return_dict_in_generate": True},
    "no cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "processor of the caller": {"logits_processor": LogitsProcessorList([Twice()])},
    "criterion of the caller": {"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(max_time=1e4)])},
    "time limit": {"max_time": 1e4},
    "allowed tokens": {"prefix_allowed_tokens_fn": lambda row, ids: [4, 6, 7 + row, 11]},
    "looks at the source": {"encoder_repetition_penalty": 1.5},
    "prompt in pieces": {"prefill_chunk_size": 1},
    "prompt with padding": {
        "decoder_input_ids": torch.tensor([[2, 7]] * 4),
        "decoder_attention_mask": torch.tensor([[1, 1]] * 4),
    },
}


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("case", OF_TRANSFORMERS)
def test_what_is_not_known_is_left_to_transformers(case, beams, states, monkeypatch):
    model = tiny_model()
    options = OPTIONS | {"num_beams": beams} | OF_TRANSFORMERS[case]
    texts = model.generate(**sources(model) | options)
    assert not states
    loop = "_sample" if beams == 1 else "_beam_search"
    monkeypatch.setattr(type(model), loop, getattr(GenerationMixin, loop))
    expected = model.generate(**sources(model) | options)
    if case == "output with a cache":
        assert texts.keys() == expected.keys()
        texts, expected = texts.sequences, expected.sequences
    assert texts.tolist() == expected.tolist()


def test_a_cache_a_streamer_and_sampled_beams_are_left_to_transformers(states):
    model = tiny_model()
    expected = model.generate(**sources(model), **OPTIONS).tolist()
    assert len(states) == 1
    cache = DynamicCache(config=model.config)
    assert model.generate(**sources(model), **OPTIONS, past_key_values=cache).tolist() == expected
    one = {name: tensor[:1] for name, tensor in sources(model).items()}
    streamer = Silent()
    assert (
        model.generate(**one, **OPTIONS, streamer=streamer)[0].tolist()
        == torch.cat([part.flatten() for part in streamer.seen]).tolist()
    )
    model.generate(**sources(model), **OPTIONS | {"do_sample": True, "num_beams": 2})
    assert len(states) == 1


@pytest.mark.parametrize("beams", [1, 3])
def test_waiting_for_other_processes_is_left_to_transformers(beams, states):
    model = tiny_model()
    # It asks the others, of which there are none.
    with pytest.raises(ValueError, match="process group has not been initialized"):
        model.generate(**sources(model), **OPTIONS, num_beams=beams, synced_gpus=True)
    assert not states


def test_a_model_that_trains_or_is_hooked_or_in_float16_is_left_to_transformers(states):
    model = tiny_model()
    model.train()
    model.generate(**sources(model), **OPTIONS)
    model.eval()
    seen = []
    handle = model.get_decoder().layers[0].register_forward_hook(lambda *_: seen.append("layer"))
    model.generate(**sources(model), **OPTIONS)
    handle.remove()
    assert seen and not states
    model.generate(**sources(model), **OPTIONS)
    assert len(states) == 1
    model.half().generate(**sources(model), **OPTIONS)
    assert len(states) == 1


@pytest.mark.parametrize("design", DESIGNS)
def test_autocast_searches_as_transformers_does(design, states):
    """In bfloat16 products round differently, so that of many choices a few may be others."""
    model = tiny_model(**DESIGNS[design])
    inputs = {
        name: tensor for name, tensor in random_batch(model.config, batch=16).items() if name != "decoder_input_ids"
    }
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    with torch.autocast("cpu", torch.bfloat16):
        ours = model.generate(**inputs, **options)
        theirs = model.generate(**inputs, **options, custom_generate=GenerationMixin._sample)
    assert len(states) == 1
    assert (ours[:, 1] == theirs[:, 1]).float().mean() > 0.8
    with torch.autocast("cpu", torch.float16):
        model.generate(**inputs, **options)
    assert len(states) == 1


def test_decoding_of_many_sources_searches_here_with_the_same_scores(states, monkeypatch):
    model = tiny_model()
    texts = [[7, 8, 9, 2], [12, 2], [30, 4, 4, 4, 9, 2]]
    for options in ({}, {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5}):
        states.clear()
        ours = decode(model, texts, return_scores=True, **OPTIONS, **options)
        assert len(states) == 1
        with monkeypatch.context() as patch:
            patch.setattr(generation.MetaphraseGenerationMixin, "_is_known", lambda *_, **__: False)
            theirs = decode(model, texts, return_scores=True, **OPTIONS, **options)
        assert len(states) == 1
        for row, expected in zip(ours, theirs, strict=True):
            assert [h.ids for h in row] == [h.ids for h in expected]
            assert [h.score for h in row] == pytest.approx([h.score for h in expected], abs=1e-4)


@pytest.mark.parametrize("return_scores", [True, False])
@pytest.mark.parametrize("beams", [1, 3])
def test_transformers_keeps_scores_of_each_step_only_where_they_are_wanted(beams, return_scores, monkeypatch):
    model = tiny_model().half()
    loop = "_sample" if beams == 1 else "_beam_search"
    kept, search = [], getattr(GenerationMixin, loop)

    @functools.wraps(search)  # transformers asks for the names of its arguments
    def spy(model, *arguments, **options):
        output = search(model, *arguments, **options)
        kept.append(output.scores is not None)
        return output

    monkeypatch.setattr(GenerationMixin, loop, spy)
    rows = decode(model, [[7, 8, 9, 2]], return_scores=return_scores, num_beams=beams, **OPTIONS)
    assert kept == [return_scores] and (rows[0][0].score is not None) is return_scores


def test_having_shown_what_is_inside_changes_nothing(states):
    """transformers leaves hooks behind when hidden states or attention weights were asked for once."""
    model = tiny_model()
    expected = model.generate(**sources(model), **OPTIONS)
    model(**random_batch(model.config), output_hidden_states=True, output_attentions=True)
    assert any(module._forward_hooks for module in model.get_decoder().modules())
    assert torch.equal(model.generate(**sources(model), **OPTIONS), expected)
    assert len(states) == 2


def test_decoding_in_a_way_of_its_own_is_not_replaced(states):
    """Speculation is another way of decoding, which `custom_generate` would push aside."""
    model = tiny_model()
    draft = tiny_model(seed=1)
    called = []
    draft.register_forward_hook(lambda *_: called.append("draft"))
    options = OPTIONS | {"assistant_model": draft}
    assert decode(model, [[7, 8, 9, 2]], **options)[0][0].ids == decode(model, [[7, 8, 9, 2]], **OPTIONS)[0][0].ids
    assert called
