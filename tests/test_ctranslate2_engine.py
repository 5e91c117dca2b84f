"""The engine CTranslate2: a generator with it writes what one with torch does, and refuses by name what it cannot do."""

import builtins
import importlib
import json
import sys

import pytest

pytest.importorskip("ctranslate2")

import torch
from tiny_generator import SOURCES, TARGETS, save_generator, tiny_generator, tiny_pair
from tiny_models import tiny_model
from transformers import GenerationConfig, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from metaphrase.conversion.ctranslate2 import export_ctranslate2
from metaphrase.inference import Generator, cross_attention, decode
from metaphrase.inference import ctranslate2_options as options_module
from metaphrase.inference.ctranslate2_engine import CTranslate2Engine
from metaphrase.inference.ctranslate2_options import translate_options
from metaphrase.scripts import evaluate, generate

BEAMS = {"num_beams": 4, "num_return_sequences": 4, "early_stopping": True}
LENGTHS = (3, 17, 9, 1, 6, 12, 25, 2)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model in torch, the same in CTranslate2, and sources. The start token never comes up (see `translate_options`)."""
    pair = tiny_pair()
    model = tiny_model(
        position_embedding_type="rotary", logits_bias=True, tie_word_embeddings=False, **pair.config_fields()
    )
    with torch.no_grad():
        model.lm_head.bias[model.config.decoder_start_token_id] = -1e4
    model.generation_config.max_new_tokens = 15
    folder = tmp_path_factory.mktemp("engine")
    save_generator(Generator(model, pair), folder / "model")
    engine = CTranslate2Engine(export_ctranslate2(folder / "model", folder / "exported"), device="cpu")
    draw = torch.Generator().manual_seed(0)
    sources = [
        [*torch.randint(4, model.config.vocab_size, (length,), generator=draw).tolist(), 2] for length in LENGTHS
    ]
    return model, engine, sources


def assert_same_search(models, options, tolerance=1e-3):
    model, engine, sources = models
    expected = decode(model, sources, return_scores=True, **options)
    results = decode(engine, sources, return_scores=True, **options)
    assert [[h.ids for h in row] for row in results] == [[h.ids for h in row] for row in expected]
    assert [[h.is_finished for h in row] for row in results] == [[h.is_finished for h in row] for row in expected]
    for ours, theirs in zip(expected, results, strict=True):
        assert [h.score for h in theirs] == pytest.approx([h.score for h in ours], abs=tolerance)
    return expected


# the same search

SAME = {
    "greedy": {},
    "max_new_tokens": {"max_new_tokens": 4},
    "max_length": {"max_new_tokens": None, "max_length": 5},
    "max_length before the model's own": {"max_length": 5},
    "config": {"generation_config": GenerationConfig(num_beams=3, early_stopping=True, max_length=6)},
    "no limit": {"max_new_tokens": None},
    "min_length": {"min_length": 7},
    "min_new_tokens": {"min_new_tokens": 7},
    "min_new_tokens with beams": {**BEAMS, "min_new_tokens": 7, "renormalize_logits": True},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "no_repeat_ngram_size with beams": {**BEAMS, "no_repeat_ngram_size": 2, "renormalize_logits": True},
    "forced_bos_token_id": {"forced_bos_token_id": 9},
    "forced_bos_token_id with beams": {**BEAMS, "forced_bos_token_id": 9},
    "another end": {"eos_token_id": 7},
    "several ends": {"eos_token_id": [2, 5, 9]},
    "beams": BEAMS,
    "wide beams": {**BEAMS, "num_beams": 7},
    "one of the beams": {**BEAMS, "num_return_sequences": 1},
    "length_penalty 2": {**BEAMS, "length_penalty": 2.0},
    "length_penalty 0": {**BEAMS, "length_penalty": 0.0},
    "length_penalty -1": {**BEAMS, "length_penalty": -1.0},
    "to the end": {**BEAMS, "early_stopping": "never"},
    "to the end, length_penalty -1": {**BEAMS, "early_stopping": "never", "length_penalty": -1.0},
    "as long as it helps, length_penalty 0": {**BEAMS, "early_stopping": False, "length_penalty": 0.0},
    "as long as it helps, length_penalty -1": {**BEAMS, "early_stopping": False, "length_penalty": -1.0},
    "options of sampling without it": {"temperature": 0.5, "top_k": 3, "top_p": 0.5},
    "options in effect neutral": {"typical_p": 1.0, "encoder_repetition_penalty": 1.0, "bad_words_ids": None},
}


@pytest.mark.parametrize("name", SAME)
def test_same_search(name, models):
    assert_same_search(models, SAME[name])


@pytest.mark.parametrize(
    "name", ["min_new_tokens", "repetition_penalty", "no_repeat_ngram_size", "forced_bos_token_id", "another end"]
)
def test_the_options_change_something(name, models):
    model, _, sources = models
    assert decode(model, sources, **SAME[name]) != decode(model, sources)


@pytest.mark.parametrize("first, other", [("beams", "to the end"), ("length_penalty 0", "length_penalty 2")])
def test_the_ways_to_stop_differ(first, other, models):
    model, _, sources = models
    assert decode(model, sources, **SAME[first]) != decode(model, sources, **SAME[other])


def test_the_models_own_settings_are_used_and_come_second(models):
    model, engine, _ = models
    own = {"num_beams": 4, "early_stopping": True, "length_penalty": 2.0, "max_new_tokens": 6}
    for config in (model.generation_config, engine.generation_config):
        config.update(**own)
    try:
        assert_same_search(models, {})
        assert_same_search(models, {"num_beams": 1, "max_new_tokens": 9})
    finally:
        for config in (model.generation_config, engine.generation_config):
            config.update(num_beams=None, early_stopping=None, length_penalty=None, max_new_tokens=15)


def test_unset_early_stopping_is_told_and_is_true(models, caplog):
    _, engine, sources = models
    options = {name: value for name, value in BEAMS.items() if name != "early_stopping"}
    assert decode(engine, sources, **options) == decode(engine, sources, **BEAMS)
    assert "`early_stopping` is not set" in caplog.text
    caplog.clear()
    decode(engine, sources, **BEAMS)
    decode(engine, sources)
    assert not caplog.text


def test_scores_only_if_asked_for(models):
    _, engine, sources = models
    assert all(h.score is None for row in decode(engine, sources, **BEAMS) for h in row)


def test_sources_in_batches_are_as_alone(models):
    _, engine, sources = models
    whole = decode(engine, sources, return_scores=True, **BEAMS)
    alone = decode(engine, sources, return_scores=True, batch_size=1, **BEAMS)
    assert [[h.ids for h in row] for row in whole] == [[h.ids for h in row] for row in alone]


def test_long_sources_are_read_to_their_end(models):
    """By itself CTranslate2 reads no further than 1024 tokens."""
    model, engine, sources = models
    long = [sources[1][:-1] * 70 + ending for ending in ([2], [5, 6, 7, 2])]
    assert len(long[0]) > 1024
    options = {"max_new_tokens": 4, "return_scores": True}
    expected, results = decode(model, long, **options), decode(engine, long, **options)
    assert [[h.ids for h in row] for row in results] == [[h.ids for h in row] for row in expected]
    for ours, theirs in zip(expected, results, strict=True):
        assert theirs[0].score == pytest.approx(ours[0].score, abs=2e-3)
    assert abs(expected[0][0].score - expected[1][0].score) > 0.01


# refusals

REFUSED = {
    "`bad_words_ids` \\[\\[3\\]\\]": {"bad_words_ids": [[3]]},
    "`encoder_no_repeat_ngram_size` 2": {"encoder_no_repeat_ngram_size": 2},
    "`encoder_repetition_penalty` 2": {"encoder_repetition_penalty": 2.0},
    "`exponential_decay_length_penalty`": {"exponential_decay_length_penalty": (3, 1.1)},
    "`forced_eos_token_id` 2": {"forced_eos_token_id": 2},
    "`begin_suppress_tokens` \\[3\\]": {"begin_suppress_tokens": [3]},
    "`suppress_tokens` \\[3\\]": {"suppress_tokens": [3]},
    "`sequence_bias`": {"sequence_bias": [[[3], 1.0]]},
    "`guidance_scale` 2": {"guidance_scale": 2.0},
    "`penalty_alpha` 0.6": {"penalty_alpha": 0.6},
    "`num_beam_groups` 2": {"num_beams": 2, "num_beam_groups": 2},
    "`max_time` 1": {"max_time": 1.0},
    "`stop_strings` 'a'": {"stop_strings": "a"},
    "`typical_p` 0.5": {"do_sample": True, "typical_p": 0.5},
    "`min_p` 0.5": {"do_sample": True, "min_p": 0.5},
    "`epsilon_cutoff` 0.1": {"do_sample": True, "epsilon_cutoff": 0.1},
    "`eta_cutoff` 0.1": {"do_sample": True, "eta_cutoff": 0.1},
    "`logits_processor` ": {"logits_processor": [1]},
    "`do_sample` must be False with `num_beams` 2": {"do_sample": True, "num_beams": 2},
    "`num_beams` must be at least 1, got 0": {"num_beams": 0},
    "`num_return_sequences` must be at least 1, got 0": {"num_return_sequences": 0},
    "`num_return_sequences` must be at most `num_beams` \\(1\\)": {"num_return_sequences": 2},
    "`max_new_tokens` must be at least 1, got 0": {"max_new_tokens": 0},
    "`max_length` must be at least 2": {"max_new_tokens": None, "max_length": 1},
    "fewest tokens of a target must not be above the most, got 9 and 8": {"min_new_tokens": 9, "max_new_tokens": 8},
    "`repetition_penalty` must be at least 1 .*got 0.5": {"repetition_penalty": 0.5},
    "`repetition_penalty` must be 1 with `num_beams` 4": {**BEAMS, "repetition_penalty": 2.0},
    "`min_length` is 7 and `num_beams` 4: `renormalize_logits` True": {**BEAMS, "min_length": 7},
    "`min_new_tokens` is 7 and `num_beams` 4: `renormalize_logits` True": {**BEAMS, "min_new_tokens": 7},
    "`no_repeat_ngram_size` is 2 and `num_beams` 4": {**BEAMS, "no_repeat_ngram_size": 2},
    "`early_stopping` must be True or 'never' .*got False and 1.0": {**BEAMS, "early_stopping": False},
    "`eos_token_id` must be one id with `num_beams`": {**BEAMS, "eos_token_id": [2, 3]},
    "`eos_token_id` must be ids from 0 to .*got -1": {"eos_token_id": -1},
    "`decoder_start_token_id` must be 1 .*got 5": {"decoder_start_token_id": 5},
    "`forced_bos_token_id` must be an id from 0": {"forced_bos_token_id": 1000},
    "`temperature` must be above 0": {"do_sample": True, "temperature": 0.0},
    "`top_p` must be above 0": {"do_sample": True, "top_p": 0.0},
    "`top_k` must be at least 0": {"do_sample": True, "top_k": -1},
    "Scores of sampled targets": {"do_sample": True, "temperature": 2.0},
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
        with pytest.raises(ValueError, match=f"CTranslate2 cannot do .*`{name}` 'odd'"):
            translate_options(
                GenerationConfig(eos_token_id=2), {name: "odd", "do_sample": True}, vocab_size=9, return_scores=False
            )


def test_an_exponent_of_zero_is_no_leave_to_stop_early():
    """With exactly 0 CTranslate2 stops at the first end of its best beam, with fewer to choose from."""
    given = BEAMS | {"length_penalty": 0.0, "eos_token_id": 2}
    search = translate_options(GenerationConfig(), given, vocab_size=9, return_scores=False)
    assert 0 < search.options["length_penalty"] < 1e-20 and search.options["patience"] == 1


def test_an_id_that_no_source_has_is_refused(models):
    model, engine, _ = models
    with pytest.raises(ValueError, match="`sources` must consist of ids from 0 to"):
        decode(engine, [[5, model.config.vocab_size]])


# sampling


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0, "top_k": 0},
        {"temperature": 2.0, "top_k": 5, "top_p": 0.6},
        {"temperature": 0.5, "top_k": 0, "top_p": 0.7},
        {"temperature": 3.0},
    ],
)
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
    counts = torch.zeros(model.config.vocab_size)
    for row in drawn:
        for hypothesis in row:
            counts[hypothesis.ids[0]] += 1
    scores = TemperatureLogitsWarper(options["temperature"])(None, model.lm_head.bias.detach()[None])
    if top_k := options.get("top_k", 50):
        scores = TopKLogitsWarper(top_k)(None, scores)
    if "top_p" in options:
        scores = TopPLogitsWarper(options["top_p"])(None, scores)
    expected = scores.softmax(-1)[0]
    assert not counts[expected == 0].any()
    assert (counts / counts.sum() - expected).abs().sum() / 2 < 0.05


def test_sampling_follows_the_seed_of_torch(models):
    _, engine, sources = models
    samples = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        samples.append(decode(engine, sources, do_sample=True, temperature=2.0))
        samples.append(decode(engine, sources, do_sample=True, temperature=2.0))
    assert samples[0] == samples[2] != samples[4]
    assert samples[1] == samples[3] != samples[0]


def test_scores_of_samples_are_sums_of_log_probabilities(models):
    model, engine, sources = models
    [[sample], *_] = decode(engine, sources, do_sample=True, top_k=0, return_scores=True)
    ids = torch.tensor([[model.config.decoder_start_token_id, *sample.ids]])
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(sources[:1]), decoder_input_ids=ids[:, :-1]).logits
    chosen = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])
    assert sample.score == pytest.approx(float(chosen.sum()), abs=1e-3)


# generators


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Of a model and of its export, by whether it has one tokenizer."""
    folder, made = tmp_path_factory.mktemp("generators"), {}
    for is_joint in (True, False):
        source = save_generator(tiny_generator(is_joint), folder / f"model_{is_joint}")
        made[is_joint] = source, export_ctranslate2(source, folder / f"exported_{is_joint}")
    return made


@pytest.mark.parametrize("is_joint", [True, False])
@pytest.mark.parametrize("is_exported", [True, False])
def test_generator_writes_the_same(is_joint, is_exported, folders):
    ours = tiny_generator(is_joint, source_prefix="a ")
    theirs = Generator.from_pretrained(
        folders[is_joint][is_exported], engine="ctranslate2", device="cpu", source_prefix="a "
    )
    texts = [SOURCES[0], "", *SOURCES]
    assert theirs.generate(texts) == ours.generate(texts)
    assert theirs.num_unfinished == ours.num_unfinished
    expected, results = (generator.generate_n_best(texts, **BEAMS) for generator in (ours, theirs))
    assert [[c.text for c in row] for row in results] == [[c.text for c in row] for row in expected]
    for row, scored in zip(expected, results, strict=True):
        assert [c.score for c in scored] == pytest.approx([c.score for c in row], abs=1e-3)
    stream = theirs.generate_stream(texts, window=2, return_scores=False)
    assert [row[0].text for row in stream] == ours.generate(texts)


def test_the_converted_copy_lasts_as_long_as_the_generator(folders):
    generator = Generator.from_pretrained(folders[True][0], engine="ctranslate2", device="cpu")
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
    generator = Generator.from_pretrained(folders[True][1], engine="ctranslate2", device="cpu", dtype=dtype)
    assert generator.model.translator.compute_type == compute_type
    assert all(generator.generate(SOURCES))


@pytest.mark.parametrize("dtype", ["float64", "int4"])
def test_unknown_types_are_refused(dtype, folders):
    with pytest.raises(ValueError, match="ompute type"):
        Generator.from_pretrained(folders[True][1], engine="ctranslate2", device="cpu", dtype=dtype)


@pytest.mark.parametrize(
    ("device", "message"),
    [("foo", "one that torch knows"), ("mps", "cpu or, of .* GPUs that CTranslate2"), ("cuda:99", "got 'cuda:99'")],
)
def test_devices_that_are_not_there_are_refused_before_loading(device, message):
    with pytest.raises(ValueError, match=f"`device` must be .*{message}"):
        Generator.from_pretrained("no/such/model", engine="ctranslate2", device=device)


def test_unknown_engines_are_refused(folders):
    with pytest.raises(ValueError, match="`engine` must be one of torch, ctranslate2, got 'onnx'"):
        Generator.from_pretrained(folders[True][0], engine="onnx")


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must hold model\.bin"):
        CTranslate2Engine(tmp_path)


def test_without_generation_settings_the_special_tokens_are_those_of_the_folder(folders, tmp_path):
    folder = export_ctranslate2(folders[True][0], tmp_path / "exported")
    (folder / "generation_config.json").unlink()
    generator = Generator.from_pretrained(folder, engine="ctranslate2", device="cpu")
    assert generator.generate(SOURCES, max_new_tokens=8) == tiny_generator().generate(SOURCES)


def test_a_start_that_changes_is_given_with_each_call(tmp_path):
    """As mBART's, whose decoder starts with the code of a language."""
    generator = tiny_generator()
    generator.model.config.decoder_start_from_labels = True
    folder = export_ctranslate2(save_generator(generator, tmp_path / "model"), tmp_path / "exported")
    assert json.loads((folder / "config.json").read_text())["decoder_start_token"] is None
    theirs = Generator.from_pretrained(folder, engine="ctranslate2", device="cpu")
    for options in ({}, {"decoder_start_token_id": 7}, {"decoder_start_token_id": 7, "forced_bos_token_id": 9}):
        for beams in ({}, {"num_beams": 4, "early_stopping": True}):
            assert theirs.generate(SOURCES, **options, **beams) == generator.generate(SOURCES, **options, **beams)


def test_what_needs_a_model_in_torch_is_refused(folders):
    generator = Generator.from_pretrained(folders[True][1], engine="ctranslate2", device="cpu")
    with pytest.raises(ValueError, match="`generator` must run in torch for that, got a CTranslate2Engine"):
        cross_attention(generator, SOURCES[0])
    with pytest.raises(ValueError, match="`generator` must run in torch for that"):
        generator.score(SOURCES[:1], SOURCES[:1])
    with pytest.raises(ValueError, match="`engine` must be torch for an ensemble, got 'ctranslate2'"):
        Generator.from_pretrained([folders[True][1]] * 2, engine="ctranslate2")


def test_evaluation_by_command_line_is_without_a_loss(folders, tmp_path):
    source, target, output = tmp_path / "source", tmp_path / "target", tmp_path / "metrics.json"
    source.write_text("\n".join(SOURCES) + "\n", encoding="utf-8")
    target.write_text("\n".join(TARGETS) + "\n", encoding="utf-8")
    words = ["--source", str(source), "--target", str(target), "--output", str(output), "--num_beams", "3"]
    results = []
    for more in ([], ["--engine", "ctranslate2", "--dtype", "float32"]):
        evaluate.main([str(folders[True][0]), "--device", "cpu", "--early_stopping", *words, *more])
        results.append(json.loads(output.read_text(encoding="utf-8")))
    ours, theirs = results
    assert ours["loss"] > 0 and "loss" not in theirs
    assert theirs["scores"] == ours["scores"] and theirs["num_unfinished"] == ours["num_unfinished"]
    assert ours["inference"] == {"engine": "torch", "dtype": "auto", "models": 1}
    assert theirs["inference"] == {"engine": "ctranslate2", "dtype": "float32", "models": 1}


def test_generate_by_command_line(folders, tmp_path):
    source = tmp_path / "source"
    source.write_text("\n".join(SOURCES) + "\n", encoding="utf-8")
    written = []
    for index, words in enumerate(([], ["--engine", "ctranslate2"], ["--engine", "ctranslate2", "--dtype", "float32"])):
        output = tmp_path / f"output_{index}"
        folder = folders[True][1 if index == 2 else 0]
        words = [*words, "--device", "cpu", "--num_beams", "3", "--early_stopping"]
        generate.main([str(folder), "--input", str(source), "--output", str(output), *words])
        written.append(output.read_text(encoding="utf-8"))
    assert written[0] == written[1] == written[2] and written[0].strip()


@pytest.mark.parametrize("name", ["metaphrase.inference.ctranslate2_engine", "metaphrase.conversion.ctranslate2_spec"])
def test_versions_with_wrong_results_are_refused(name, monkeypatch):
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("ctranslate2.__version__", "4.8.4")
    with pytest.raises(ImportError, match=r"must be at least 4\.8\.5, got 4\.8\.4"):
        importlib.import_module(name)


def test_without_the_package_the_error_says_what_to_install(folders, monkeypatch):
    for name in list(sys.modules):
        if name.split(".")[0] == "ctranslate2" or name.startswith(
            ("metaphrase.inference.ctr", "metaphrase.conversion.ctr")
        ):
            monkeypatch.delitem(sys.modules, name)
    whole = builtins.__import__

    def absent(name, *args, **kwargs):
        if name.split(".")[0] == "ctranslate2":
            raise ModuleNotFoundError("No module named 'ctranslate2'")
        return whole(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    from metaphrase.scripts import export

    for call in (
        lambda: Generator.from_pretrained(folders[True][0], engine="ctranslate2"),
        lambda: export.main([str(folders[True][0]), "out", "--format", "ctranslate2"]),
    ):
        with pytest.raises(ImportError, match=r"pip install metaphrase\[ctranslate2\]"):
            call()
