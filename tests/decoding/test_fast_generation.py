"""Tests of `metaphrase.decoding.fast_generation`: the fast loops and transformers' loops find the same tokens."""

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
from transformers.generation import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    RepetitionPenaltyLogitsProcessor,
)
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from metaphrase.decoding import fast_generation as generation
from metaphrase.decoding.decoder_state import DecoderState
from metaphrase.inference.batches import decode

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
    """The states that the fast loops made."""
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
    "length of the caller": {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(max_length=4)])},
    "end of the caller": {"stopping_criteria": StoppingCriteriaList([EosTokenCriteria(eos_token_id=[7, 8, 9])])},
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
def test_unsupported_options_run_in_transformers_loops(case, beams, states, monkeypatch):
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


def test_the_last_search_says_which_loop_ran_and_why(caplog):
    model = tiny_model()
    inputs = sources(model)
    with caplog.at_level("DEBUG", logger="metaphrase.decoding"):
        model.generate(**inputs, max_new_tokens=3, num_beams=2)
        assert model.last_search == generation.LastSearch("fast")
        model.generate(**inputs, max_new_tokens=3, num_beams=2, do_sample=True)
        assert model.last_search == generation.LastSearch("transformers", "sampled beams")
        model.generate(**inputs, max_new_tokens=3, return_dict_in_generate=True)
        assert model.last_search.reason == "return_dict_in_generate"
    assert [record.getMessage() for record in caplog.records] == [
        "decoding by the fast loop",
        "decoding by the transformers loop: sampled beams",
        "decoding by the transformers loop: return_dict_in_generate",
    ]


def of_transformers(model, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "obstacle", lambda *_, **__: "switched off")
        return model.generate(**options)


def test_a_processor_with_a_length_per_row_runs_in_transformers_loops(states):
    model = tiny_model()
    processor = RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=torch.tensor([1, 0, 1, 0]))
    options = sources(model) | OPTIONS | {"logits_processor": LogitsProcessorList([processor])}
    assert model.generate(**options).tolist() == of_transformers(model, **options).tolist()
    assert not states


@pytest.mark.skipif(torch.cuda.is_available(), reason="moves keys and values only where there is a GPU")
def test_an_offloaded_cache_runs_in_transformers_loops(states):
    model = tiny_model()
    # It asks for a stream of the GPU.
    with pytest.raises((AssertionError, RuntimeError)):
        model.generate(**sources(model), **OPTIONS, cache_implementation="offloaded")
    assert not states


@pytest.mark.parametrize("beams", [1, 2])
def test_several_prompts_of_one_source_are_several(beams, states):
    model = tiny_model()
    options = OPTIONS | {"input_ids": sources(model)["input_ids"][:1], "num_beams": beams}
    start = model.config.decoder_start_token_id
    prompts = torch.tensor([[start, 7], [start, 9], [start, 4]])
    found = model.generate(**options, decoder_input_ids=prompts)
    assert found[:, :2].tolist() == prompts.tolist() and not states
    for row, prompt in zip(found, prompts, strict=True):
        [alone] = model.generate(**options, decoder_input_ids=prompt[None])
        assert row[: len(alone)].tolist() == alone.tolist()


@pytest.mark.parametrize("beams", [1, 3])
def test_a_source_without_a_token_runs_in_transformers_loops(beams, states):
    model = tiny_model()
    inputs = sources(model)
    inputs["attention_mask"][2] = 0
    found = model.generate(**inputs, **OPTIONS, num_beams=beams)
    assert not states
    assert found.tolist() == of_transformers(model, **inputs, **OPTIONS, num_beams=beams).tolist()


def test_an_encoded_source_may_come_as_a_tuple(states):
    model = tiny_model()
    inputs = sources(model)
    expected = model.generate(**inputs, **OPTIONS)
    encoded = model.get_encoder()(**inputs, return_dict=False)
    assert isinstance(encoded, tuple)
    mask = inputs["attention_mask"]
    for given in (encoded, BaseModelOutput(encoded[0])):
        assert model.generate(encoder_outputs=given, attention_mask=mask, **OPTIONS).tolist() == expected.tolist()
    assert len(states) == 3


@pytest.mark.parametrize("beams", [1, 3])
def test_labels_of_a_trainer_change_nothing(beams, states):
    model = tiny_model()
    batch = random_batch(model.config, batch=4, with_labels=True)
    labels = batch.pop("labels")
    expected = model.generate(**batch, **OPTIONS, num_beams=beams)
    assert model.generate(**batch, labels=labels, **OPTIONS, num_beams=beams).tolist() == expected.tolist()
    assert len(states) == 2


class Doubled(type(tiny_model())):
    def forward(self, *arguments, **options):
        output = super().forward(*arguments, **options)
        output.logits = output.logits.roll(1, dims=-1)
        return output


class Forgetful(type(tiny_model())):
    def prepare_inputs_for_generation(self, *arguments, **options):
        prepared = super().prepare_inputs_for_generation(*arguments, **options)
        return prepared | {"attention_mask": torch.ones_like(prepared["attention_mask"])}


def roll(module, arguments, output):
    output.logits = output.logits.roll(1, dims=-1)
    return output


def hook_the_model(model):
    model.register_forward_hook(roll)


def hook_the_base_model(model):
    model.model.register_forward_hook(lambda module, arguments, output: output)


def replace_forward(model):
    model.forward = functools.partial(model.forward, smoothing=0.0)


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


def subclass(kind):
    def change(model):
        model.__class__ = kind

    change.__name__ = kind.__name__
    return change


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(
    "change",
    [
        hook_the_model,
        hook_the_base_model,
        replace_forward,
        replace_preparation,
        register_attention_kernel,
        subclass(Doubled),
        subclass(Forgetful),
    ],
    ids=lambda change: change.__name__,
)
def test_changed_models_run_in_transformers_loops(change, beams, states):
    model = tiny_model()
    change(model)
    found = model.generate(**sources(model), **OPTIONS, num_beams=beams)
    assert not states
    assert found.tolist() == of_transformers(model, **sources(model), **OPTIONS, num_beams=beams).tolist()


def test_a_model_that_accelerate_casts_searches_here(states):
    model = tiny_model()
    model._original_forward = model.forward
    model.forward = functools.partial(model.forward)
    model.generate(**sources(model), **OPTIONS)
    assert len(states) == 1


def test_a_cache_a_streamer_and_sampled_beams_run_in_transformers_loops(states):
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
def test_synced_gpus_run_in_transformers_loops(beams, states):
    model = tiny_model()
    # It asks the others, of which there are none.
    with pytest.raises(ValueError, match="process group has not been initialized"):
        model.generate(**sources(model), **OPTIONS, num_beams=beams, synced_gpus=True)
    assert not states


def test_training_hooks_and_float16_run_in_transformers_loops(states):
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


def test_decode_runs_the_fast_loop_with_the_same_scores(states, monkeypatch):
    model = tiny_model()
    texts = [[7, 8, 9, 2], [12, 2], [30, 4, 4, 4, 9, 2]]
    for options in ({}, {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5}):
        states.clear()
        ours = decode(model, texts, return_scores=True, **OPTIONS, **options)
        assert len(states) == 1
        with monkeypatch.context() as patch:
            patch.setattr(generation, "obstacle", lambda *_, **__: "switched off")
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


def test_recorded_hidden_states_change_nothing(states):
    """transformers leaves hooks behind when hidden states or attention weights were asked for once."""
    model = tiny_model()
    expected = model.generate(**sources(model), **OPTIONS)
    model(**random_batch(model.config), output_hidden_states=True, output_attentions=True)
    assert any(module._forward_hooks for module in model.get_decoder().modules())
    assert torch.equal(model.generate(**sources(model), **OPTIONS), expected)
    assert len(states) == 2


def test_speculative_decoding_is_not_replaced(states):
    """Speculation is another way of decoding, which `custom_generate` would push aside."""
    model = tiny_model()
    draft = tiny_model(seed=1)
    called = []
    draft.register_forward_hook(lambda *_: called.append("draft"))
    options = OPTIONS | {"assistant_model": draft}
    assert decode(model, [[7, 8, 9, 2]], **options)[0][0].ids == decode(model, [[7, 8, 9, 2]], **OPTIONS)[0][0].ids
    assert called
