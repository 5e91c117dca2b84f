"""Source limits: a source that is too long for its model is named before anything is computed."""

import copy
import json
from pathlib import Path

import pytest
from pipeline_models import family_model
from subcommands import execute
from tiny_generator import SOURCES, save_generator, tiny_generator, tiny_pair
from tiny_languages import mbart_tokenizer, nllb_tokenizer
from tiny_models import POSITIONS, tiny_model

from metaphrase.evaluation.evaluate import evaluate_generator
from metaphrase.inference import Generator, batches, cross_attentions
from metaphrase.inference.batches import TooLongError, longest_source, longest_target
from metaphrase.inference.generator import Plan
from metaphrase.scripts.__main__ import run
from metaphrase.tokenization import TokenizerPair

LONG = "a dog " * 30
TEXTS = [*SOURCES[:2], "", "the cat", LONG, "a cat"]
CUT = {"max_source_length": 6}


@pytest.fixture(params=["bart", "learned"])
def generator(request):
    fields = tiny_pair().config_fields()
    learned = {"position_embedding_type": "learned", "max_position_embeddings": 64}
    model = family_model("bart") if request.param == "bart" else tiny_model(**fields, **learned)
    model.generation_config.max_new_tokens = 4
    return Generator(model, tiny_pair())


def test_each_stack_has_its_limit():
    fields = {"position_embedding_type": "learned", "decoder_max_position_embeddings": 20}
    for model, limits in ((family_model("t5"), (None, None)), (tiny_model(**fields), (64, 20))):
        assert (longest_source(model), longest_target(model)) == limits


@pytest.mark.parametrize("positions", POSITIONS)
def test_a_source_beyond_the_positions_is_refused_or_cut_and_counted(positions, monkeypatch):
    fields = POSITIONS[positions] | {"max_position_embeddings": 20}
    model = tiny_model(**tiny_pair().config_fields() | fields)
    generator = Generator(model, tiny_pair(), max_tokens_per_batch=10)
    limit, message = 20, "than the model has positions, 20"
    if model.config.position_embedding_type == "relative":
        # T5 has no limit of its own. The memory for attention has one.
        monkeypatch.setattr(batches, "MAX_TOKENS_WITHOUT_POSITIONS", 30)
        limit, message = 30, "than `max_tokens_per_batch` or the default, 30"
    text = "a" * limit
    assert len(generator.generate([text[1:]], max_new_tokens=2)) == 1
    with pytest.raises(TooLongError, match=f"{message}, got {limit + 1} in number 1 "):
        generator.generate([text], max_new_tokens=2)
    bounded = Generator(model, tiny_pair(), max_source_length=limit)
    assert bounded.generate([text], max_new_tokens=2) == generator.generate([text[1:]], max_new_tokens=2)
    assert bounded.num_truncated == 1
    if limit == 30:
        generator.max_tokens_per_batch = limit + 1
        assert len(generator.generate([text], max_new_tokens=2)) == 1


def test_a_draft_model_with_fewer_positions_reads_the_beginning():
    fields = tiny_pair().config_fields() | {"position_embedding_type": "learned"}
    generator, draft = (Generator(tiny_model(**fields, max_position_embeddings=most), tiny_pair()) for most in (64, 12))
    expected = generator.generate(SOURCES, max_new_tokens=8)
    for assistant in (draft, draft.model):
        assert generator.generate(SOURCES, max_new_tokens=8, assistant_model=assistant) == expected
    assert generator.num_drafted > 0 and generator.num_truncated == 0
    with pytest.raises(TooLongError, match="than the model has positions, 64, got"):
        generator.generate(TEXTS, assistant_model=draft)


def test_what_is_too_long_is_numbered_among_all(generator):
    generator.generate(["a" * 63])
    with pytest.raises(TooLongError, match="than the model has positions, 64, got 65 in number 1 "):
        generator.generate(["a" * 64])
    message = r"has positions, 64, got 181 in number 5 \(in a file: line 5\)"
    with pytest.raises(ValueError, match=message):
        generator.generate(TEXTS)
    for options in ({}, {"risk": {"num_candidates": 2}}):
        stream = generator.generate_stream(iter(TEXTS), chunk_size=2, **options)
        assert len([next(stream) for _ in range(4)]) == 4
        with pytest.raises(ValueError, match=message):
            next(stream)
    with pytest.raises(ValueError, match="number 15 "):
        next(generator.generate_stream(iter(TEXTS), chunk_size=10, first_chunk=1))


def test_longer_sources_are_cut_where_that_is_asked_for_and_counted(generator):
    bounded = Generator(generator.model, generator.tokenizers, **CUT)
    # Five characters and the end of sequence.
    expected = generator.generate(["".join(text[:5]) for text in TEXTS])
    assert bounded.generate(TEXTS) == expected
    assert bounded.num_truncated == 4
    stream = bounded.generate_stream(TEXTS, chunk_size=2)
    assert next(stream)[0].text == expected[0] and bounded.num_truncated == 6
    assert [row[0].text for row in stream] == expected[1:] and bounded.num_truncated == 8
    bounded.generate_mbr(TEXTS, num_candidates=2, num_references=2)
    assert bounded.num_truncated == 12
    assert bounded.score(["a small dog"], ["ein"]) == generator.score(["a sma"], ["ein"])
    assert bounded.num_truncated == 13


def test_a_prefix_counts_and_the_limit_leaves_place_for_an_end(generator):
    bounded = Generator(generator.model, generator.tokenizers, source_prefix="the ", **CUT)
    assert bounded.generate(["dog"]) == generator.generate(["the d"])
    pairs = [TokenizerPair(tokenizer, tokenizer) for tokenizer in (mbart_tokenizer(), nllb_tokenizer())]
    for pair, length, prefix in [(tiny_pair(), 1, ""), (tiny_pair(), 4, "the "), *((pair, 2, "") for pair in pairs)]:
        with pytest.raises(ValueError, match=rf"`max_source_length` must be above {length}, .*got {length}"):
            Generator(generator.model, pair, max_source_length=length, source_prefix=prefix)


def test_a_source_that_several_models_read_is_cut_once(tmp_path):
    model, other = tiny_generator(), tiny_generator(seed=1)
    member = Generator(other.model, model.tokenizers, **CUT)
    together = Generator(model.model, model.tokenizers, members=[member], **CUT)
    whole = Generator(model.model, model.tokenizers, members=[other])
    assert together.generate(TEXTS) == whole.generate([text[:5] for text in TEXTS])
    assert together.num_truncated == 4
    folder = save_generator(model, tmp_path)
    loaded = Generator.from_pretrained([folder, folder], device="cpu", **CUT)
    assert loaded.max_source_length == loaded.members[0].max_source_length == 6
    drafted = Generator(model.model, model.tokenizers, **CUT)
    assert drafted.generate(TEXTS, assistant_model=other.model) == model.generate([text[:5] for text in TEXTS])
    assert drafted.num_truncated == 4


def test_the_command_line_names_the_line_or_cuts_it(generator, files, tmp_path, caplog, capsys):
    source, output = tmp_path / "in", tmp_path / "out"
    source.write_text("".join(f"{text}\n" for text in TEXTS), encoding="utf-8")
    output.write_text("older\n", encoding="utf-8")
    words = [str(save_generator(generator, tmp_path / "model")), "--device", "cpu"]
    paths = ["--input", str(source), "--output", str(output)]
    for subcommand, more in (("generate", ["--overwrite"]), ("attention", ["--format", "pharaoh"])):
        assert run(subcommand, [*words, *paths, *more]) == 2
        assert "got 181 in number 5 (in a file: line 5)" in capsys.readouterr().err
    assert output.read_text(encoding="utf-8") == "older\n"
    words += ["--max_source_length", "6"]
    with caplog.at_level("WARNING"):
        execute("generate", [*words, *paths, "--overwrite"])
    expected = generator.generate([text[:5] for text in TEXTS])
    assert output.read_text(encoding="utf-8") == "".join(f"{text}\n" for text in expected)
    assert "4 of 6 sources had more than max_source_length tokens and were truncated" in caplog.text
    execute("evaluate", [*words, "--source", files[0], "--target", files[1], "--output", str(tmp_path / "m.json")])
    result = json.loads((tmp_path / "m.json").read_text(encoding="utf-8"))
    assert result["num_truncated"] == 4 and result["inference"]["max_source_length"] == 6
    assert "num_truncated_references" not in result


def test_sources_with_unknown_tokens_are_counted(generator, files, tmp_path, caplog):
    generator.generate(["a ж b. ж", "a cat", "", "ж"], max_new_tokens=2, split_sentences=True)
    assert generator.num_unknown == 2
    generator.generate_mbr(["a ж"], num_candidates=2, num_references=2, max_new_tokens=2)
    assert generator.num_unknown == 3
    # All bytes are known. GPT-2's tokenizer calls its end unknown.
    pair = copy.deepcopy(tiny_pair(kind="byte_bpe"))
    assert Plan.of(tiny_generator(kind="byte_bpe"), {}).encode(["a ж"]).counts["num_unknown"] == 0
    pair.source.unk_token = pair.source.eos_token
    assert pair.unknown_id is None
    (tmp_path / "in").write_text("a cat\na ж\nж\n", encoding="utf-8")
    words = [str(save_generator(generator, tmp_path / "model")), "--device", "cpu", "--max_new_tokens", "2"]
    with caplog.at_level("WARNING"):
        execute("generate", [*words, "--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")])
    assert "2 of 3 sources have unknown tokens" in caplog.text
    Path(files[0]).write_text("a ж\n" * 3, encoding="utf-8")
    Path(files[1]).write_text("ein\n" * 3, encoding="utf-8")
    with caplog.at_level("WARNING"):
        execute("evaluate", [*words, "--source", files[0], "--target", files[1], "--output", str(tmp_path / "m.json")])
    assert "3 of 3 sources have unknown tokens" in caplog.text


def test_the_loss_of_a_reference_that_is_too_long_is_of_what_can_be_read(generator):
    long, short = (evaluate_generator(generator, ["a cat"], ["a" * num], metrics=["chrf"])[0] for num in (99, 63))
    assert long["num_truncated_references"] == 1 and "num_truncated_references" not in short
    assert long["loss"] == short["loss"] and long["num_target_tokens"] == 64


def test_targets_and_sources_that_are_scored_have_positions(generator):
    for pair, name in (((["a", LONG], ["a"] * 2), "source"), ((["a"] * 2, ["a", LONG]), "target")):
        message = rf"A {name} must not have more tokens .* positions, 64, got 181 in number 2 \(in a file: line 2\)"
        with pytest.raises(TooLongError, match=message):
            generator.score(*pair)
        for targets in (None, pair[1]) if name == "source" else (pair[1],):
            with pytest.raises(TooLongError, match=message):
                cross_attentions(generator, pair[0], targets)
    assert len(generator.score(["a"], ["a" * 63])[0].ids) == 64


def test_attention_is_of_what_was_read(generator):
    bounded = Generator(generator.model, generator.tokenizers, **CUT)
    for targets in (None, ["ein", "die"]):
        first, second = cross_attentions(bounded, ["the cat", "a cat"], targets)
        expected = cross_attentions(generator, ["the c", "a cat"], targets)
        assert (first.weights == expected[0].weights).all() and (second.weights == expected[1].weights).all()
        assert first.source == "the cat" and first.source_words == ["the", "cat"]
        assert first.source_word_ids == expected[0].source_word_ids
    assert bounded.num_truncated == 2
