"""Tests of terms: what a target must keep or name, and outputs that repeat themselves."""

import pytest
from identity_engine import identity_generator
from tiny_generator import tiny_generator

from metaphrase.texts.documents import find_loop
from metaphrase.texts.markup import Atom, MarkedText
from metaphrase.texts.plan import Links, Sentence, Terms, find_words, read_glossary
from metaphrase.texts.whole_texts import TextDecoder


def find_atoms(text, keep=(), glossary=None):
    return Terms(keep, glossary).find(MarkedText(text, is_markup=False))


@pytest.mark.parametrize(
    ("name", "text", "kept"),
    [
        ("url", "See https://a.b/c?d=1, or (www.x.org/y).", ["https://a.b/c?d=1", "www.x.org/y"]),
        ("email", "Ask a.b+c@d-e.org.", ["a.b+c@d-e.org"]),
        ("placeholder", "Hi {name}, {{x}} of %d or %(n)s: ${HOME}", ["{name}", "{{x}}", "%d", "%(n)s", "${HOME}"]),
        ("number", "3,141.5 on 12/31", ["3,141.5", "12/31"]),
        (r"[A-Z]{2,}\d", "AB1 c2", ["AB1"]),
    ],
)
def test_patterns(name, text, kept):
    atoms = find_atoms(text, [name])
    assert [atom.expected for atom in atoms] == kept
    assert all(text[atom.start : atom.end] == atom.expected and not atom.ignore_case for atom in atoms)


def test_longest_term_wins_and_lower_case_finds_any_case():
    atoms = find_atoms("Black Cat, cats, cat, us, US", glossary={"cat": "Katze", "black cat": "Panther", "US": "USA"})
    assert all(atom.ignore_case for atom in atoms)
    expected = [(0, 9, "Panther"), (17, 20, "Katze"), (26, 28, "USA")]
    assert [(atom.start, atom.end, atom.expected) for atom in atoms] == expected
    # Patterns come before terms.
    atoms = find_atoms("www.cat.org cat", ["url"], {"cat": "Katze"})
    assert [atom.expected for atom in atoms] == ["www.cat.org", "Katze"]


def test_wrong_terms_and_glossary_files_are_refused(tmp_path):
    path = tmp_path / "terms.tsv"
    # Some programs write a mark at the beginning.
    path.write_text("cat\tKatze\n\nblack cat\tPanther\n", encoding="utf-8-sig")
    assert read_glossary(path) == {"cat": "Katze", "black cat": "Panther"}
    path.write_text("cat\tKatze\ndog\n", encoding="utf-8")
    with pytest.raises(ValueError, match="dog"):
        read_glossary(path)
    for options, message in (({"keep": ["("]}, "`keep`"), ({"glossary": {"a": " "}}, r"`glossary` .* \('a', ''\)")):
        with pytest.raises(ValueError, match=message):
            Terms(**options)


def test_loops():
    for target, part in (("the cat the cat the cat the cat the", "the cat"), ("nonononononono yes", "no")):
        assert find_loop("a source", target).strip() in part * 2
    assert [find_loop("a source", target) for target in ("a b c d e f", "very very very good", "........")] == [
        None
    ] * 3
    decoder = TextDecoder(identity_generator(lambda text: "so so " * 10))
    decoder.decode(["a cat"])
    assert decoder.generator.num_loops == decoder.generator.num_looping == 1


def test_kept_part_that_is_missing_takes_the_place_of_its_words(align):
    generator = identity_generator(lambda text: text.replace("{name}", "{Name}").replace("Cat", "Hund"))
    decoder = TextDecoder(generator, terms=Terms(["placeholder"], {"cat": "Katze"}))
    assert decoder.decode(["the Cat of {name} runs"]) == ["the Katze of {name} runs"]
    assert decoder.counts["num_placed"] == 2


def test_a_missing_term_is_inserted_without_loss():
    text, target = "the dog {name} likes it.", "der Hund mag es."
    source = [(0, 3), (4, 7), (8, 14), (15, 20), (21, 23)]
    for best, expected in (
        # The term has no word of its own, so it stands behind the word before it, with a space.
        ([0, 1, None, 3], "der Hund {name} mag es."),
        # The model looks at nothing but the term. Its sentence stays.
        ([2, 2, 2, 2], "{name} der Hund mag es."),
    ):
        sentence = Sentence(text, [], [Atom(8, 14, "{name}", "{name}")], str)
        assert sentence.render(target, Links(source, find_words(target)[:4], best)) == (expected, 1)


CONSTRAINED = [("der Hund läuft", "der Hund läuft", 1), ("das Tier läuft Hund", "das Hund läuft", 0)]


@pytest.mark.parametrize(("constrained", "target", "num_forced"), [*CONSTRAINED, ("das Tier", "das Hund läuft", 0)])
def test_a_constrained_target_must_be_better(constrained, target, num_forced, align, monkeypatch):
    calls = []

    def decode(texts, **options):
        calls.append(options)
        return [constrained if "must_contain" in options and len(calls) > 1 else "das Tier läuft"]

    monkeypatch.setattr(generator := tiny_generator(), "generate", decode)
    decoder = TextDecoder(generator, terms=Terms(glossary={"dog": "Hund"}))
    assert decoder.decode(["the dog runs"], must_contain=["läuft"]) == [target]
    assert decoder.counts["num_forced"] == num_forced and decoder.counts["num_placed"] == 1 - num_forced
    # The caller's own phrases stay.
    assert calls[1]["must_contain"] == ["läuft", "Hund"] and calls[1]["num_beams"] >= 4


@pytest.mark.parametrize(("max_new_tokens", "num_forced"), [(20, 1), (2, 0)])
def test_terms_are_forced_in_decoding_or_placed_where_they_have_no_room(max_new_tokens, num_forced):
    generator = tiny_generator()
    # A random model decides by rounding whether to write a space, and a target of more words is refused.
    [space, _] = generator.tokenizers.encode_targets([" "])[0]
    decoder = TextDecoder(generator, terms=Terms(["H[a-z]+"]))
    [target] = decoder.decode(["the Hund runs"], max_new_tokens=max_new_tokens, suppress_tokens=[space])
    assert "Hund" in target and decoder.counts["num_forced"] == 1 - decoder.counts["num_placed"] == num_forced


def test_command_reads_a_page(output_of):
    output = output_of("<p>\n  the <b>cat</b></p>\n<pre>stays\n</pre>\n", "--format", "html")
    assert output.startswith("<p>\n  ") and output.endswith("</p>\n<pre>stays\n</pre>\n") and "<b>" in output
    with pytest.raises(ValueError, match="num_processes"):
        output_of("the cat\n", "--overwrite", "--format", "html", "--num_processes", "2")


def test_command_keeps_terms_in_lines(output_of, tmp_path):
    (tmp_path / "terms.tsv").write_text("cat\tHund\n", encoding="utf-8")
    words = ("--glossary", tmp_path / "terms.tsv", "--keep", "number")
    lines = output_of("the cat\n\na 7 dog\n", *words).splitlines()
    assert len(lines) == 3 and "Hund" in lines[0] and lines[1] == "" and "7" in lines[2]
