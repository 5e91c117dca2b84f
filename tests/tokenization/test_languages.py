"""Tests of multilingual models: language codes around a text, and the start of decoding."""

import json

import pytest
import torch
from converted_models import bart_like, draw
from tiny_generator import tiny_pair
from tiny_languages import CODES, MAKERS
from verbs import execute

from metaphrase.conversion import convert
from metaphrase.inference import Generator
from metaphrase.scripts import evaluate, generate, train
from metaphrase.scripts.__main__ import run
from metaphrase.tokenization import TokenizerPair, set_languages


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


def test_codes_stand_where_the_family_has_them(converted):
    name, folder, _, tokenizer = converted
    pair, (english, german, _) = TokenizerPair.from_pretrained(folder), CODES[name]
    assert type(pair.source) is type(tokenizer)
    options = set_languages(pair, english, german)
    ids = dict(zip(CODES[name], pair.source.convert_tokens_to_ids(CODES[name]), strict=True))
    [source], [target] = pair.encode_sources(["the cat"]), pair.encode_targets(["die"])
    if name == "nllb":
        assert source[0] == ids[english] and target[0] == ids[german] and source[-1] == target[-1] == 2
        assert options == {"forced_bos_token_id": ids[german]}
    else:
        assert source[-2:] == [2, ids[english]] and target[-2:] == [2, ids[german]]
        assert options == {"decoder_start_token_id": ids[german]}
    assert set_languages(pair, source_lang=german) == {}
    assert pair.encode_sources(["the cat"])[0][0 if name == "nllb" else -1] == ids[german]


def test_targets_without_a_language_of_their_own_are_told_of_once(converted, caplog):
    name, folder, _, _ = converted
    pair, (english, german, _) = TokenizerPair.from_pretrained(folder), CODES[name]
    set_languages(pair, source_lang=english)
    for _ in range(2):
        pair.encode_targets(["die"])
    assert caplog.text.count(f"targets get the language code of the sources, {english}.") == 1
    caplog.clear()
    pair = TokenizerPair.from_pretrained(folder)
    set_languages(pair, english, german)
    pair.encode_targets(["die"])
    assert not caplog.text


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


def test_command_line_takes_languages(converted, tmp_path, capsys):
    name, folder, _, _ = converted
    english, german, _ = CODES[name]
    (tmp_path / "in").write_text("the cat\n", encoding="utf-8")
    options = ["--device", "cpu", "--source_lang", english, "--target_lang", german, "--max_new_tokens", "5"]
    execute(generate, [str(folder), "--input", str(tmp_path / "in"), *options])
    assert len(capsys.readouterr().out.splitlines()) == 1
    source = ["--source", str(tmp_path / "in"), "--target", str(tmp_path / "in"), "--output", str(tmp_path / "m.json")]
    execute(evaluate, [str(folder), *source, *options])
    assert (tmp_path / "m.json").is_file()
    assert run("generate", [str(folder), *options[:-2], "--target_lang", "xx_XX"]) == 2
    assert "`target_lang` must be a language that the" in capsys.readouterr().err


def test_recipe_fine_tunes_in_a_language(converted, tmp_path):
    name, folder, _, _ = converted
    english, german, _ = CODES[name]
    for split in ("train", "test"):
        (tmp_path / f"{split}.tsv").write_text("the cat\tdie cat\na dolphin\tin dolphin\n" * 4, encoding="utf-8")
    words = ["--data_dir", str(tmp_path), "--output_dir", str(tmp_path / "run"), "--model_name_or_path", str(folder)]
    words += ["--train_file", "train.tsv", "--test_file", "test.tsv", "--max_steps", "2", "--use_cpu", "--disable_tqdm"]
    words += ["--generation_max_length", "8", "--source_lang", english, "--target_lang", german]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("per_device_train_batch_size: 4\nsave_strategy: no\n", encoding="utf-8")
    execute(train, [str(recipe), *words])
    written = json.loads((tmp_path / "run" / "generation_config.json").read_text(encoding="utf-8"))
    pair = TokenizerPair.from_pretrained(tmp_path / "run")
    code = pair.target.convert_tokens_to_ids(german)
    assert written["forced_bos_token_id" if name == "nllb" else "decoder_start_token_id"] == code
    # The folder of the run translates without being told again.
    [source], [target] = pair.encode_sources(["the cat"]), pair.encode_targets(["die cat"])
    assert pair.source.convert_tokens_to_ids(english) in source and code in target


def test_tokenizer_without_languages_refuses_them():
    with pytest.raises(ValueError, match=r"`source_lang` must be left out for a .*, which has no languages, got 'en'"):
        set_languages(tiny_pair(), source_lang="en")
    assert set_languages(tiny_pair()) == {}


@pytest.mark.parametrize("field", ["source_lang", "target_lang"])
def test_piece_of_a_word_is_no_language(converted, field):
    """ISO codes, as NLLB and mBART do not have them, are often pieces of their vocabularies."""
    _, folder, _, _ = converted
    pair = TokenizerPair.from_pretrained(folder)
    assert pair.source.convert_tokens_to_ids("a") != pair.source.unk_token_id
    before = pair.encode_sources(["the cat"]), pair.encode_targets(["die"])
    with pytest.raises(ValueError, match=rf"`{field}` must be a language that the .* knows, got 'a'"):
        set_languages(pair, **{field: "a"})
    assert (pair.encode_sources(["the cat"]), pair.encode_targets(["die"])) == before
