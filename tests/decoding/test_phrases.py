import pytest

from metaphrase.tokenization import TOKENIZER_KINDS, encode_phrase, train_tokenizer

SENTENCES = ["a small dog runs", "the cat sleeps", "ein kleiner Hund läuft", "die Katze schläft", "zwei Hund und"]
SENTENCES += ["Hund und", "die Katze und", "猫 が いる", '"', "die, das"]


def contains(ids, part):
    return any(ids[start : start + len(part)] == part for start in range(len(ids)))


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
def test_a_phrase_is_found_in_the_middle_of_a_text_and_at_its_beginning(kind):
    tokenizer = train_tokenizer(SENTENCES * 9, kind=kind, show_progress=False)

    def ids_of(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    for phrase in ("kleiner Hund", "Hund", " die Katze "):
        inside, first = encode_phrase(tokenizer, phrase)
        word = phrase.strip()
        assert len(inside) == 1 and contains(ids_of(f"zwei {word} und"), inside[0])
        begun = ids_of(f"{word} und")
        assert any(begun[: len(ids)] == ids for ids in [*inside, *first])
        assert tokenizer.decode([*ids_of("zwei"), *inside[0]]) == f"zwei {word}"
    if kind == "char":
        # A space stands before words alone.
        assert len(encode_phrase(tokenizer, '"')[0]) == 2 and encode_phrase(tokenizer, "猫")[0] == [ids_of("猫")]
        assert encode_phrase(tokenizer, "Hund") == ([ids_of(" Hund")], [ids_of("Hund")])
    for phrase in ("", " \t", *(["Ωmega"] if kind == "bpe" else [])):
        with pytest.raises(ValueError, match="A phrase must be a text that the tokenizer can write"):
            encode_phrase(tokenizer, phrase)
