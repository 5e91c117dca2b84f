"""Pipelines: what they give, and in which form."""

import collections

import pytest
import torch
from datasets import Dataset
from pipeline_models import CLASSES, NAMES, family_model, texts_of
from tiny_generator import SOURCES, tiny_pair
from tiny_models import tiny_model
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedTokenizerFast, pipeline
from transformers.pipelines.pt_utils import KeyDataset

from metaphrase.modeling.pipeline_support import general_task


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("task", list(CLASSES))
def test_folder_writes_what_its_generator_writes(task, joint, model_folders, generators):
    made = pipeline(task, model=str(model_folders[joint]))
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
        inputs = tokenizer([source], return_tensors="pt", return_token_type_ids=False).to(model.device)
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
    for some, batched in zip(alone, together, strict=True):
        assert len(some) == options.get("num_return_sequences", 1)
        for result, other in zip(some, batched, strict=True):
            assert result.keys() == other.keys()
            for name, value in result.items():
                assert value.tolist() == other[name].tolist() if name.endswith("_ids") else value == other[name]


def rows_of_each_batch(made, monkeypatch):
    rows, forward = [], made._forward
    monkeypatch.setattr(
        made, "_forward", lambda inputs, **options: rows.append(inputs["input_ids"].shape) or forward(inputs, **options)
    )
    return rows


def test_every_sequence_of_texts_is_a_list(pipe):
    expected = pipe(SOURCES)
    column = Dataset.from_dict({"text": SOURCES})["text"]
    for texts in (tuple(SOURCES), column, collections.UserList(SOURCES)):
        assert pipe(texts) == expected
    assert pipe(()) == []
    for texts in ((SOURCES[0], 3), b"ab"):
        with pytest.raises(ValueError, match="`inputs` must be a text or a list of texts"):
            pipe(texts)


def test_lists_go_in_batches_of_like_length(pipe, monkeypatch):
    monkeypatch.setattr(pipe.model.config, "max_position_embeddings", 256)
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
        {"generation_config": GenerationConfig(do_sample=True, max_new_tokens=4)},
        {"encoder_repetition_penalty": 1.5},
        {"encoder_no_repeat_ngram_size": 1},
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


def test_tokens_end_with_the_end_of_sequence(pipe):
    """Also where that is the padding, as in some tokenizers."""
    ids = torch.tensor([0, 7, 5, 2, 0, 0])
    assert pipe._remove_padding(ids).tolist() == [0, 7, 5, 2]
    assert pipe._remove_padding(torch.tensor([0, 0])).tolist() == [0]

    class Tokenizer:
        pad_token_id = eos_token_id = 2

    pipe.target_tokenizer = Tokenizer()
    assert pipe._remove_padding(torch.tensor([0, 7, 5, 2, 2, 2])).tolist() == [0, 7, 5, 2]


def test_ids_of_beams_end_where_they_end_alone(families):
    made = pipeline("text2text-generation", model=families["bart"], tokenizer=tiny_pair().source, max_new_tokens=30)
    options = {"eos_token_id": [2, 7, 9], "num_return_sequences": 4, "length_penalty": -3.0, "return_tensors": True}
    assert made.model.generation_config.pad_token_id == 0
    together, alone = (
        [[result["generated_token_ids"].tolist() for result in results] for results in both]
        for both in (made(SOURCES, **options), [made(source, **options) for source in SOURCES])
    )
    assert together == alone and len({len(ids) for results in alone for ids in results}) > 1


def test_clean_up_reaches_the_tokenizer_of_the_targets(pipe, monkeypatch):
    calls = []
    decode = pipe.target_tokenizer.decode
    monkeypatch.setattr(
        pipe.target_tokenizer, "decode", lambda ids, **options: calls.append(options) or decode(ids, **options)
    )
    pipe(SOURCES[0])
    pipe(SOURCES[0], clean_up_tokenization_spaces=True)
    assert [options["clean_up_tokenization_spaces"] for options in calls] == [False, True]
    assert all(options["skip_special_tokens"] for options in calls)


def test_truncation_cuts_at_the_length_of_the_tokenizer(generators, tmp_path):
    generators[True].tokenizers.save_pretrained(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path, model_max_length=5)
    made = pipeline("translation", model=generators[True].model, tokenizer=tokenizer)
    whole, cut = made.preprocess(SOURCES[0]), made.preprocess(SOURCES[0], truncation=True)
    assert whole["input_ids"].shape[1] > 5 and cut["input_ids"].shape == (1, 5)
    assert cut["input_ids"][0, -1] == tokenizer.eos_token_id
    assert made(SOURCES[0], truncation=True) == made(SOURCES[0][:4]) != made(SOURCES[0])


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
