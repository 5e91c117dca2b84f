"""Generators with a vocabulary map: both engines select from the permitted tokens, by the union of a batch."""

from pathlib import Path

import pytest
from subcommands import execute
from tiny_generator import SOURCES, TARGETS, save_generator, tiny_generator, tiny_pair

from metaphrase.conversion.vocabulary_map import VocabularyMap, find_vocabulary_map, load_vocabulary_map
from metaphrase.engines import engine_choice
from metaphrase.inference import Generator
from metaphrase.scripts import generate
from metaphrase.scripts.__main__ import run
from metaphrase.storage.folders import VOCABULARY_MAP_NAME

BEAMS = {"num_beams": 4, "early_stopping": True}
PAIRS = list(zip(SOURCES, TARGETS, strict=True)) * 3


@pytest.fixture(scope="module", params=[True, False], ids=["joint", "separate"])
def folder(request, tmp_path_factory):
    """A model whose map the command has made."""
    path = save_generator(tiny_generator(request.param, kind="byte_bpe"), tmp_path_factory.mktemp("map") / "model")
    pairs = path.parent / "pairs.tsv"
    pairs.write_text("".join(f"{source}\t{target}\n" for source, target in PAIRS), encoding="utf-8")
    execute("shortlist", [str(path), str(pairs), "--num_per_token", "3", "--num_frequent", "5"])
    return path


def decoded(generator, **options):
    return [row[0].ids for row in generator.generate_ids(SOURCES, **options)]


def assert_permitted(rows, permitted):
    assert {token for row in rows for token in row} <= set(permitted.tolist())


@pytest.mark.parametrize("options", [{"num_beams": 1}, BEAMS])
@pytest.mark.parametrize("batch_size", [1, 64])
def test_targets_hold_tokens_that_a_batch_permits(folder, batch_size, options):
    generator = Generator.from_pretrained(folder, engine="torch", use_vmap=True, batch_size=batch_size)
    vocabulary_map, rows = generator.vocabulary_map, decoded(generator, **options)
    sources = generator.encode(SOURCES)
    permitted = vocabulary_map.permitted(sources)
    assert_permitted(rows, permitted)
    assert len(permitted) < len(generator.tokenizers.target)
    if batch_size == 1:
        for source, row in zip(sources, rows, strict=True):
            assert_permitted([row], vocabulary_map.permitted([source]))
    generator.vocabulary_map = None
    assert decoded(generator, **options) != rows


@pytest.mark.parametrize("options", [{"num_beams": 1}, BEAMS])
def test_ctranslate2_writes_the_tokens_of_torch(folder, options, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    pytest.importorskip("ctranslate2")
    from metaphrase.conversion.ctranslate2 import export_ctranslate2

    monkeypatch.setattr(engine_choice, "MIN_SENTENCES", 1)
    loading = {"use_vmap": True, "batch_size": 2}
    expected = decoded(Generator.from_pretrained(folder, engine="torch", **loading), **options)
    exported = export_ctranslate2(folder, tmp_path / "exported")
    assert (exported / VOCABULARY_MAP_NAME).read_bytes() == (folder / VOCABULARY_MAP_NAME).read_bytes()
    for name, engine in ((exported, "ctranslate2"), (folder, "ctranslate2"), (folder, "auto")):
        generator = Generator.from_pretrained(name, engine=engine, **loading)
        assert decoded(generator, **options) == expected
    assert "Engine: CTranslate2" in caplog.text
    # A copy without the map stands beside it.
    assert decoded(Generator.from_pretrained(folder, batch_size=2), **options) != expected


def test_other_searches_select_from_all_tokens_and_quantized_models_have_lists_too(folder, monkeypatch):
    plain, generator = (Generator.from_pretrained(folder, engine="torch", use_vmap=use) for use in (False, True))
    options = {"must_contain": ["Katze"], "num_beams": 2}
    assert generator.generate(SOURCES, **options) == plain.generate(SOURCES, **options)
    monkeypatch.setattr("metaphrase.decoding.quantization._LEAST_SIZE", 64)
    generator = Generator.from_pretrained(folder, engine="torch", dtype="int8", use_vmap=True)
    permitted = generator.vocabulary_map.permitted(generator.encode(SOURCES))
    for do_sample in (False, True):
        assert_permitted(decoded(generator, do_sample=do_sample), permitted)


def test_command_line(folder, files, tmp_path, capsys):
    output, use = tmp_path / "targets.txt", ["--engine", "torch", "--use_vmap"]
    execute(generate, [str(folder), "--input", files[0], "--output", str(output), *use])
    expected = Generator.from_pretrained(folder, engine="torch", use_vmap=True).generate(SOURCES)
    assert output.read_text(encoding="utf-8").split("\n")[:-1] == expected
    made = (folder / VOCABULARY_MAP_NAME).read_bytes()
    sides = [tmp_path / "pairs.source", tmp_path / "pairs.target"]
    for path, name in zip(sides, files, strict=True):
        path.write_bytes(Path(name).read_bytes() * 3)
    words = [str(folder), *map(str, sides), "--num_per_token", "3", "--num_frequent", "5"]
    assert run("shortlist", words) == 2
    assert "`model` must have no vmap.txt" in capsys.readouterr().err
    execute("shortlist", [*words, "--overwrite"])
    assert (folder / VOCABULARY_MAP_NAME).read_bytes() == made
    for mistake, message in (
        ([str(tmp_path / "none"), str(sides[0])], "`model` must be a folder that exists"),
        ([str(folder), *map(str, [*sides, *sides])], "`pairs` must be one file, or two parallel files, got 4."),
    ):
        assert run("shortlist", [*mistake, "--overwrite"]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(ValueError, match="`use_vmap` need one model"):
        Generator.from_pretrained([folder, folder], use_vmap=True)


@pytest.mark.parametrize("is_joint", [True, False])
def test_map_permits_the_tokens_of_all_sources(is_joint, tmp_path):
    pair = tiny_pair(is_joint, kind="byte_bpe")
    made = VocabularyMap([9, 2, 1], {5: [7, 30], 6: [30, 12], 8: []})
    made.save(tmp_path / VOCABULARY_MAP_NAME, pair)
    for vocabulary_map in (made, load_vocabulary_map(tmp_path, pair)):
        assert vocabulary_map.permitted([[5, 100, 2], [6, 8]]).tolist() == [1, 2, 7, 9, 12, 30]
        assert vocabulary_map.permitted([[100]]).tolist() == [1, 2, 9]
    first, second, *_ = (tmp_path / VOCABULARY_MAP_NAME).read_text(encoding="utf-8").split("\n")
    names = pair.target.convert_ids_to_tokens
    assert first == "\t" + " ".join(names([1, 2, 9]))
    assert second == pair.source.convert_ids_to_tokens(5) + "\t" + " ".join(names([7, 30]))


def test_mistakes_of_a_map(tmp_path):
    pair = tiny_pair(kind="byte_bpe")
    assert find_vocabulary_map(tmp_path) is None
    with pytest.raises(ValueError, match=r"`use_vmap` needs a model with vmap\.txt, got '.*' without\. Make"):
        load_vocabulary_map(tmp_path, pair)
    (tmp_path / VOCABULARY_MAP_NAME).write_text("\ta b\nc\ta of_another_model\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"vmap\.txt must be a map of the model's own tokens.* 'of_another_model'"):
        load_vocabulary_map(tmp_path, pair)
    # This tokenizer has a token for the space.
    with pytest.raises(ValueError, match=r"vmap\.txt needs tokens without white space, got ' '"):
        VocabularyMap([1], {}).save(tmp_path / VOCABULARY_MAP_NAME, tiny_pair())
