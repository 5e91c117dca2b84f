"""Pipelines: what they give, in which form, with whose options; with this package and, by the code in a folder, without it."""

import json
import logging
import subprocess
import sys
import warnings

import pytest
import torch
from converted_models import bart_like, draw, fill_randomly
from test_hub_code import offline_environment
from tiny_generator import SOURCES, save_generator, tiny_generator, tiny_pair
from tiny_languages import CODES, MAKERS
from tiny_models import tiny_model
from transformers import (
    AutoConfig,
    BartConfig,
    BartForConditionalGeneration,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    pipeline,
)
from transformers.pipelines import PIPELINE_REGISTRY
from transformers.pipelines.pt_utils import KeyDataset

from metaphrase.conversion import convert
from metaphrase.inference import (
    Generator,
    SummarizationPipeline,
    Text2TextGenerationPipeline,
    TranslationPipeline,
)
from metaphrase.inference.pipelines import register_pipelines
from metaphrase.modeling import pipeline_tokenizers
from metaphrase.modeling.encoder_decoder_pipeline import ReturnType
from metaphrase.modeling.pipeline_options import generation_arguments, is_of_each_text, length_limits
from metaphrase.modeling.pipeline_tasks import CustomPipelines, general_task, languages_of
from metaphrase.tokenization import TokenizerPair, tokenizer_pair

NAMES = {"translation": "translation", "summarization": "summary", "text2text-generation": "generated"}
CLASSES = {
    "translation": TranslationPipeline,
    "translation_en_to_de": TranslationPipeline,
    "summarization": SummarizationPipeline,
    "text2text-generation": Text2TextGenerationPipeline,
}
# As T5's own.
T5_TASKS = {
    "summarization": {"prefix": "cat ", "num_beams": 2, "max_length": 6, "early_stopping": True},
    "translation_en_to_de": {"prefix": "the dog ", "num_beams": 3, "max_length": 7},
    "translation_en_to_fr": {"prefix": "two dogs ", "num_beams": 3, "max_length": 7},
}


@pytest.fixture(scope="module")
def generators():
    """By whether one tokenizer serves both sides."""
    return {joint: tiny_generator(joint) for joint in (True, False)}


@pytest.fixture(scope="module")
def folders(generators, tmp_path_factory):
    root = tmp_path_factory.mktemp("pipelines")
    return {joint: save_generator(generator, root / str(joint)) for joint, generator in generators.items()}


def family_model(name, **fields):
    """transformers' own T5 or BART with large random weights, for the vocabulary of `tiny_pair()`."""
    ids = {"vocab_size": len(tiny_pair().source), "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
    if name == "t5":
        sizes = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
        model = T5ForConditionalGeneration(T5Config(**sizes, **ids, **fields))
    else:
        ids |= {"bos_token_id": 1, "decoder_start_token_id": 2, "forced_eos_token_id": 2}
        sizes = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 64}
        sizes |= {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
        model = BartForConditionalGeneration(BartConfig(**sizes, **ids, **fields))
    fill_randomly(model, seed=1)
    return model.eval()


@pytest.fixture(scope="module")
def families():
    models = {name: family_model(name) for name in ("t5", "bart")}
    models["bart"].generation_config.max_new_tokens = 9
    return models


@pytest.fixture
def pipe(generators):
    """Text to text with one tokenizer, and eight new tokens by the model's own settings."""
    return pipeline("text2text-generation", model=generators[True].model, tokenizer=generators[True].tokenizers)


def texts_of(results, name="generated"):
    return [result[f"{name}_text"] for result in results]


# What comes out, in which form.


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("task", list(CLASSES))
def test_folder_writes_what_its_generator_writes(task, joint, folders, generators):
    made = pipeline(task, model=str(folders[joint]))
    assert type(made) is CLASSES[task] and made.task == task
    assert (made.tokenizer is made.target_tokenizer) == joint
    expected = generators[joint].generate(SOURCES, num_beams=4)
    assert len(set(expected)) == len(SOURCES)
    assert made(SOURCES) == [{f"{NAMES[general_task(task)]}_text": text} for text in expected]


@pytest.mark.parametrize("family", ["t5", "bart"])
@pytest.mark.parametrize("task", list(NAMES))
def test_other_families_write_what_their_generate_writes(task, family, families):
    model, tokenizer = families[family], tiny_pair().source
    made = pipeline(task, model=model, tokenizer=tokenizer, max_new_tokens=7)
    written = texts_of(made(SOURCES), NAMES[task])
    for source, text in zip(SOURCES, written, strict=True):
        inputs = tokenizer([source], return_tensors="pt", return_token_type_ids=False)
        ids = model.generate(**inputs, num_beams=4, max_new_tokens=7)
        assert text == tokenizer.decode(ids[0], skip_special_tokens=True)
    assert len(set(written)) > 1


def test_nesting_of_results(pipe):
    first, second = SOURCES[:2]
    one, two = pipe(first), pipe(second)
    assert len(one) == 1 and set(one[0]) == {"generated_text"} and one != two
    assert pipe([first]) == one
    assert pipe([first, second]) == [*one, *two]
    assert pipe([]) == []
    n_best = pipe(first, num_return_sequences=3)
    assert len(n_best) == 3 and n_best[0] == one[0] and n_best[1] != n_best[0]
    assert pipe([first], num_return_sequences=3) == [n_best]
    assert pipe([first, second], num_return_sequences=3) == [n_best, pipe(second, num_return_sequences=3)]


def test_generators_and_data_sets_are_read_as_results_are_asked_for(pipe):
    expected = pipe(SOURCES)
    read = []

    def texts():
        for text in SOURCES:
            read.append(text)
            yield text

    results = iter(pipe(texts()))
    assert next(results) == [expected[0]]
    assert len(read) < len(SOURCES)
    assert [*results] == [[result] for result in expected[1:]]
    data = KeyDataset([{"text": text} for text in SOURCES], "text")
    assert list(pipe(data, batch_size=2)) == [[result] for result in expected]


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("batch_size", [None, 2, 5])
@pytest.mark.parametrize(
    "options", [{}, {"num_return_sequences": 3}, {"num_beams": 1, "return_tensors": True}], ids=str
)
def test_batches_change_nothing(options, batch_size, joint, generators):
    made = pipeline("translation", model=generators[joint].model, tokenizer=generators[joint].tokenizers, **options)
    alone = [made(text) for text in SOURCES]
    together = made(SOURCES, batch_size=batch_size)
    together = [result if isinstance(result, list) else [result] for result in together]
    for some, others in zip(alone, together, strict=True):
        assert len(some) == options.get("num_return_sequences", 1)
        for result, other in zip(some, others, strict=True):
            assert result.keys() == other.keys()
            for name, value in result.items():
                assert value.tolist() == other[name].tolist() if name.endswith("_ids") else value == other[name]


def rows_of_each_batch(made, monkeypatch):
    rows, forward = [], made._forward
    monkeypatch.setattr(
        made, "_forward", lambda inputs, **options: rows.append(inputs["input_ids"].shape) or forward(inputs, **options)
    )
    return rows


def test_lists_go_in_batches_of_like_length(pipe, monkeypatch):
    rows = rows_of_each_batch(pipe, monkeypatch)
    pipe(SOURCES)
    widest = max(len(ids) for ids in pipe.tokenizer(SOURCES)["input_ids"])
    assert rows == [(len(SOURCES), widest)]
    rows.clear()
    texts = [*SOURCES, SOURCES[0] * 9] * 30
    pipe(texts, max_new_tokens=1, num_beams=1)
    assert sum(count for count, _ in rows) == len(texts) and max(count for count, _ in rows) == 64
    assert [width for _, width in rows] == sorted((width for _, width in rows), reverse=True)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "num_beams": 1},
        {"logits_processor": LogitsProcessorList()},
        {"max_time": 60.0},
        {"num_workers": 0},
    ],
    ids=str,
)
def test_lists_go_one_by_one_where_a_batch_could_change_them(options, pipe, monkeypatch):
    rows = rows_of_each_batch(pipe, monkeypatch)
    results = pipe(SOURCES, **options)
    assert [count for count, _ in rows] == [1] * len(SOURCES) == [len(result) for result in results]


def test_tokens_and_texts(pipe):
    text = pipe(SOURCES[0])[0]["generated_text"]
    [tokens] = pipe(SOURCES[0], return_tensors=True)
    assert set(tokens) == {"generated_token_ids"}
    ids = tokens["generated_token_ids"]
    assert isinstance(ids, torch.Tensor) and pipe.tokenizer.decode(ids, skip_special_tokens=True) == text
    assert pipe(SOURCES[0], return_type=ReturnType.TENSORS)[0].keys() == tokens.keys()
    assert pipe(SOURCES[0], return_tensors=False) == pipe(SOURCES[0], return_text=True) == [{"generated_text": text}]
    [both] = pipe(SOURCES[0], return_tensors=True, return_text=True)
    assert both["generated_text"] == text and both["generated_token_ids"].tolist() == ids.tolist()
    with pytest.raises(ValueError, match="`return_text` must be True where `return_tensors` is not, got False"):
        pipe(SOURCES[0], return_text=False)
    silent = pipeline("translation", model=pipe.model, tokenizer=pipe.tokenizer, return_tensors=True, return_text=False)
    assert set(silent(SOURCES[0])[0]) == {"translation_token_ids"}
    assert set(silent(SOURCES[0], return_text=True)[0]) == {"translation_text", "translation_token_ids"}


def test_tokens_end_with_the_end_of_sequence(pipe):
    """Also where that is the padding, as in some tokenizers."""
    ids = torch.tensor([0, 7, 5, 2, 0, 0])
    assert pipe._without_padding(ids).tolist() == [0, 7, 5, 2]
    assert pipe._without_padding(torch.tensor([0, 0])).tolist() == [0]

    class Tokenizer:
        pad_token_id = eos_token_id = 2

    pipe.target_tokenizer = Tokenizer()
    assert pipe._without_padding(torch.tensor([0, 7, 5, 2, 2, 2])).tolist() == [0, 7, 5, 2]


def test_clean_up_reaches_the_tokenizer_of_the_targets(pipe, monkeypatch):
    seen = []
    decode = pipe.target_tokenizer.decode
    monkeypatch.setattr(
        pipe.target_tokenizer, "decode", lambda ids, **options: seen.append(options) or decode(ids, **options)
    )
    pipe(SOURCES[0])
    pipe(SOURCES[0], clean_up_tokenization_spaces=True)
    assert [options["clean_up_tokenization_spaces"] for options in seen] == [False, True]
    assert all(options["skip_special_tokens"] for options in seen)


def test_truncation_cuts_at_the_length_of_the_tokenizer(generators, tmp_path):
    generators[True].tokenizers.save_pretrained(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path, model_max_length=5)
    made = pipeline("translation", model=generators[True].model, tokenizer=tokenizer)
    whole, cut = made.preprocess(SOURCES[0]), made.preprocess(SOURCES[0], truncation=True)
    assert whole["input_ids"].shape[1] > 5 and cut["input_ids"].shape == (1, 5)
    assert cut["input_ids"][0, -1] == tokenizer.eos_token_id
    assert made(SOURCES[0], truncation=True) == made(SOURCES[0][:4]) != made(SOURCES[0])


def test_stop_sequence_ends_a_target(pipe):
    text = pipe(SOURCES[0], num_beams=1)[0]["generated_text"]
    stop = next(letter for letter in text[1:] if letter != " ")
    with pytest.warns(UserWarning, match="`stop_sequence` .* has 2 tokens: a target ends with the first of them"):
        stopped = pipe(SOURCES[0], num_beams=1, stop_sequence=stop * 2)
    assert stopped == pipe(SOURCES[0], num_beams=1, stop_sequence=stop)
    assert stopped[0]["generated_text"] == text[: text.index(stop) + 1] != text
    with pytest.raises(ValueError, match="`stop_sequence` must have at least one token, got ''"):
        pipe(SOURCES[0], stop_sequence="")


def test_an_assistant_changes_nothing(families):
    parts = {"model": families["bart"], "tokenizer": tiny_pair().source, "max_new_tokens": 7}
    plain = pipeline("translation", **parts)(SOURCES, num_beams=1)
    assert pipeline("translation", **parts, assistant_model=family_model("bart"))(SOURCES) == plain
    assert pipeline("translation", **parts)(SOURCES, prompt_lookup_num_tokens=2) == plain


def test_a_model_in_training_is_read_without_dropout_and_left_in_training(generators):
    pair = generators[True].tokenizers
    model = tiny_model(**pair.config_fields(), dropout=0.5).train()
    model.generation_config.max_new_tokens = 8
    made = pipeline("translation", model=model, tokenizer=pair)
    results = made(SOURCES)
    assert model.training and results == made(SOURCES)
    model.eval()
    assert made(SOURCES) == results


# Tasks and their settings.


def test_names_of_tasks():
    assert languages_of("translation_en_to_de") == ("en", "de")
    assert languages_of("translation_eng_Latn_to_deu_Latn") == ("eng_Latn", "deu_Latn")
    assert languages_of("translation") is languages_of("summarization") is None
    assert general_task("translation_en_to_de") == "translation" and general_task("summarization") == "summarization"


def test_registry_knows_the_tasks():
    assert {*NAMES} <= {*PIPELINE_REGISTRY.get_supported_tasks()}
    name, implementation, languages = PIPELINE_REGISTRY.check_task("translation_en_to_de")
    assert (name, implementation["impl"], languages) == ("translation", TranslationPipeline, ("en", "de"))
    assert PIPELINE_REGISTRY.check_task("ner")[0] == "token-classification"
    before = dict(PIPELINE_REGISTRY.supported_tasks), PIPELINE_REGISTRY.check_task
    register_pipelines()
    assert (PIPELINE_REGISTRY.supported_tasks, PIPELINE_REGISTRY.check_task) == before


def test_unknown_tasks_stay_unknown(folders):
    with pytest.raises(
        KeyError, match="`task` must have the form translation_xx_to_yy to name languages, got 'translation_de'"
    ):
        pipeline("translation_de", model=str(folders[True]))
    with pytest.raises(KeyError, match="Unknown task to-translate"):
        pipeline("to-translate", model=str(folders[True]))
    with pytest.raises(KeyError, match="question-answering"):
        pipeline("question-answering", model=str(folders[True]))
    with pytest.raises(ValueError, match="default"):
        pipeline("translation_en_to_de")
    with pytest.raises(ValueError, match="default"):
        pipeline("summarization")


def test_task_gives_the_languages(pipe):
    parts = {"model": pipe.model, "tokenizer": pipe.tokenizer}
    made = pipeline("translation_en_to_de", **parts)
    assert made._preprocess_params == {"src_lang": "en", "tgt_lang": "de"}
    assert pipeline("translation", **parts)._preprocess_params == {}
    given = pipeline("translation_en_to_de", **parts, src_lang="a", tgt_lang="b")
    assert given._preprocess_params == {"src_lang": "a", "tgt_lang": "b"}
    # Where the tokenizer has no languages, they change nothing.
    assert given(SOURCES) == made(SOURCES, src_lang="c") == pipeline("translation", **parts)(SOURCES)


@pytest.fixture(scope="module")
def t5_with_tasks():
    return family_model("t5", task_specific_params=T5_TASKS, prefix="a cat ")


@pytest.mark.parametrize("task", ["summarization", "translation_en_to_de"])
def test_settings_of_a_task_apply(task, t5_with_tasks):
    tokenizer, settings = tiny_pair().source, dict(T5_TASKS[task])
    made = pipeline(task, model=t5_with_tasks, tokenizer=tokenizer)
    inputs = tokenizer([settings.pop("prefix") + SOURCES[0]], return_tensors="pt", return_token_type_ids=False)
    expected = t5_with_tasks.generate(**inputs, **settings)
    [result] = made(SOURCES[0], return_tensors=True)
    ids = result[f"{made.return_name}_token_ids"]
    assert ids.tolist() == made._without_padding(expected[0]).tolist() and len(ids) <= settings["max_length"]
    # They are the model's own, and stay so.
    assert t5_with_tasks.config.task_specific_params == T5_TASKS
    assert made.preprocess("a", prefix="dog ")["input_ids"].tolist() == [tokenizer("dog a")["input_ids"]]
    assert len(made(SOURCES[0], max_length=4, return_tensors=True)[0][f"{made.return_name}_token_ids"]) <= 4


def test_prefix_of_the_model_holds_where_the_task_has_none(t5_with_tasks):
    tokenizer = tiny_pair().source
    made = pipeline("text2text-generation", model=t5_with_tasks, tokenizer=tokenizer)
    assert made.preprocess("dog")["input_ids"].tolist() == [tokenizer("a cat dog")["input_ids"]]
    given = pipeline("text2text-generation", model=t5_with_tasks, tokenizer=tokenizer, prefix="")
    assert given.preprocess("dog", **given._preprocess_params)["input_ids"].tolist() == [tokenizer("dog")["input_ids"]]


def test_translation_without_languages_is_the_first_of_the_model(t5_with_tasks):
    parts = {"model": t5_with_tasks, "tokenizer": tiny_pair().source}
    with pytest.warns(UserWarning, match="without languages: it is taken for translation_en_to_de"):
        made = pipeline("translation", **parts)
    assert made.task == "translation_en_to_de" and made.prefix == "the dog "
    assert made._preprocess_params == {"src_lang": "en", "tgt_lang": "de"}
    made = pipeline("translation", **parts, src_lang="en", tgt_lang="fr")
    assert made.task == "translation_en_to_fr" and made.prefix == "two dogs "
    with pytest.raises(ValueError, match="one of translation_en_to_de, translation_en_to_fr, got 'en' and None"):
        pipeline("translation", **parts, src_lang="en")


def test_conversion_carries_the_tasks_both_ways(t5_with_tasks, tmp_path):
    t5_with_tasks.save_pretrained(tmp_path / "t5")
    tiny_pair().save_pretrained(tmp_path / "t5")
    convert(tmp_path / "t5", tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "again", to="t5")
    results = [
        pipeline("translation_en_to_fr", model=str(tmp_path / name))(SOURCES) for name in ("t5", "ours", "again")
    ]
    assert results[0] == results[1] == results[2]
    plain = pipeline("translation_en_to_xx", model=str(tmp_path / "ours"), max_length=7, num_beams=3)
    assert plain.prefix == "a cat " and plain(SOURCES) != results[0]


# Who decides an option.


def options_model(**settings):
    class Model:
        generation_config = GenerationConfig(**settings)

    return Model()


@pytest.mark.parametrize(
    ("model", "own", "given", "expected"),
    [
        ({}, {}, {}, {"num_beams": 4, "max_new_tokens": 256, "pad_token_id": 9}),
        ({"max_length": 30, "num_beams": 2, "pad_token_id": 1}, {}, {}, {}),
        ({}, {"num_beams": 2, "max_length": 9}, {"num_beams": 3}, {"num_beams": 3, "max_length": 9, "max_new_tokens": None}),
        ({"max_new_tokens": 8}, {}, {"max_length": 5}, {"max_length": 5, "max_new_tokens": None, "num_beams": 4}),
        ({}, {"max_length": 5}, {"max_new_tokens": 6}, {"max_length": 5, "max_new_tokens": 6, "num_beams": 4}),
        ({}, {}, {"num_return_sequences": 6}, {"num_return_sequences": 6, "num_beams": 6, "max_new_tokens": 256}),
        ({}, {}, {"streamer": "s"}, {"streamer": "s", "max_new_tokens": 256}),
        ({}, {}, {"min_length": 2}, {"min_length": 2, "min_new_tokens": None, "num_beams": 4, "max_new_tokens": 256}),
    ],
)  # fmt: skip
def test_who_decides_an_option(model, own, given, expected):
    before = dict(given)
    arguments = generation_arguments(options_model(**model), own, given, 9)
    if "pad_token_id" not in model:
        expected = expected | {"pad_token_id": 9}
    assert arguments == expected and given == before


def test_a_generation_config_of_the_call_stands_for_the_options_of_the_pipeline(generators):
    model = generators[True].model
    config = GenerationConfig(num_beams=1, max_new_tokens=3)
    arguments = generation_arguments(model, {"num_beams": 2}, {"generation_config": config, "max_length": 5}, 0)
    assert set(arguments) == {"generation_config"}
    made = arguments["generation_config"]
    assert (made.num_beams, made.max_length, made.max_new_tokens) == (1, 5, None)
    assert config.max_new_tokens == 3 and config.max_length is None
    made = pipeline("translation", model=model, tokenizer=generators[True].tokenizers, num_beams=2, max_new_tokens=8)
    expected = [
        {"translation_text": text} for text in generators[True].generate(SOURCES, num_beams=1, max_new_tokens=3)
    ]
    assert made(SOURCES, generation_config=config) == expected != made(SOURCES)


def test_lengths_that_count():
    model = options_model(max_length=30, min_length=3)
    assert length_limits(model, {}) == (3, 30)
    assert length_limits(model, {"max_new_tokens": 5, "min_new_tokens": 2}) == (3, 6)
    assert length_limits(model, {"max_length": 9, "max_new_tokens": None}) == (3, 9)
    assert length_limits(model, {"generation_config": GenerationConfig(max_new_tokens=7)}) == (3, 8)
    assert length_limits(options_model(), {}) == (0, None)


def test_what_decides_of_a_batch():
    sampling, greedy = options_model(do_sample=True), options_model()
    assert is_of_each_text(greedy, {"num_beams": 4, "generation_config": GenerationConfig(num_beams=2)})
    assert not is_of_each_text(sampling, {}) and is_of_each_text(sampling, {"do_sample": False})
    # A config that says nothing of it leaves it to the model's.
    assert not is_of_each_text(sampling, {"generation_config": GenerationConfig(num_beams=2)})
    assert not is_of_each_text(greedy, {"generation_config": GenerationConfig(do_sample=True)})
    assert not is_of_each_text(greedy, {"streamer": None})


def test_length_of_the_call_is_kept(pipe):
    """The model's own eight new tokens do not stand above it."""
    ids = pipe(SOURCES[0], max_length=4, min_length=4, return_tensors=True)[0]["generated_token_ids"]
    assert len(ids) == 4
    ids = pipe(SOURCES[0], max_new_tokens=12, min_new_tokens=11, return_tensors=True)[0]["generated_token_ids"]
    assert len(ids) >= 12


# Warnings and errors.


@pytest.mark.parametrize(
    ("task", "options", "warning"),
    [
        ("summarization", {"max_length": 40}, "`max_length` of 40 is more than the 17 tokens of the text"),
        ("summarization", {"max_length": 5, "min_length": 9}, "`min_length` should not be above `max_length`, got 9 and 5"),
        ("summarization", {"max_length": 17}, None),
        ("translation", {"max_length": 18}, "The text has 17 tokens, and its translation may have 18"),
        ("translation", {"max_length": 19}, None),
        ("text2text-generation", {"max_length": 5, "min_length": 9}, None),
    ],
)  # fmt: skip
def test_lengths_that_do_not_fit_are_warned_of(task, options, warning, generators, caplog):
    generator = generators[True]
    made = pipeline(task, model=generator.model, tokenizer=generator.tokenizers)
    [text] = [text for text in SOURCES if len(made.tokenizer(text)["input_ids"]) == 17]
    with caplog.at_level(logging.WARNING, logger="metaphrase.modeling.pipelines"):
        assert len(made(text, **options)) == 1
        alone = [record.getMessage() for record in caplog.records if record.name == "metaphrase.modeling.pipelines"]
        caplog.clear()
        made([text, text], **options)
        both = [record.getMessage() for record in caplog.records if record.name == "metaphrase.modeling.pipelines"]
    assert alone == both and len(alone) == (warning is not None)
    assert warning is None or warning in alone[0]


@pytest.mark.parametrize("inputs", [4, None, ("a", "b"), ["a", 4], [["a", "b"]], [None]], ids=str)
def test_what_is_no_text_is_refused(inputs, pipe):
    with pytest.raises(ValueError, match="`inputs` must be a text or a list of texts, got"):
        pipe(inputs)


def test_models_that_do_not_fit_are_refused(generators):
    tokenizer = tiny_pair().source
    decoder = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=40))
    with pytest.raises(ValueError, match="`model` must be an encoder-decoder that generates, got GPT2LMHeadModel"):
        pipeline("translation", model=decoder, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="`tokenizer` must be given, since the model is not the name of a folder"):
        TranslationPipeline(generators[True].model)


# Tokenizers.


def test_pair_and_single_tokenizers_can_be_given(generators, folders):
    generator = generators[False]
    expected = [{"translation_text": text} for text in generator.generate(SOURCES, num_beams=4)]
    pair = generator.tokenizers
    for parts in (
        {"tokenizer": pair},
        {"tokenizer": pair.source, "target_tokenizer": pair.target},
        {"tokenizer": pair.source, "target_tokenizer": str(folders[False] / "target_tokenizer")},
        {"tokenizer": str(folders[False])},
    ):
        made = pipeline("translation", model=generator.model, **parts)
        assert made(SOURCES) == expected
        # The target's stop sequences, not the source's.
        assert made._stop_id("H") == pair.target.encode("H", add_special_tokens=False)[0]
    assert pipeline("translation", model=generator.model, tokenizer=pair.source)(SOURCES) != expected


def test_missing_tokenizer_of_the_targets_is_an_error(generators, tmp_path):
    folder = save_generator(generators[False], tmp_path / "model")
    (folder / "target_tokenizer").rename(tmp_path / "elsewhere")
    with pytest.raises(
        ValueError, match="`target_tokenizer` must be given where the tokenizer of the targets is not in"
    ):
        pipeline("translation", model=str(folder))
    made = pipeline("translation", model=str(folder), target_tokenizer=str(tmp_path / "elsewhere"))
    assert texts_of(made(SOURCES), "translation") == generators[False].generate(SOURCES, num_beams=4)


def test_folder_of_the_target_tokenizer_has_one_name():
    assert pipeline_tokenizers.TARGET_SUBFOLDER == tokenizer_pair.TARGET_SUBFOLDER


def test_end_of_sequence_is_added_where_the_tokenizer_lacks_it(generators, families, tmp_path):
    tiny_pair().save_pretrained(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path, model_max_length=5)
    tokenizer.backend_tokenizer.post_processor = None
    generator = Generator(generators[True].model, TokenizerPair(tokenizer, tokenizer))
    assert tokenizer.eos_token_id not in tokenizer("a")["input_ids"]
    made = pipeline("translation", model=generator.model, tokenizer=tokenizer)
    assert texts_of(made(SOURCES), "translation") == generator.generate(SOURCES, num_beams=4)
    assert made.preprocess("a cat")["input_ids"].tolist() == generator.tokenizers.encode_sources(["a cat"])
    [cut] = made.preprocess("two small dogs", truncation=True)["input_ids"].tolist()
    assert cut == [*tokenizer("two ")["input_ids"], tokenizer.eos_token_id]
    # Other families' pipelines take what their tokenizer gives.
    theirs = pipeline("translation", model=families["bart"], tokenizer=tokenizer)
    assert theirs.preprocess("a cat")["input_ids"].tolist() == [tokenizer("a cat")["input_ids"]]


@pytest.fixture(scope="module", params=list(MAKERS))
def many_languages(request, tmp_path_factory):
    """The name and the folder of a converted model of many languages."""
    family, make = MAKERS[request.param]
    tokenizer = make()
    theirs = bart_like(family, draw(family, 200), vocab_size=len(tokenizer), max_position_embeddings=40).eval()
    if request.param == "mbart":
        theirs.generation_config.decoder_start_token_id = tokenizer.convert_tokens_to_ids("ro_RO")
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder / "theirs")
    tokenizer.save_pretrained(folder / "theirs")
    convert(folder / "theirs", folder / "ours")
    return request.param, folder / "ours"


def test_languages_are_marked_and_written(many_languages):
    name, folder = many_languages
    english, german, romanian = CODES[name]
    texts, options = (
        ["the cat", "no dolphin is here", "a"],
        {"num_beams": 2, "max_new_tokens": 6, "suppress_tokens": [1]},
    )
    made = pipeline("translation", model=str(folder), src_lang=english, tgt_lang=german, **options)
    written = {}
    for language in (german, romanian):
        generator = Generator.from_pretrained(folder, device="cpu", source_lang=english, target_lang=language)
        expected = [{"translation_text": text} for text in generator.generate(texts, **options)]
        for batch_size in (None, 1, 2):
            assert made(texts, tgt_lang=language, batch_size=batch_size) == expected
        written[language] = expected
    assert written[german] != written[romanian] and made(texts) == written[german]
    # In a batch the code comes once for each text; it is an option of them all.
    field = "forced_bos_token_id" if name == "nllb" else "decoder_start_token_id"
    assert made._language_options({"forced_bos_token_id": [7, 7]}) == {field: 7}
    task = f"translation_{english}_to_{german}"
    assert pipeline(task, model=str(folder), **options)(texts) == written[german]
    with pytest.raises(ValueError, match=r"`tgt_lang` must be a language that the .* knows, got 'xx_XX'"):
        made("the cat", tgt_lang="xx_XX")
    # A piece of a word is no language.
    with pytest.raises(ValueError, match=r"`tgt_lang` must be a language that the .* knows, got 'a'"):
        made("the cat", tgt_lang="a")
    with pytest.raises(ValueError, match=r"`src_lang` must be a language that the .* knows, got 'en'"):
        pipeline("translation_en_to_de", model=str(folder))("the cat")
    with pytest.raises(ValueError, match=r"`tgt_lang` must be given for a .*, which has many languages, got None"):
        pipeline("translation", model=str(folder), src_lang=english)("the cat")


def test_settings_of_some_languages_are_not_those_of_all(many_languages):
    """The first mBART has settings for one pair of languages; a tokenizer of many is not bound to them."""
    name, folder = many_languages
    english, german, _ = CODES[name]
    generator = Generator.from_pretrained(folder, device="cpu", source_lang=english, target_lang=german)
    generator.model.config.task_specific_params = {"translation_en_to_ro": {"max_length": 2}}
    parts = {"model": generator.model, "tokenizer": generator.tokenizers, "max_new_tokens": 6}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = pipeline("translation", **parts)
    assert made.task == "translation" and made.task_options == {}
    assert made(["the cat"], src_lang=english, tgt_lang=german) == made(["the cat"])
    assert pipeline("translation", **parts, src_lang="en", tgt_lang="ro").task_options == {"max_length": 2}


def test_languages_may_be_the_models_own(many_languages):
    """A model that was trained for one pair of languages need not be told again."""
    name, folder = many_languages
    english, german, _ = CODES[name]
    generator = Generator.from_pretrained(folder, device="cpu", source_lang=english, target_lang=german)
    expected = generator.generate(["the cat"], num_beams=4, max_new_tokens=6)
    made = pipeline("translation", model=generator.model, tokenizer=generator.tokenizers, max_new_tokens=6)
    assert texts_of(made(["the cat"]), "translation") == expected
    if name == "nllb":
        with pytest.raises(ValueError, match="`src_lang` must be given for a NllbTokenizer"):
            pipeline("translation", model=str(folder))("the cat")


# Folders.


def test_configuration_names_the_code_of_every_task(folders, monkeypatch):
    written = json.loads((folders[True] / "config.json").read_text(encoding="utf-8"))["custom_pipelines"]
    assert set(written) == set(NAMES)
    for task, entry in written.items():
        assert entry == {"impl": f"pipelines.{CLASSES[task].__name__}", "pt": ["AutoModelForSeq2SeqLM"], "type": "text"}
    custom = CustomPipelines.with_all_tasks()
    # The registered class stands in for the code of a folder, which needs no trust then.
    assert "translation" not in custom and "translation_en_to_de" not in custom and len(custom) == 3
    monkeypatch.setattr(CustomPipelines, "registered", set())
    assert "translation" in custom and "translation_en_to_de" in custom and "ner" not in custom and None not in custom
    entry = custom["translation_en_to_de"]
    assert entry == written["translation"]
    entry["pt"] = ()
    assert custom["translation"] == written["translation"]


def test_pipelines_of_others_stay(folders, tmp_path):
    theirs = {"impl": "my_pipelines.Mine", "pt": ["AutoModelForSeq2SeqLM"], "type": "text"}
    config = AutoConfig.from_pretrained(folders[True])
    config.custom_pipelines = {"paraphrase": theirs, "summarization": theirs}
    config.save_pretrained(tmp_path)
    custom = AutoConfig.from_pretrained(tmp_path).custom_pipelines
    assert set(custom) == {*NAMES, "paraphrase"} and custom["paraphrase"] == custom["summarization"] == theirs
    # Their code is another than the registered one.
    assert "paraphrase" in custom and "summarization" in custom and "translation" not in custom


@pytest.mark.parametrize("joint", [True, False])
def test_pipeline_saves_all_that_it_needs(joint, folders, generators, tmp_path):
    pipeline("summarization", model=str(folders[joint])).save_pretrained(tmp_path / "saved")
    names = {path.relative_to(folders[joint]).as_posix() for path in folders[joint].rglob("*")}
    assert {path.relative_to(tmp_path / "saved").as_posix() for path in (tmp_path / "saved").rglob("*")} == names
    made = pipeline("translation", model=str(tmp_path / "saved"))
    assert texts_of(made(SOURCES), "translation") == generators[joint].generate(SOURCES, num_beams=4)
    # The tokenizer in memory is not marked.
    pair = generators[False].tokenizers
    pipeline("translation", model=generators[False].model, tokenizer=pair).save_pretrained(tmp_path / "pair")
    assert "target_tokenizer" not in pair.source.init_kwargs
    assert not TokenizerPair.from_pretrained(tmp_path / "pair").is_joint


# Runs in an interpreter of its own that cannot import the package. Arguments: the tests' folder, then folders of models.
CLEAN_INTERPRETER = """
import json
import sys
import traceback

sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
sys.path_hooks = [hook for hook in sys.path_hooks if "editable" not in repr(hook).lower()]
sys.modules["metaphrase"] = None

import torch
from transformers import pipeline

torch.set_num_threads(1)
sources, tasks, folders = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:]
report = {}
for folder in folders:
    for task in tasks:
        try:
            made = pipeline(task, model=folder, trust_remote_code=True)
            assert type(made).__module__.startswith("transformers_modules."), type(made).__module__
            report[f"{folder} {task}"] = [made(sources), made(sources, batch_size=2)]
            if task == "translation":
                made.save_pretrained(folder + "/again")
                report[f"{folder} again"] = pipeline(task, model=folder + "/again", trust_remote_code=True)(sources)
        except Exception:
            report[f"{folder} {task}"] = traceback.format_exc()
try:
    pipeline("translation", model=folders[0], trust_remote_code=False)
except Exception:
    report["untrusted"] = traceback.format_exc()
assert not [name for name in sys.modules if name.startswith("metaphrase.")]
print("REPORT " + json.dumps(report))
"""


@pytest.fixture(scope="module")
def clean_report(folders, families, tmp_path_factory):
    """What every task gives in an interpreter without the package, by folder and task."""
    root = tmp_path_factory.mktemp("clean")
    saved = pipeline("translation_en_to_de", model=families["bart"], tokenizer=tiny_pair().source)
    saved.save_pretrained(root / "bart")
    places = [str(folders[True]), str(folders[False]), str(root / "bart")]
    arguments = [json.dumps(SOURCES), json.dumps(list(CLASSES)), *places]
    result = subprocess.run(
        [sys.executable, "-c", CLEAN_INTERPRETER, *arguments],
        cwd=root,
        env=offline_environment(root),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    [line] = [line for line in result.stdout.splitlines() if line.startswith("REPORT ")]
    return dict(zip(("joint", "separate", "bart"), places, strict=True)), json.loads(line.removeprefix("REPORT "))


@pytest.mark.parametrize("task", list(CLASSES))
@pytest.mark.parametrize("joint", [True, False])
def test_folder_works_without_the_package(joint, task, clean_report, generators):
    places, report = clean_report
    expected = [
        {f"{NAMES[general_task(task)]}_text": text} for text in generators[joint].generate(SOURCES, num_beams=4)
    ]
    place = places["joint" if joint else "separate"]
    assert report[f"{place} {task}"] == [expected, expected]
    if task == "translation":
        assert report[f"{place} again"] == expected


def test_other_families_work_from_a_folder_of_a_pipeline(clean_report, families):
    places, report = clean_report
    for task in CLASSES:
        expected = pipeline(task, model=families["bart"], tokenizer=tiny_pair().source)(SOURCES)
        assert report[f"{places['bart']} {task}"] == [expected, expected]


def test_code_of_a_folder_asks_for_trust(clean_report):
    assert "trust_remote_code" in clean_report[1]["untrusted"].splitlines()[-1]
