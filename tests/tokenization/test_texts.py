import gzip
import re
import tracemalloc

import pytest

from metaphrase.tokenization import TOKENIZER_KINDS, encode_phrase, iterate_lines, texts, train_tokenizer
from metaphrase.tokenization.texts import count_lines, read_lines


def test_iterate_lines_splits_at_line_feeds_only(tmp_path):
    first, second, third = (tmp_path / name for name in ("first.txt", "second.txt", "third.gz"))
    first.write_bytes("\ufeffä b\r\n\nc\u2028d\u0085e\x0cf\rg\n".encode())
    second.write_bytes(b"last")
    third.write_bytes(gzip.compress("\ufeffä b\r\nc".encode()))
    lines = ["ä b", "", "c\u2028d\u0085e\x0cf\rg", "last", "ä b", "c"]
    assert list(iterate_lines([first, str(second), third])) == lines
    assert list(iterate_lines(str(second))) == ["last"]


@pytest.mark.parametrize("name", ["text", "text.gz"])
def test_a_long_line_is_a_problem_and_takes_little_memory(name, tmp_path):
    path = tmp_path / name
    with gzip.open(path, "wb", compresslevel=1) if name.endswith(".gz") else open(path, "wb") as file:
        file.write(b"\xef\xbb\xbf" + "ä".encode() * 1000 + b"\r\n" + b"b" * 10**7 + b"\nend" + b"c" * 998)
    tracemalloc.start()
    try:
        lines = list(read_lines(path, 1000))
        number = count_lines(path)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 5e6
    assert [(line.number, line.kind) for line in lines] == [(1, ""), (2, "line_too_long"), (3, "line_too_long")]
    assert lines[0].text == "ä" * 1000 and number == 3
    text = f"Each line of `{path}` must have at most 1000 characters, but line 2 has more. Set `max_line_characters` higher"
    with pytest.raises(ValueError, match=re.escape(text)):
        list(iterate_lines(path, keep_invalid=True, max_line_characters=1000))
    assert [len(line.text) for line in read_lines(path, 2**70)] == [1000, 10**7, 1001]
    latin = tmp_path / "latin1.txt"
    latin.write_bytes("good\nschön\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin1\.txt` must be UTF-8, but line 2 has the byte 0xf6 at position 3"):
        list(iterate_lines(latin))


def test_utf_16_is_named(tmp_path):
    (tmp_path / "pairs.txt").write_text("one\ntwo\n", encoding="utf-16")
    with pytest.raises(ValueError, match=r"pairs\.txt` must be UTF-8, got UTF-16\. Convert it with iconv"):
        list(read_lines(tmp_path / "pairs.txt"))


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"a", b"a\n", b"a\n\n", b"\xef\xbb\xbf", b"a\r\nb", b"\n" * 203 + b"x"]
)
def test_counted_lines_are_the_lines_that_are_read(content, tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "_BYTES_PER_CHUNK", 100)
    (tmp_path / "text").write_bytes(content)
    assert count_lines(tmp_path / "text") == sum(1 for _ in read_lines(tmp_path / "text"))


SENTENCES = ["a small dog runs", "the cat sleeps", "ein kleiner Hund läuft", "die Katze schläft", "zwei Hund und"]
SENTENCES += ["Hund und", "die Katze und", "猫 が いる", '"', "die, das"]


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
def test_a_phrase_is_found_in_the_middle_of_a_text_and_at_its_beginning(kind):
    tokenizer = train_tokenizer(SENTENCES * 9, kind=kind, show_progress=False)

    def ids_of(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    for phrase in ("kleiner Hund", "Hund", " die Katze "):
        inside, first = encode_phrase(tokenizer, phrase)
        word = phrase.strip()
        [part], whole = inside, ids_of(f"zwei {word} und")
        assert any(whole[start : start + len(part)] == part for start in range(len(whole)))
        begun = ids_of(f"{word} und")
        assert any(begun[: len(ids)] == ids for ids in [*inside, *first])
        assert tokenizer.decode([*ids_of("zwei"), *part]) == f"zwei {word}"
    if kind == "char":
        # A space stands before words alone.
        assert len(encode_phrase(tokenizer, '"')[0]) == 2 and encode_phrase(tokenizer, "猫")[0] == [ids_of("猫")]
        assert encode_phrase(tokenizer, "Hund") == ([ids_of(" Hund")], [ids_of("Hund")])
    for phrase in ("", " \t", *(["Ωmega"] if kind == "bpe" else [])):
        with pytest.raises(ValueError, match="A phrase must be a text that the tokenizer can write"):
            encode_phrase(tokenizer, phrase)
