"""Declension and conjugation in the demo corpus, and the forms of its lexicon."""

from dataclasses import replace

import pytest
from demo_phrases import DETERMINERS, NOUN_OF, SAY_OF, VERB_OF

from metaphrase.demo import grammar as lexicon
from metaphrase.demo.grammar import ADJECTIVES, NOUNS, VERBS, Case, Declension, Determiner
from metaphrase.demo.languages import (
    german_adjective,
    german_determiner,
    german_noun,
    german_present,
    third_person_singular,
)

# Columns: masculine, feminine, neuter, plural. Rows: nominative, accusative, dative, genitive.
PARADIGMS = {
    lexicon.DEFINITE: "der die das die | den die das die | dem der dem den | des der des der",
    lexicon.THIS: "dieser diese dieses diese | diesen diese dieses diese | "
    "diesem dieser diesem diesen | dieses dieser dieses dieser",
    lexicon.NO: "kein keine kein keine | keinen keine kein keine | "
    "keinem keiner keinem keinen | keines keiner keines keiner",
    DETERMINERS["our"]: "unser unsere unser unsere | unseren unsere unser unsere | "
    "unserem unserer unserem unseren | unseres unserer unseres unserer",
    DETERMINERS["two"]: "zwei zwei zwei zwei | zwei zwei zwei zwei | zwei zwei zwei zwei | zwei zwei zwei zwei",
}
ADJECTIVE_PARADIGMS = {
    Declension.WEAK: "gute gute gute guten | guten gute gute guten | guten guten guten guten | guten guten guten guten",
    Declension.MIXED: "guter gute gutes guten | guten gute gutes guten | guten guten guten guten | guten guten guten guten",
    Declension.STRONG: "guter gute gutes gute | guten gute gutes gute | gutem guter gutem guten | guten guter guten guter",
}


def table(text: str) -> list[list[str]]:
    return [row.split() for row in text.split("|")]


@pytest.mark.parametrize("determiner", PARADIGMS, ids=lambda determiner: determiner.stem)
def test_determiner_paradigm(determiner: Determiner):
    forms = [[german_determiner(determiner, case, column) for column in range(4)] for case in Case]
    assert forms == table(PARADIGMS[determiner])


@pytest.mark.parametrize("declension", Declension)
def test_adjective_paradigm(declension: Declension):
    good = replace(ADJECTIVES[0], stem="gut")
    forms = [[german_adjective(good, declension, case, column) for column in range(4)] for case in Case]
    assert forms == table(ADJECTIVE_PARADIGMS[declension])


@pytest.mark.parametrize(
    ("english", "singular", "plural"),
    [
        ("dog", "Hund Hund Hund Hundes", "Hunde Hunde Hunden Hunde"),
        ("boy", "Junge Jungen Jungen Jungen", "Jungen Jungen Jungen Jungen"),
        ("child", "Kind Kind Kind Kindes", "Kinder Kinder Kindern Kinder"),
        ("girl", "Mädchen Mädchen Mädchen Mädchens", "Mädchen Mädchen Mädchen Mädchen"),
        ("king", "König König König Königs", "Könige Könige Königen Könige"),
        ("car", "Auto Auto Auto", "Autos Autos Autos Autos"),
    ],
)
def test_noun_paradigm(english, singular, plural):
    noun, _ = NOUN_OF[english]
    cases = list(Case)[: len(singular.split())]
    assert [german_noun(noun, False, case) for case in cases] == singular.split()
    assert [german_noun(noun, True, case) for case in Case] == plural.split()


@pytest.mark.parametrize(
    ("english", "forms"),
    [
        ("eat", "esse isst isst essen"),
        ("close", "schließe schließt schließt schließen"),
        ("find", "finde findest findet finden"),
        ("open", "öffne öffnest öffnet öffnen"),
        ("invite", "lade lädst lädt laden"),
        ("take", "nehme nimmst nimmt nehmen"),
        ("have", "habe hast hat haben"),
        ("be", "bin bist ist sind"),
    ],
)
def test_german_present(english, forms):
    assert [german_present(VERB_OF[english], slot) for slot in range(4)] == forms.split()
    assert [german_present(SAY_OF["know"], slot) for slot in range(4)] == ["weiß", "weißt", "weiß", "wissen"]


def test_third_person_singular():
    verbs = ("see", "carry", "buy", "wash", "catch", "go", "have", "look for", "wake up")
    assert [third_person_singular(verb) for verb in verbs] == [
        *("sees", "carries", "buys", "washes", "catches", "goes", "has", "looks for", "wakes up")
    ]


def test_lexicon_hides_nothing_that_german_needs():
    assert all(noun.plural != noun.english for noun in NOUNS)
    assert all(verb.past != verb.english for verb in VERBS)
    assert len(NOUN_OF) == len({noun.german for noun in NOUNS}) + len({n.german for n in NOUNS if n.plural}) + 1
    assert all(noun.german[0].isupper() for noun in NOUNS)
    assert len({word.english for word in ADJECTIVES}) == len({word.german for word in ADJECTIVES}) == len(ADJECTIVES)
