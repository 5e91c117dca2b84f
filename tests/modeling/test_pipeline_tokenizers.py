"""Tokenizers of pipelines: one, or one for each side, and those of many languages."""

import warnings

import pytest
from converted_models import bart_like, draw
from pipeline_models import texts_of
from tiny_generator import SOURCES, save_generator, tiny_pair
from tiny_languages import CODES, MAKERS
from transformers import PreTrainedTokenizerFast, pipeline

from metaphrase.conversion import convert
from metaphrase.inference import Generator
from metaphrase.modeling import pipeline_support as pipeline_tokenizers
from metaphrase.tokenization import TokenizerPair, tokenizer_pair


def test_pair_and_single_tokenizers_can_be_given(generators, model_folders):
    generator = generators[False]
    expected = [{"translation_text": text} for text in generator.generate(SOURCES, num_beams=4)]
    pair = generator.tokenizers
    for parts in (
        {"tokenizer": pair},
        {"tokenizer": pair.source, "target_tokenizer": pair.target},
        {"tokenizer": pair.source, "target_tokenizer": str(model_folders[False] / "target_tokenizer")},
        {"tokenizer": str(model_folders[False])},
    ):
        made = pipeline("translation", model=generator.model, **parts)
        assert made(SOURCES) == expected
    assert pipeline("translation", model=generator.model, tokenizer=pair.source)(SOURCES) != expected


def test_missing_tokenizer_of_the_targets_is_an_error(generators, tmp_path):
    folder = save_generator(generators[False], tmp_path / "model")
    (folder / "target_tokenizer").rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="`target_tokenizer` must be given if the tokenizer of the targets is not in"):
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
    assert made._pop_language({"forced_bos_token_id": [7, 7]}) == {field: 7}
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
