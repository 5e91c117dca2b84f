"""The engine CTranslate2: a generator with it writes what one with torch does, and refuses by name what it cannot do."""

import json

import pytest

pytest.importorskip("ctranslate2")

import torch
from subcommands import execute
from tiny_generator import SOURCES, save_generator, tiny_generator, tiny_pair
from tiny_models import tiny_model
from transformers import GenerationConfig, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from metaphrase.conversion.ctranslate2 import export_ctranslate2
from metaphrase.engines import ctranslate2_engine as options_module
from metaphrase.engines.ctranslate2_engine import CTranslate2Engine, translate_options
from metaphrase.inference import Generator, cross_attention, decode
from metaphrase.scripts import evaluate

BEAMS = {"num_beams": 4, "num_return_sequences": 4, "early_stopping": True}
LENGTHS = (3, 17, 9, 1, 6, 12, 25, 2)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model in torch, the same in CTranslate2, and sources. The start token never comes up (see `translate_options`)."""
    pair = tiny_pair()
    fields = {"position_embedding_type": "rotary", "logits_bias": True, "tie_word_embeddings": False}
    model = tiny_model(**fields, **pair.config_fields())
    with torch.no_grad():
        model.lm_head.bias[model.config.decoder_start_token_id] = -1e4
    model.generation_config.max_new_tokens = 15
    folder = tmp_path_factory.mktemp("engine")
    save_generator(Generator(model, pair), folder / "model")
    engine = CTranslate2Engine(export_ctranslate2(folder / "model", folder / "exported"), device="cpu")
    draw = torch.Generator().manual_seed(0)
    size = model.config.vocab_size
    sources = [[*torch.randint(4, size, (length,), generator=draw).tolist(), 2] for length in LENGTHS]
    return model, engine, sources


def assert_same_search(models, options, tolerance=1e-3):
    model, engine, sources = models
    expected, results = (decode(network, sources, return_scores=True, **options) for network in (model, engine))
    for ours, theirs in zip(expected, results, strict=True):
        assert [(h.ids, h.is_finished) for h in theirs] == [(h.ids, h.is_finished) for h in ours]
        assert [h.score for h in theirs] == pytest.approx([h.score for h in ours], abs=tolerance)
    return expected


SAME = {
    "greedy": {},
    "max_length before the model's own": {"max_length": 5},
    "config": {"generation_config": GenerationConfig(num_beams=3, early_stopping=True, max_length=6)},
    "no limit": {"max_new_tokens": None},
    "min_length": {"min_length": 7},
    "min_new_tokens": {"min_new_tokens": 7},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "forced_bos_token_id": {"forced_bos_token_id": 9},
    "bad_words_ids": {"bad_words_ids": [[5], [6], [7], [8, 9], [9, 8], [2]]},
    "suppress_tokens": {"suppress_tokens": [5, 6, 7, 8]},
    "another end": {"eos_token_id": 7},
    "several ends": {"eos_token_id": [2, 5, 9]},
    "beams": BEAMS,
    "one of many beams": {**BEAMS, "num_beams": 7, "num_return_sequences": 1},
    "beams with a first token": {**BEAMS, "forced_bos_token_id": 9},
    "beams without tokens": BEAMS
    | {"min_new_tokens": 7, "no_repeat_ngram_size": 2, "bad_words_ids": [[5], [8, 9]], "renormalize_logits": True},
    "length_penalty 2": {**BEAMS, "length_penalty": 2.0},
    "length_penalty 0": {**BEAMS, "length_penalty": 0.0},
    "to the end": {**BEAMS, "early_stopping": "never"},
    "to the end, length_penalty -1": {**BEAMS, "early_stopping": "never", "length_penalty": -1.0},
    "as long as it helps, length_penalty 0": {**BEAMS, "early_stopping": False, "length_penalty": 0.0},
    "options without effect": {"temperature": 0.5, "top_k": 3, "typical_p": 1.0, "bad_words_ids": None},
}


@pytest.mark.parametrize("name", SAME)
def test_same_search(name, models):
    assert_same_search(models, SAME[name])


def test_the_models_own_settings_are_used_and_come_second(models, monkeypatch):
    model, engine, _ = models
    own = {"num_beams": 4, "early_stopping": True, "length_penalty": 2.0, "max_new_tokens": 6}
    for network in (model, engine):
        config = GenerationConfig.from_dict(network.generation_config.to_dict())
        config.update(**own)
        monkeypatch.setattr(network, "generation_config", config)
    assert_same_search(models, {})
    assert_same_search(models, {"num_beams": 1, "max_new_tokens": 9})


def test_longer_sources_have_longer_limits_as_in_torch(models, monkeypatch):
    own = {"usual_source_length": 5, "max_length_limit": 40, "max_length": 6, "max_new_tokens": None}
    for network in models[:2]:
        config = GenerationConfig.from_dict(network.generation_config.to_dict() | own | {"_from_model_config": None})
        monkeypatch.setattr(network, "generation_config", config)
    for options in ({}, BEAMS):
        lengths = {len(best.ids) for best, *_ in assert_same_search(models, options)}
        assert max(lengths) > 11


def test_unset_early_stopping_is_told_and_is_true(models, caplog):
    _, engine, sources = models
    options = {name: value for name, value in BEAMS.items() if name != "early_stopping"}
    assert decode(engine, sources, **options) == decode(engine, sources, **BEAMS)
    assert "`early_stopping` is not set" in caplog.text
    caplog.clear()
    decode(engine, sources, **BEAMS)
    decode(engine, sources)
    assert not caplog.text


def test_a_target_that_meets_the_limit_ends_as_it_must(models):
    model, engine, sources = models
    options = {"max_new_tokens": 4, "forced_eos_token_id": 2}
    expected, forced = ([h for [h] in decode(network, sources, **options)] for network in (model, engine))
    assert [(h.ids, h.is_finished) for h in forced] == [(h.ids, h.is_finished) for h in expected]
    assert forced != [h for [h] in decode(engine, sources, max_new_tokens=4)]
    hypotheses = [h for row in decode(engine, sources, **BEAMS, **options) for h in row]
    assert all(h.ids[-1] == 2 and len(h.ids) <= 4 for h in hypotheses)
    assert any(not h.is_finished for h in hypotheses)


def test_long_sources_are_read_to_their_end(models):
    """By itself CTranslate2 reads no further than 1024 tokens."""
    model, engine, sources = models
    long = [sources[1][:-1] * 70 + ending for ending in ([2], [5, 6, 7, 2])]
    assert len(long[0]) > 1024
    expected = assert_same_search((model, engine, long), {"max_new_tokens": 4}, tolerance=2e-3)
    assert abs(expected[0][0].score - expected[1][0].score) > 0.01


REFUSED = {
    "`renormalize_logits` must be True with `num_beams` 4 and bad_words_ids": {**BEAMS, "bad_words_ids": [[3]]},
    "`renormalize_logits` must be True with `num_beams` 4 and min_length": {**BEAMS, "min_length": 7},
    "`encoder_no_repeat_ngram_size` 2": {"encoder_no_repeat_ngram_size": 2},
    "`exponential_decay_length_penalty`": {"exponential_decay_length_penalty": (3, 1.1)},
    "`forced_eos_token_id` must be one of `eos_token_id` .*got 3": {"forced_eos_token_id": 3},
    "`logits_processor` ": {"logits_processor": [1]},
    "`do_sample` must be False with `num_beams` 2": {"do_sample": True, "num_beams": 2},
    "`num_return_sequences` must be at most `num_beams` \\(1\\)": {"num_return_sequences": 2},
    "`max_new_tokens` must be at least 1 and the fewest tokens, 9, .*got 8": {"min_new_tokens": 9, "max_new_tokens": 8},
    "`repetition_penalty` must be at least 1 .*got 0.5": {"repetition_penalty": 0.5},
    "`repetition_penalty` must be 1 with `num_beams` 4": {**BEAMS, "repetition_penalty": 2.0},
    "`early_stopping` must be True or 'never' .* 1.0 .*got False": {**BEAMS, "early_stopping": False},
    "`eos_token_id` must be one id with `num_beams`": {**BEAMS, "eos_token_id": [2, 3]},
    "`eos_token_id` must be ids from 0 to .*got -1": {"eos_token_id": -1},
    "`decoder_start_token_id` must be that of .*got 5": {"decoder_start_token_id": 5},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_it_cannot_do_is_refused_by_name(message, models):
    _, engine, sources = models
    with pytest.raises(ValueError, match=message):
        decode(engine, sources, return_scores=True, **REFUSED[message])


def test_every_setting_of_transformers_is_understood_or_refused_or_has_no_effect():
    """A value that none has must not pass unnoticed."""
    for name in vars(GenerationConfig()):
        if name.startswith("_") or name in options_module._UNDERSTOOD | options_module._WITHOUT_EFFECT:
            continue
        with pytest.raises(ValueError, match=f"CTranslate2 does not support .*`{name}` 'odd'"):
            translate_options(GenerationConfig(eos_token_id=2), {name: "odd", "do_sample": True}, vocab_size=9)


@pytest.mark.parametrize("options", [{"temperature": 2.0, "top_k": 5, "top_p": 0.6}, {"temperature": 3.0}])
def test_samples_are_drawn_from_the_distribution_of_transformers(options, tmp_path):
    """A model that always says the same: what it draws, many times, shows from which distribution."""
    generator = tiny_generator()
    pair = generator.tokenizers
    model = tiny_model(logits_bias=True, tie_word_embeddings=False, decoder_layers=1, **pair.config_fields())
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.bias.mul_(5)
    folder = save_generator(Generator(model, pair), tmp_path / "model")
    engine = CTranslate2Engine.from_pretrained(folder, device="cpu")
    drawn = decode(engine, [[5, 2]] * 100, do_sample=True, num_return_sequences=30, max_new_tokens=1, **options)
    first_ids = torch.tensor([hypothesis.ids[0] for row in drawn for hypothesis in row])
    counts = first_ids.bincount(minlength=model.config.vocab_size)
    scores = TemperatureLogitsWarper(options["temperature"])(None, model.lm_head.bias.detach()[None])
    scores = TopKLogitsWarper(options.get("top_k", 50))(None, scores)
    expected = TopPLogitsWarper(options.get("top_p", 1.0))(None, scores).softmax(-1)[0]
    assert not counts[expected == 0].any()
    assert (counts / counts.sum() - expected).abs().sum() / 2 < 0.05


def test_sampling_follows_the_seed_of_torch(models):
    _, engine, sources = models
    samples = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        samples.append([decode(engine, sources, do_sample=True, temperature=2.0) for _ in range(2)])
    assert samples[0] == samples[1] != samples[2] and samples[0][0] != samples[0][1]


@pytest.mark.parametrize("options", [{"top_k": 0}, {"temperature": 2.0, "top_k": 5, "top_p": 0.7}], ids=str)
def test_scores_of_samples_are_log_probabilities_under_the_model(models, options):
    model, engine, sources = models
    [[sample], *_] = decode(engine, sources, do_sample=True, return_scores=True, **options)
    ids = torch.tensor([[model.config.decoder_start_token_id, *sample.ids]])
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(sources[:1]), decoder_input_ids=ids[:, :-1]).logits
    chosen = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])
    assert sample.score == pytest.approx(float(chosen.sum()), abs=1e-3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model and its export, with one tokenizer or with two."""
    folder, made = tmp_path_factory.mktemp("generators"), {}
    for is_joint in (True, False):
        source = save_generator(tiny_generator(is_joint), folder / f"model_{is_joint}")
        made[is_joint] = source, export_ctranslate2(source, folder / f"exported_{is_joint}")
    return made


def load(folder, **options):
    return Generator.from_pretrained(folder, engine="ctranslate2", device="cpu", **options)


@pytest.mark.parametrize("is_joint", [True, False])
@pytest.mark.parametrize("is_exported", [True, False])
def test_generator_writes_the_same(is_joint, is_exported, folders):
    ours = tiny_generator(is_joint, source_prefix="a ")
    theirs = load(folders[is_joint][is_exported], source_prefix="a ")
    texts = [SOURCES[0], "", *SOURCES]
    assert theirs.generate(texts) == ours.generate(texts)
    assert theirs.num_unfinished == ours.num_unfinished
    expected, results = (generator.generate_n_best(texts, **BEAMS) for generator in (ours, theirs))
    assert [[c.text for c in row] for row in results] == [[c.text for c in row] for row in expected]
    for row, scored in zip(expected, results, strict=True):
        assert [c.score for c in scored] == pytest.approx([c.score for c in row], abs=1e-3)
    stream = theirs.generate_stream(texts, chunk_size=2, return_scores=False)
    assert [row[0].text for row in stream] == ours.generate(texts)


def test_the_converted_copy_lasts_as_long_as_the_generator(folders):
    generator = load(folders[True][0])
    copy = generator.model.folder
    assert copy.is_dir() and copy != folders[True][0]
    # It is loaded anew to sample.
    assert len(generator.generate(SOURCES, do_sample=True)) == len(SOURCES)
    del generator
    assert not copy.exists()


@pytest.mark.parametrize(
    ("dtype", "compute_type"),
    [("auto", "float32"), ("int8", "int8_float32"), ("float32", "float32"), (torch.float32, "float32")],
)
def test_type_of_the_weights(dtype, compute_type, folders):
    generator = load(folders[True][1], dtype=dtype)
    assert generator.model.translator.compute_type == compute_type
    assert all(generator.generate(SOURCES))


def test_folders_types_and_devices_that_cannot_be_loaded(folders, tmp_path):
    with pytest.raises(ValueError, match="ompute type"):
        load(folders[True][1], dtype="int4")
    for path, device in ((tmp_path, "cpu"), (folders[True][1], "cuda:99"), (folders[True][1], "foo")):
        with pytest.raises(ValueError, match=r"cannot load|device"):
            CTranslate2Engine(path, device=device)


def test_a_start_that_changes_is_given_with_each_call(tmp_path):
    """A tokenizer like mBART's, whose decoder starts with the code of a language."""
    generator = tiny_generator()
    generator.model.config.decoder_start_from_labels = True
    folder = export_ctranslate2(save_generator(generator, tmp_path / "model"), tmp_path / "exported")
    assert json.loads((folder / "config.json").read_text())["decoder_start_token"] is None
    theirs = load(folder)
    for options in ({}, {"decoder_start_token_id": 7}, {"decoder_start_token_id": 7, "forced_bos_token_id": 9}):
        for beams in ({}, {"num_beams": 4, "early_stopping": True}):
            assert theirs.generate(SOURCES, **options, **beams) == generator.generate(SOURCES, **options, **beams)


def test_what_needs_a_model_in_torch_is_refused(folders):
    generator = load(folders[True][1])
    for call in (generator.score, lambda sources, targets: cross_attention(generator, sources[0])):
        with pytest.raises(ValueError, match="`generator` must be a single torch model here, got CTranslate2Engine"):
            call(SOURCES[:1], SOURCES[:1])
    with pytest.raises(ValueError, match="ctranslate2 and `use_vmap` need one model"):
        Generator.from_pretrained([folders[True][1]] * 2, engine="ctranslate2")


def test_evaluation_by_command_line_is_without_a_loss(folders, files, tmp_path):
    output = tmp_path / "metrics.json"
    words = ["--source", files[0], "--target", files[1], "--output", str(output), "--num_beams", "3"]
    results = []
    for more in ([], ["--engine", "ctranslate2", "--dtype", "float32"]):
        execute(evaluate, [str(folders[True][0]), "--device", "cpu", *words, *more])
        results.append(json.loads(output.read_text(encoding="utf-8")))
    ours, theirs = results
    assert ours["loss"] > 0 and "loss" not in theirs
    assert theirs["scores"] == ours["scores"] and theirs["num_unfinished"] == ours["num_unfinished"]
    assert theirs["inference"] == {"engine": "ctranslate2", "dtype": "float32", "models": 1}
