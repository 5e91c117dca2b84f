"""Tests of `engine="auto"`: same tokens as torch in float32, the engine of each call, and copies in the cache."""

import itertools
import logging
import random
import sys
import tempfile

import pytest
import torch
from converted_models import bart_like
from tiny_generator import SOURCES, save_generator, tiny_generator, tiny_pair
from tiny_models import tiny_model

from metaphrase.engines import engine_choice
from metaphrase.engines.engine_choice import EngineChoice
from metaphrase.inference import Generator

pytest.importorskip("ctranslate2")

BEAMS = {"num_beams": 4, "early_stopping": True}
TEXTS = [" ".join(words) for words in itertools.product(["a small dog", "the cat", "two dogs"], SOURCES)]


@pytest.fixture(autouse=True)
def copies(tmp_path_factory, monkeypatch):
    """An empty folder for temporary copies, and no least number of sentences."""
    folder = tmp_path_factory.mktemp("copies")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(engine_choice, "MIN_SENTENCES", 1)
    return folder


@pytest.fixture
def lines(caplog):
    """A function that returns the logged lines on engines, and forgets them."""
    caplog.set_level(logging.INFO)

    def take():
        messages = [message for message in caplog.messages if message.startswith("Engine:")]
        caplog.clear()
        return messages

    return take


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_generator(tiny_generator(), tmp_path_factory.mktemp("engine_choice") / "model")


COPIED = {
    "greedy": {"max_new_tokens": 9},
    "several ends": {"eos_token_id": [2, 5, 9], "min_new_tokens": 3},
    "tokens": {"forced_bos_token_id": 9, "bad_words_ids": [[5], [8, 9], [2]], "suppress_tokens": [5, 6, 7]},
    "wide beams": {**BEAMS, "num_beams": 9, "length_penalty": 0.0},
    "beams": BEAMS
    | {"length_penalty": -1.0, "min_length": 7, "bad_words_ids": [[5], [8, 9]], "renormalize_logits": True},
}
IN_TORCH = [{"do_sample": True}, {"num_beams": 4, "early_stopping": "never"}, {"num_beams": 4}]
IN_TORCH += [{"no_repeat_ngram_size": 2}, {"repetition_penalty": 1.5}, {"bad_words_ids": [[1, 5]]}]
IN_TORCH += [{"must_contain": ["a"], "num_beams": 3}, {"decoder_start_token_id": 7}, {"forced_eos_token_id": 2}]
IN_TORCH += [BEAMS | {"min_length": 7}, BEAMS | {"forced_bos_token_id": 9}]
IN_TORCH += [BEAMS | {"no_repeat_ngram_size": 2, "renormalize_logits": True}]
IN_COPY = "Engine: CTranslate2 (faster for this model and search)"


def compare(folder, options, **loading):
    """Check that both engines write the same, also an n-best list, and return the generator with `auto`."""
    auto, ours = (Generator.from_pretrained(folder, device="cpu", engine=name, **loading) for name in ("auto", "torch"))
    results = []
    for generator in (auto, ours):
        torch.manual_seed(0)
        results.append([generator.generate(TEXTS, **options), generator.num_unfinished])
        if options.get("num_beams", 1) > 1:
            rows = generator.generate_n_best(TEXTS, return_scores=False, num_return_sequences=3, **options)
            results[-1].append([[candidate.text for candidate in row] for row in rows])
    assert results[0] == results[1]
    return auto


@pytest.mark.parametrize("name", COPIED)
def test_the_copy_writes_what_torch_writes(name, folder, lines, copies):
    compare(folder, COPIED[name])
    assert not list(copies.iterdir())
    assert lines() == [IN_COPY]


def test_torch_runs_searches_in_which_tokens_could_differ(folder, lines, copies):
    for options in IN_TORCH:
        Generator.from_pretrained(folder, device="cpu").generate(SOURCES[:1], **options)
        [line] = lines()
        assert line.startswith("Engine: torch (")
    assert not list(copies.iterdir())


DESIGNS = {
    "learned": {"position_embedding_type": "learned", "embedding_norm": True, "norm_position": "post"},
    "relative": {"position_embedding_type": "relative", "gated_mlp": False},
    "rotary": {"position_embedding_type": "rotary", "norm_type": "rmsnorm", "num_key_value_heads": 2},
    "sinusoidal": {"position_embedding_type": "sinusoidal", "logits_bias": True, "tie_word_embeddings": False},
}


@pytest.mark.parametrize("design", DESIGNS)
def test_designs_and_weights_in_half_precision(design, tmp_path, lines):
    is_joint = design != "rotary"
    pair = tiny_pair(is_joint)
    model = tiny_model(share_embeddings=is_joint, **DESIGNS[design], **pair.config_fields())
    model.generation_config.max_new_tokens = 12
    folder = save_generator(Generator(model.to(torch.bfloat16), pair), tmp_path / "model")
    for options in ({}, BEAMS):
        compare(folder, options, dtype="float32")
    assert set(lines()) == {IN_COPY}


def test_streams_and_scores(folder, lines):
    auto, ours = (Generator.from_pretrained(folder, device="cpu", engine=name) for name in ("auto", "torch"))
    texts = [*TEXTS, "", " "]
    stream = auto.generate_stream(texts, chunk_size=4, return_scores=False, **BEAMS)
    expected = ours.generate(texts, **BEAMS)
    assert [row[0].text for row in stream] == expected
    assert lines() == [IN_COPY]
    # Scores come from torch, so that their digits do not depend on the packages that are installed.
    assert auto.generate_n_best(texts, **BEAMS) == ours.generate_n_best(texts, **BEAMS)
    assert lines() == ["Engine: torch (scores of CTranslate2 differ in the last digits)"]


def test_in_int8_the_same_engine_writes_a_text_however_it_is_called(folder, lines, monkeypatch):
    monkeypatch.setattr(engine_choice, "MIN_SENTENCES", 64)
    generator = Generator.from_pretrained(folder, device="cpu", dtype="int8")
    expected = [row[0] for row in generator.generate_n_best(TEXTS, num_return_sequences=1, **BEAMS)]
    assert generator.generate(TEXTS, **BEAMS) == [candidate.text for candidate in expected]
    assert [generator.generate([text], **BEAMS)[0] for text in TEXTS] == [candidate.text for candidate in expected]
    assert all(candidate.score < 0 for candidate in expected)
    assert lines() == [IN_COPY]


def test_few_sentences_run_in_torch_until_many_have_come(folder, lines, monkeypatch):
    monkeypatch.setattr(engine_choice, "MIN_SENTENCES", 8)
    in_torch = "Engine: torch (fewer than 8 sentences do not pay for loading CTranslate2)"
    generator = Generator.from_pretrained(folder, device="cpu")
    generator.generate(TEXTS[:5])
    assert lines() == [in_torch]
    generator.generate(TEXTS[:3])
    generator.generate(TEXTS[:1])
    assert lines() == [IN_COPY]
    # The engine of a chunk does not depend on the chunks before it, so that a resumed run repeats it.
    for texts, first_chunk, expected in ((TEXTS[:4], 0, in_torch), (TEXTS[:4], 3, IN_COPY), (TEXTS[:8], 0, IN_COPY)):
        generator = Generator.from_pretrained(folder, device="cpu")
        list(generator.generate_stream(texts, chunk_size=8, first_chunk=first_chunk, return_scores=False))
        assert lines() == [expected]


def test_models_that_cannot_have_a_copy(lines, tmp_path, monkeypatch):
    pair, generator = tiny_pair(), tiny_generator()

    def first_line(model, quantization=None):
        EngineChoice(model, pair, quantization).choose(model, {}, [[5, 2]], batch_size=1, return_scores=False)
        return lines()[0]

    alibi = tiny_model(position_embedding_type="alibi", **pair.config_fields())
    assert "CTranslate2 cannot express `position_embedding_type` 'alibi'" in first_line(alibi)
    bart = bart_like("bart", random.Random(0))
    assert "Metaphrase models only" in first_line(bart)
    assert "not used in bfloat16 on cpu" in first_line(tiny_generator().model.to(torch.bfloat16))
    assert "not used in float16 on cpu" in first_line(generator.model, "float16")
    for owner, name, value, message in (
        (engine_choice, "free_main_memory", lambda: 100, "a copy needs 0 MiB of memory, and 0 MiB are free"),
        (tempfile, "tempdir", str(tmp_path / "missing"), "[Errno"),
        (engine_choice, "is_faster", lambda *_: False, "torch (faster for "),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, value)
            assert message in first_line(generator.model)


def test_texts_beyond_the_positions_run_in_torch(tmp_path, lines):
    pair = tiny_pair()
    model = tiny_model(position_embedding_type="learned", max_position_embeddings=24, **pair.config_fields())
    folder = save_generator(Generator(model, pair), tmp_path / "model")
    generator = Generator.from_pretrained(folder, device="cpu")
    generator.generate(SOURCES[:2], max_new_tokens=23)
    assert lines() == [IN_COPY]
    generator.generate(SOURCES[:2], max_new_tokens=24, eos_token_id=[2, *range(4, 20)])
    assert lines() == ["Engine: torch (the positions of CTranslate2 end at 24, and the longest text may have 25)"]
    model = tiny_model(position_embedding_type="sinusoidal", **pair.config_fields())
    assert EngineChoice(model, pair).choose(model, {}, [[5] * 5000], batch_size=1, return_scores=False) is model
    assert "end at 4096, and the longest text may have 5000" in lines()[0]


def test_without_the_package_torch_runs(folder, lines, monkeypatch):
    for name in list(sys.modules):
        if name.startswith(("ctranslate2.", "metaphrase.conversion.ctr")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    assert all(Generator.from_pretrained(folder, device="cpu").generate(TEXTS))
    assert lines() == ["Engine: torch (CTranslate2 is not installed: pip install metaphrase[ctranslate2])"]


def test_settings_and_weights_that_change_after_loading_are_noticed(folder, lines):
    generator = Generator.from_pretrained(folder, device="cpu")
    generator.generate(TEXTS)
    generator.model.generation_config.max_new_tokens = 3
    other = Generator(generator.model, generator.tokenizers)
    assert generator.generate(TEXTS) == other.generate(TEXTS)
    assert set(lines()) == {IN_COPY}
    with torch.no_grad():
        generator.model.lm_head.weight.add_(torch.randn_like(generator.model.lm_head.weight))
    assert generator.generate(TEXTS) == other.generate(TEXTS)
    assert lines() == ["Engine: torch (the weights have changed since CTranslate2 loaded them)"]
    generator.members = (other,)
    generator.generate(TEXTS)
    assert lines() == ["Engine: torch (CTranslate2 takes one model at a time)"]
