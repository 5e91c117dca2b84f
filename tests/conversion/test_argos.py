"""Tests of packages for Argos Translate: its own steps must write what `Generator` writes."""

import json
import os
import subprocess
import sys
import zipfile

import pytest

pytest.importorskip("ctranslate2")

import ctranslate2
from subcommands import execute
from tiny_generator import save_generator, tiny_generator, tiny_pair
from tiny_models import tiny_model

from metaphrase.conversion.ctranslate2 import export_argos, sentencepiece_model
from metaphrase.demo.corpus import make_demo_corpus
from metaphrase.inference import Generator
from metaphrase.tokenization import TokenizerPair

CORPUS = make_demo_corpus(num_train=600, num_validation=200, num_test=20)
LANGUAGES = {"source_language": ("en", "English"), "target_language": ("de", "German")}
# A folder with the files of the package argostranslate, which is not needed for anything else.
ARGOS_PATH = os.environ.get("ARGOSTRANSLATE_PATH")


@pytest.fixture(scope="module")
def generator():
    sources, targets = zip(*CORPUS["train"], strict=True)
    pair = TokenizerPair.train(sources, targets, kind="unigram", vocab_size=400, show_progress=False)
    model = tiny_model(max_position_embeddings=256, **pair.config_fields())
    model.generation_config.max_new_tokens = 8
    return Generator(model, pair)


@pytest.fixture(scope="module")
def package(generator, tmp_path_factory):
    """The unpacked package of a model."""
    folder = tmp_path_factory.mktemp("argos")
    save_generator(generator, folder / "model")
    words = (
        f"{folder / 'model'} {folder / 'en_de.argosmodel'} --format argos --source_lang EN-US --target_lang deu_Latn"
    )
    execute("export", words.split())
    with zipfile.ZipFile(folder / "en_de.argosmodel") as file:
        file.extractall(folder / "packages")
    assert {path.name for path in folder.iterdir()} == {"model", "packages", "en_de.argosmodel"}
    [package] = (folder / "packages").iterdir()
    return package


def test_package_has_the_files_that_argos_reads(package):
    metadata = json.loads((package / "metadata.json").read_text(encoding="utf-8"))
    expected = {"from_code": "en", "from_name": "English", "to_code": "de", "to_name": "German", "type": "translate"}
    assert expected.items() <= metadata.items() and package.name == "translate-en_de"
    assert (package / "README.md").is_file() and (package / "model" / "model.bin").is_file()


def test_sentencepiece_splits_as_the_tokenizer(generator):
    sentencepiece = pytest.importorskip("sentencepiece")
    processor = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model(generator.tokenizers))
    texts = [text for pair in CORPUS["validation"] for text in pair]
    texts += [
        "",
        "two  spaces ",
        "中文 text 中",
        "under_score ▁ mark",
        "naïve ﬁ",
        "tab\tx",
        "non\u00a0breaking",
        "😀😀",
    ]
    expected = [ids[:-1] for ids in generator.tokenizers.encode_sources(texts)]
    assert processor.encode(texts) == expected
    tokenizer = generator.tokenizers.target
    assert processor.decode(expected[:400]) == tokenizer.batch_decode(expected[:400], skip_special_tokens=True)


@pytest.mark.parametrize("num_beams", [1, 4])
def test_steps_of_argos_write_the_same_targets(num_beams, generator, package):
    sentencepiece = pytest.importorskip("sentencepiece")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(package / "sentencepiece.model"))
    translator = ctranslate2.Translator(str(package / "model"))
    sources = [source for source, _ in CORPUS["validation"][:20]]
    rows = translator.translate_batch(
        processor.encode(sources, out_type=str), beam_size=num_beams, length_penalty=0.2, max_decoding_length=8
    )
    options = {"num_beams": num_beams, "early_stopping": num_beams > 1, "length_penalty": 0.2}
    targets = generator.generate(sources, **options)
    assert [processor.decode_pieces(row.hypotheses[0]) for row in rows] == targets
    assert len({*targets}) > 4


@pytest.mark.skipif(not ARGOS_PATH, reason="ARGOSTRANSLATE_PATH names no folder with the package argostranslate")
@pytest.mark.slow
def test_argos_reads_the_package(generator, package, tmp_path):
    text = CORPUS["validation"][0][0]
    code = (
        "import sys, pathlib; from argostranslate import package\n"
        "[found] = package.get_installed_packages([pathlib.Path(sys.argv[1])])\n"
        "print(found, found.from_code, found.to_code, found.type, *found.tokenizer.encode(sys.argv[2]))"
    )
    environment = os.environ | {"PYTHONPATH": ARGOS_PATH, "HOME": str(tmp_path), "PYTHONIOENCODING": "utf-8"}
    environment |= dict.fromkeys(("XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"), str(tmp_path))
    result = subprocess.run(
        [sys.executable, "-c", code, str(package.parent), text], env=environment, capture_output=True, encoding="utf-8"
    )
    assert result.returncode == 0, result.stderr
    pieces = generator.tokenizers.source.tokenize(text)
    assert result.stdout.split() == ["English", "→", "German", "en", "de", "translate", *pieces]


def test_what_argos_cannot_express_is_refused(generator, tmp_path):
    for pair, kind in ((tiny_pair(kind="byte_bpe"), "BPE"), (tiny_pair(joint=False, kind="unigram"), "two tokenizers")):
        with pytest.raises(ValueError, match=f"one tokenizer of the kind unigram .*, got {kind}"):
            sentencepiece_model(pair)
    save_generator(tiny_generator(), tmp_path / "model")
    (tmp_path / "b.argosmodel").touch()
    for name, languages, match in (
        ("out", {}, r"must be a file that ends in \.argosmodel"),
        ("a.argosmodel", {}, "BPE"),
        ("b.argosmodel", {}, "`output` must not exist"),
        ("c.argosmodel", {"target_language": ("../x", "X")}, r"must have two or three letters, .* got '\.\./x'"),
    ):
        with pytest.raises(ValueError, match=match):
            export_argos(tmp_path / "model", tmp_path / name, **LANGUAGES | languages)
    words = [str(tmp_path / "model"), str(tmp_path / "c.argosmodel"), "--format", "argos", "--source_lang", "en"]
    with pytest.raises(ValueError, match="`--target_lang` must be given with --format argos"):
        execute("export", words)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "b.argosmodel"}
