"""Source limits: a source that is too long for its model is named before anything is computed."""

import pytest
from pipeline_models import family_model
from tiny_generator import SOURCES, save_generator, tiny_pair
from tiny_models import tiny_model

from metaphrase.inference import Generator, GeneratorPool, cross_attentions
from metaphrase.inference.source_limits import TooLongError, source_limit
from metaphrase.scripts import attention, generate
from metaphrase.scripts.console import run

LONG = "a dog " * 30
TEXTS = [*SOURCES[:2], "", "the cat", LONG, "a cat"]


@pytest.fixture(params=["bart", "learned"])
def generator(request):
    fields = tiny_pair().config_fields()
    learned = {"position_embedding_type": "learned", "max_position_embeddings": 64}
    model = family_model("bart") if request.param == "bart" else tiny_model(**fields, **learned)
    model.generation_config.max_new_tokens = 4
    return Generator(model, tiny_pair())


@pytest.mark.parametrize(("name", "limit"), [("bart", 64), ("t5", None)])
def test_limits_of_families(name, limit):
    assert source_limit(family_model(name)) == limit


def test_a_metaphrase_model_without_a_table_has_none():
    assert source_limit(tiny_model(**tiny_pair().config_fields())) is None


def test_a_source_may_be_as_long_as_the_table(generator):
    [length] = map(len, generator.encode(["a" * 63]))
    assert length == 64
    generator.generate(["a" * 63])
    with pytest.raises(TooLongError, match="than the model has positions, 64, got 65 in number 1 "):
        generator.generate(["a" * 64])


def test_what_is_too_long_is_numbered_among_all(generator):
    message = r"has positions, 64, got 181 in number 5 \(in a file: line 5\)"
    with pytest.raises(ValueError, match=message):
        generator.generate(TEXTS)
    for options in ({}, {"risk": {"num_candidates": 2}}):
        stream = generator.generate_stream(iter(TEXTS), window=2, **options)
        assert len([next(stream) for _ in range(4)]) == 4
        with pytest.raises(ValueError, match=message):
            next(stream)
    with pytest.raises(ValueError, match="number 15 "):
        next(generator.generate_stream(iter(TEXTS), window=10, first_window=1))


def test_attention_names_what_is_too_long(generator):
    for targets in (None, ["a", "a"]):
        with pytest.raises(ValueError, match="got 181 in number 2 "):
            cross_attentions(generator, ["a cat", LONG], targets)


def test_the_command_names_the_line_among_empty_ones(generator, tmp_path, capsys):
    folder, source, output = str(save_generator(generator, tmp_path / "model")), tmp_path / "in", tmp_path / "out"
    source.write_text("".join(f"{text}\n" for text in TEXTS), encoding="utf-8")
    output.write_text("older\n", encoding="utf-8")
    words = [folder, "--device", "cpu", "--input", str(source), "--output", str(output)]
    for verb, more in ((generate, []), (attention, ["--format", "pharaoh"]), (attention, ["--format", "html"])):
        assert run(verb.main, "verb", [*words, *more]) == 2
        assert "got 181 in number 5 (in a file: line 5)" in capsys.readouterr().err
    assert output.read_text(encoding="utf-8") == "older\n"


def test_another_process_names_it_too(tmp_path):
    learned = {"position_embedding_type": "learned", "max_position_embeddings": 64}
    model = tiny_model(**tiny_pair().config_fields(), **learned)
    folder = save_generator(Generator(model, tiny_pair()), tmp_path)
    pool = GeneratorPool(folder, num_processes=1, device="cpu")
    with pool, pytest.raises(TooLongError, match="got 181 in number 5 "):
        list(pool.generate_stream(iter(TEXTS), window=2, max_new_tokens=2))
