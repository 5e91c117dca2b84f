import json

import pytest
import torch
from converted_models import bart_like, draw
from sentencepiece_models import train_model, write_marian_tokenizer
from tiny_generator import SOURCES, TARGETS, tiny_pair
from tiny_languages import CODES, MAKERS
from transformers import M2M100Tokenizer, MarianTokenizer, pipeline

from metaphrase.conversion import convert
from metaphrase.evaluation.evaluate import evaluate_generator
from metaphrase.inference import Generator, cross_attention
from metaphrase.tokenization import TokenizerPair, set_languages
from metaphrase.training.experiment import Experiment
from metaphrase.training.recipe.recipe import load_recipe


@pytest.fixture(scope="module", params=list(MAKERS))
def converted(request, tmp_path_factory):
    """The name, a converted model with its tokenizer in a folder, and their own model and tokenizer."""
    family, make = MAKERS[request.param]
    tokenizer = make()
    theirs = bart_like(family, draw(family, 200), vocab_size=len(tokenizer), max_position_embeddings=40).eval()
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder / "theirs")
    tokenizer.save_pretrained(folder / "theirs")
    convert(folder / "theirs", folder / "ours")
    return request.param, folder / "ours", theirs, tokenizer


def test_codes_stand_where_the_family_has_them(converted, caplog):
    name, folder, _, tokenizer = converted
    pair, (english, german, _) = TokenizerPair.from_pretrained(folder), CODES[name]
    assert type(pair.source) is type(tokenizer)
    set_languages(pair, source_lang=english)
    pair.encode_targets(["die"])
    assert f"targets get the language code of the sources, {english}." in caplog.text
    options = set_languages(pair, english, german)
    caplog.clear()
    ids = dict(zip(CODES[name], pair.source.convert_tokens_to_ids(CODES[name]), strict=True))
    [source], [target] = pair.encode_sources(["the cat"]), pair.encode_targets(["die"])
    assert not caplog.text
    if name == "nllb":
        assert source[0] == ids[english] and target[0] == ids[german] and source[-1] == target[-1] == 2
        assert options == {"forced_bos_token_id": ids[german]}
    else:
        assert source[-2:] == [2, ids[english]] and target[-2:] == [2, ids[german]]
        assert options == {"decoder_start_token_id": ids[german]}
    assert set_languages(pair, source_lang=german) == {}
    assert pair.encode_sources(["the cat"])[0][0 if name == "nllb" else -1] == ids[german]
    before = pair.encode_sources(["the cat"]), pair.encode_targets(["die"])
    assert pair.source.convert_tokens_to_ids("a") != pair.source.unk_token_id
    for field in ("source_lang", "target_lang"):
        with pytest.raises(ValueError, match=rf"`{field}` must be a language that the .* knows, got 'a'"):
            set_languages(pair, **{field: "a"})
    assert (pair.encode_sources(["the cat"]), pair.encode_targets(["die"])) == before


def test_generation_starts_with_the_language_as_in_their_class(converted):
    name, folder, theirs, _ = converted
    english, german, romanian = CODES[name]
    texts = ["the cat", "no dolphin is here"]
    written = {}
    for language in (german, romanian):
        generator = Generator.from_pretrained(folder, device="cpu", source_lang=english, target_lang=language)
        written[language] = generator.generate(texts, num_beams=2, max_new_tokens=6, suppress_tokens=[1])
        pair = generator.tokenizers
        code = pair.target.convert_tokens_to_ids(language)
        start = {"forced_bos_token_id": code} if name == "nllb" else {"decoder_start_token_id": code}
        for text, mine in zip(texts, written[language], strict=True):
            ids = torch.tensor(pair.encode_sources([text]))
            expected = theirs.generate(
                ids, attention_mask=torch.ones_like(ids), num_beams=2, max_new_tokens=6, suppress_tokens=[1], **start
            )
            assert mine == pair.decode_targets(expected)[0]
    assert written[german] != written[romanian]


@pytest.mark.parametrize("converted", ["nllb"], indirect=True)
def test_recipe_fine_tunes_in_a_language(converted, tmp_path):
    name, folder, _, _ = converted
    english, german, _ = CODES[name]
    for split in ("train", "test"):
        (tmp_path / f"{split}.tsv").write_text("the cat\tdie cat\na dolphin\tin dolphin\n" * 4, encoding="utf-8")
    words = ["--data_dir", str(tmp_path), "--output_dir", str(tmp_path / "run"), "--model_name_or_path", str(folder)]
    words += ["--train_file", "train.tsv", "--test_file", "test.tsv", "--max_steps", "1", "--use_cpu", "--disable_tqdm"]
    words += ["--generation_max_length", "8", "--source_lang", english, "--target_lang", german]
    Experiment(load_recipe(None, [*words, "--per_device_train_batch_size", "4", "--save_strategy", "no"])).train()
    written = json.loads((tmp_path / "run" / "generation_config.json").read_text(encoding="utf-8"))
    pair = TokenizerPair.from_pretrained(tmp_path / "run")
    code = pair.target.convert_tokens_to_ids(german)
    assert written["forced_bos_token_id"] == code
    [source], [target] = pair.encode_sources(["the cat"]), pair.encode_targets(["die cat"])
    assert pair.source.convert_tokens_to_ids(english) in source and code in target


def test_tokenizer_without_languages_refuses_them():
    with pytest.raises(ValueError, match=r"`source_lang` must be left out for a .* without languages, got 'en'"):
        set_languages(tiny_pair(), source_lang="en")
    assert set_languages(tiny_pair()) == {}


@pytest.fixture
def opus_mt(tmp_path):
    """A folder as the OPUS-MT models have it, in which no class is named."""
    folder = tmp_path / "theirs"
    vocabulary = write_marian_tokenizer(folder, SOURCES, TARGETS)
    last = vocabulary["<pad>"]
    ids = {"pad_token_id": last, "decoder_start_token_id": last, "eos_token_id": 0, "forced_eos_token_id": 0}
    ids["max_position_embeddings"] = 64
    theirs = bart_like("marian", draw("marian", 300), vocab_size=len(vocabulary), tie_word_embeddings=True, **ids)
    theirs.save_pretrained(folder)
    return folder


def test_marian_tokenizer_comes_along(opus_mt, tmp_path):
    convert(opus_mt, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "again", to="marian")
    given = TokenizerPair.from_pretrained(opus_mt)
    assert type(given.source) is MarianTokenizer
    sources, targets = given.encode_sources(SOURCES), given.encode_targets(TARGETS)
    assert given.decode_targets(targets) == TARGETS and sources != targets
    for name in ("ours", "again"):
        pair = TokenizerPair.from_pretrained(tmp_path / name)
        assert type(pair.source) is MarianTokenizer
        assert pair.encode_sources(SOURCES) == sources and pair.encode_targets(TARGETS) == targets
        generator, options = Generator.from_pretrained(tmp_path / name, device="cpu"), {"max_new_tokens": 4}
        written = generator.generate(SOURCES, **options)
        piped = pipeline("translation", model=str(tmp_path / name))(SOURCES, **options)
        assert [result["translation_text"] for result in piped] == written


@pytest.fixture
def m2m_100(tmp_path):
    """The folder of a converted model of many languages, and the tokenizer that it was converted with."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    pieces = ["<s>", "<pad>", "</s>", "<unk>"]
    pieces += [piece for piece in train_model(SOURCES, folder / "sentencepiece.bpe.model") if piece not in pieces]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    tokenizer = M2M100Tokenizer(str(folder / "vocab.json"), str(folder / "sentencepiece.bpe.model"))
    # The codes have ids behind the vocabulary.
    size = max(tokenizer.lang_code_to_id.values()) + 1
    theirs = bart_like("m2m_100", draw("m2m_100", 300), vocab_size=size, max_position_embeddings=40)
    theirs.save_pretrained(folder)
    # Without a configuration of its own: the class is then known by the family alone.
    convert(folder, tmp_path / "ours")
    return tmp_path / "ours", tokenizer


def test_m2m_100_tokenizer_knows_its_languages(m2m_100):
    folder, tokenizer = m2m_100
    pair = TokenizerPair.from_pretrained(folder)
    assert type(pair.source) is M2M100Tokenizer
    options = set_languages(pair, "en", "de")
    english, german = tokenizer.get_lang_id("en"), tokenizer.get_lang_id("de")
    assert options == {"forced_bos_token_id": german}
    assert pair.encode_sources(["the dog"])[0][0] == english and pair.encode_targets(["der"])[0][0] == german
    generator = Generator.from_pretrained(folder, device="cpu", source_lang="en", target_lang="de")
    written = generator.generate(SOURCES, num_beams=2, max_new_tokens=4)
    piped = pipeline("translation_en_to_de", model=str(folder), num_beams=2, max_new_tokens=4)
    assert [result["translation_text"] for result in piped(SOURCES)] == written
    with pytest.raises(ValueError, match=r"`tgt_lang` must be a language that the .* knows, got 'd'"):
        piped(SOURCES, tgt_lang="d", src_lang="en")
    for code in ("d", "__de__", "xx"):
        with pytest.raises(ValueError, match=f"`source_lang` must be a language that the .* knows, got '{code}'"):
            set_languages(pair, source_lang=code)


def test_m2m_100_needs_the_language_of_targets_before_any_work(m2m_100, monkeypatch):
    generator = Generator.from_pretrained(m2m_100[0], device="cpu", source_lang="en")
    assert len(generator.generate(SOURCES, max_new_tokens=2)) == len(SOURCES)
    assert len(cross_attention(generator, SOURCES[0], max_new_tokens=2).target_tokens) == 2
    said = "`target_lang` must be given for a M2M100Tokenizer, which has many languages, got None"
    with pytest.raises(ValueError, match=said):
        generator.tokenizers.encode_targets(TARGETS)
    monkeypatch.setattr(Generator, "generate", lambda *arguments, **options: pytest.fail("sources were decoded"))
    with pytest.raises(ValueError, match=said):
        evaluate_generator(generator, SOURCES, TARGETS, metrics=["chrf"])
