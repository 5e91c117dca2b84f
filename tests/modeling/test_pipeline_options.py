"""Options of pipelines: who decides one, and what is warned of or refused."""

import copy

import pytest
import torch
from tiny_generator import SOURCES, tiny_generator, tiny_pair
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, pipeline

from metaphrase.inference import Text2TextGenerationPipeline, TranslationPipeline
from metaphrase.modeling.pipeline_support import generation_arguments


def options_model(**settings):
    class Model:
        generation_config = GenerationConfig(**settings)

    return Model()


@pytest.mark.parametrize(
    ("model", "defaults", "options", "expected"),
    [
        ({}, {}, {}, {"num_beams": 4, "max_new_tokens": 256, "pad_token_id": 9}),
        ({"max_length": 30, "num_beams": 2, "pad_token_id": 1}, {}, {}, {}),
        ({}, {"num_beams": 2, "max_length": 9}, {"num_beams": 3}, {"num_beams": 3, "max_length": 9, "max_new_tokens": None}),
        ({"max_new_tokens": 8}, {}, {"max_length": 5}, {"max_length": 5, "max_new_tokens": None, "num_beams": 4}),
        ({}, {"max_length": 5}, {"max_new_tokens": 6}, {"max_length": None, "max_new_tokens": 6, "num_beams": 4}),
        ({}, {"max_new_tokens": 6}, {"max_length": 5}, {"max_length": 5, "max_new_tokens": None, "num_beams": 4}),
        ({"max_length": 30, "num_beams": 2}, {"min_new_tokens": 6}, {"min_length": 5}, {"min_length": 5, "min_new_tokens": None}),
        ({}, {}, {"num_return_sequences": 6}, {"num_return_sequences": 6, "num_beams": 6, "max_new_tokens": 256}),
        ({}, {}, {"streamer": "s"}, {"streamer": "s", "max_new_tokens": 256}),
        ({}, {}, {"min_length": 2}, {"min_length": 2, "min_new_tokens": None, "num_beams": 4, "max_new_tokens": 256}),
    ],
)  # fmt: skip
def test_who_decides_an_option(model, defaults, options, expected):
    before = dict(options)
    arguments = generation_arguments(options_model(**model), defaults, options, 9)
    if "pad_token_id" not in model:
        expected = expected | {"pad_token_id": 9}
    assert arguments == expected and options == before


def test_a_generation_config_of_the_call_stands_for_the_options_of_the_pipeline(generators):
    model = generators[True].model
    config = GenerationConfig(num_beams=1, max_new_tokens=3)
    made = pipeline("translation", model=model, tokenizer=generators[True].tokenizers, num_beams=2, max_new_tokens=8)
    expected = [
        {"translation_text": text} for text in generators[True].generate(SOURCES, num_beams=1, max_new_tokens=3)
    ]
    assert made(SOURCES, generation_config=config) == expected != made(SOURCES)


def test_a_generation_config_of_the_pipeline_stands_for_the_options_of_the_task(generators):
    generator = generators[True]
    model = copy.deepcopy(generator.model)
    model.config.task_specific_params = {"summarization": {"num_beams": 4, "max_length": 5, "min_length": 4}}
    config = GenerationConfig(num_beams=1, max_new_tokens=7)
    made = pipeline("summarization", model=model, tokenizer=generator.tokenizers, generation_config=config)
    expected = generator.generate(SOURCES, num_beams=1, max_new_tokens=7)
    assert [result["summary_text"] for result in made(SOURCES)] == expected
    made = pipeline("summarization", model=model, tokenizer=generator.tokenizers)
    assert [result["summary_text"] for result in made(SOURCES)] != expected


@pytest.mark.parametrize(
    ("config", "call", "length"),
    [
        ({"num_beams": 1}, {"max_length": 4}, 4),
        ({"max_new_tokens": 2}, {"max_length": 6}, 6),
        ({"max_length": 4}, {}, 4),
        ({"max_length": 4}, {"max_new_tokens": 5}, 6),
        ({"max_length": 9, "max_new_tokens": 2}, {}, 3),
        ({"max_new_tokens": 9, "min_length": 8}, {"min_length": 3, "max_length": 5}, 5),
    ],
)
def test_lengths_beside_a_config_come_before_those_of_the_model(config, call, length):
    generator = tiny_generator()
    model = generator.model
    # Nothing ends before.
    model.generation_config.update(max_new_tokens=8, min_new_tokens=8, eos_token_id=None)
    made = Text2TextGenerationPipeline(model, generator.tokenizers.source, task="text2text-generation")
    config = GenerationConfig(**config)
    before = config.to_dict()
    [output] = made("the cat sleeps", return_tensors=True, generation_config=config, **call)
    assert len(output["generated_token_ids"]) == length
    assert config.to_dict() == before


def test_lengths_beside_a_config_stay_as_they_are_where_the_model_has_no_other_kind():
    config = GenerationConfig(max_length=6, min_length=3)
    for defaults, expected in (
        ({}, (6, None, 3, None)),
        ({"max_new_tokens": 8}, (None, 3, 3, None)),
        ({"min_new_tokens": 2}, (6, None, None, 0)),
    ):
        arguments = {"generation_config": config, "decoder_input_ids": torch.tensor([[1, 5, 6]])}
        made = generation_arguments(options_model(**defaults), {}, arguments, 0)["generation_config"]
        assert (made.max_length, made.max_new_tokens, made.min_length, made.min_new_tokens) == expected


def test_an_end_in_what_a_target_begins_with_ends_nothing():
    generator = tiny_generator()
    made = Text2TextGenerationPipeline(generator.model, generator.tokenizers.source, task="text2text-generation")
    end = generator.model.generation_config.eos_token_id
    prompt = torch.tensor([[1, end if isinstance(end, int) else end[0], 5]])
    [output] = made("the cat sleeps", decoder_input_ids=prompt, num_beams=1, return_tensors=True)
    expected = generator.model.generate(
        **made.tokenizer("the cat sleeps", return_tensors="pt"), decoder_input_ids=prompt, num_beams=1
    )
    assert output["generated_token_ids"].tolist() == expected[0].tolist()


@pytest.mark.parametrize("inputs", [4, None, ("a", 4), ["a", 4], [["a", "b"]], [None]], ids=str)
def test_what_is_no_text_is_refused(inputs, pipe):
    with pytest.raises(ValueError, match="`inputs` must be a text or a list of texts, got"):
        pipe(inputs)


def test_models_that_do_not_fit_are_refused(generators):
    tokenizer = tiny_pair().source
    decoder = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=40))
    with pytest.raises(ValueError, match="`model` must be an encoder-decoder that generates, got GPT2LMHeadModel"):
        pipeline("translation", model=decoder, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="`tokenizer` must be given if `model` is not a folder"):
        TranslationPipeline(generators[True].model)
