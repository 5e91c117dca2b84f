"""Tests of whole texts: nothing vanishes, layout stays, long sentences are cut at the best place."""

import random

import pytest
from identity_engine import identity_generator
from tiny_generator import tiny_generator

from metaphrase.texts import documents as module
from metaphrase.texts.documents import split_texts

PAGE = "# Title\r\n\r\n  - One. Two?\n\t* (see 3)\n> A quote!  With  spaces.\n\n1. First;\tsecond\n---\n   \nLast"


def split(texts: list[str], limit: int = 10**9):
    generator = identity_generator(max_source_length=limit)
    generator.encode_uncut = list
    return split_texts([generator], texts, "en")


def random_texts(count: int) -> list[str]:
    draw = random.Random(0)
    words = ["Dr.", "the", "cat", "No. 5", "e.g.", "今日は。", "été", "U.S.", "🎉", "(x)", '"Yes!"', "—", "﷽"]
    words += ["http://a.b/c?d=1"]
    gaps = [" ", " ", " ", "  ", ". ", "! ", "? ", ", ", "; ", "\n", "\r\n", "\n\n", "\t", "\n  - ", "\n3. "]
    gaps += ["\u00a0", "\u2028", "\x0b"]
    return ["".join(draw.choice(words) + draw.choice(gaps) for _ in range(draw.randrange(40))) for _ in range(count)]


def test_parts_of_a_page():
    [document], _ = split([PAGE])
    sentences = ["Title", "One.", "Two?", "(see 3)", "A quote!", "With  spaces.", "First;", "second", "Last"]
    assert document.sentences == sentences
    assert document.layout[:3] == ["# ", "\r\n\r\n  - ", " "]
    assert document.join([text.upper() for text in sentences]) == PAGE.upper()


@pytest.mark.parametrize("limit", [10**9, 12])
def test_no_character_of_a_text_is_lost(limit):
    # A pattern that begins at each space would take minutes.
    texts = [*random_texts(200), "a cat" + " " * 100_000 + "b" + "\n" * 100_000 + "a dog; x" + "\u00a0" * 100_000]
    documents, _ = split(texts, limit)
    assert [document.join(document.sentences) for document in documents] == texts
    assert all(sentence == sentence.strip() != "" for document in documents for sentence in document.sentences)
    assert all(len(sentence) <= limit for document in documents for sentence in document.sentences)


def test_a_long_sentence_is_cut_at_the_best_place():
    texts = {
        "the cat sleeps; the small dog runs": ["the cat sleeps;", "the small dog runs"],
        "the cat, the dog and the small fox run": ["the cat, the dog", "and the small fox run"],
        "one two three four, five six seven": ["one two three four,", "five six seven"],
        "x" * 50: ["x" * 12, "x" * 13, "x" * 12, "x" * 13],
    }
    documents, num_cut = split([*texts], limit=24)
    assert [document.sentences for document in documents] == [*texts.values()] and num_cut == 4
    assert [document.join(document.sentences) for document in documents] == [*texts]


def test_an_identity_model_returns_the_texts():
    generator = identity_generator(max_source_length=16)
    texts = random_texts(100)
    targets = generator.generate(texts, split_sentences=True)
    assert all(target == text or not (target + text).strip() for target, text in zip(targets, texts, strict=True))
    assert generator.num_cut > 0 and generator.num_truncated == 0
    stream = generator.generate_stream(texts, split_sentences="de", chunk_size=7, return_scores=False)
    assert [candidates[0].text for candidates in stream] == targets


def test_candidates_of_a_text_join_those_of_its_sentences():
    generator = tiny_generator()
    options = {"num_beams": 3, "num_return_sequences": 2}
    [[first, second]] = generator.generate_n_best(["the cat. a dog."], split_sentences=True, **options)
    parts = generator.generate_n_best(["the cat.", "a dog."], **options)
    for index, joined in enumerate((first, second)):
        assert joined.text == " ".join(row[index].text for row in parts)
        assert joined.score == pytest.approx(sum(row[index].score for row in parts) / 2)
    with pytest.raises(ValueError, match="split_sentences"):
        next(generator.generate_stream(["the cat"], split_sentences=True, risk={"num_candidates": 2}))


def test_language_is_that_of_a_multilingual_tokenizer_unless_it_is_given(monkeypatch):
    languages = []
    monkeypatch.setattr(module.sentencex, "segment", lambda language, text: languages.append(language) or [text])
    for code, choice in (("deu_Latn", True), ("de_DE", True), (None, True), ("de_DE", "fra_Latn")):
        generator = identity_generator()
        monkeypatch.setattr(generator.tokenizers.source, "src_lang", code, raising=False)
        split_texts([generator], ["a"], choice)
    assert languages == ["de", "de", "en", "fr"]


def test_command_splits_lines(output_of):
    text = "the cat. the dog\n\n\t- two dogs and the small cat run; the dog\n"
    assert output_of(text, "--split_sentences", generator=identity_generator(max_source_length=12)) == text
