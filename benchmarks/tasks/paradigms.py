"""Inflection in two more invented languages, as triples of lemma, form and features such as `N;PL;PSS1S;ACC`.

- `inflection_agglutinative`: a noun with endings for number, possessor and case. Their vowels harmonize with the vowel
  before them. Consonants assimilate, stops soften before a vowel, and some stems lose a vowel there (*torum*: *tormu*).
- `inflection_features`: the same language. `test_systematic` has features that training never shows in one form (`HELD_OUT`).
- `inflection_copies`: long verbs with rare letters, most of which the form copies. Half of the lemmas of validation and
  test are not in training.
"""

import random
import re
from itertools import product

Splits = dict[str, list[tuple[str, str, str]]]

# The vowels that an ending has for `A` and `I` behind each vowel.
HARMONY = {"a": "aı", "ı": "aı", "o": "au", "u": "au", "e": "ei", "i": "ei", "ö": "eü", "ü": "eü"}
VOICELESS = "ptkfsş"
SOFTENED = {"p": "b", "t": "d", "k": "g"}
# A sound in brackets stands only between two vowels or between two consonants. `D` is d or t.
NUMBERS = {"SG": "", "PL": "mAr"}
POSSESSORS = {"": "", "PSS1S": "(I)l", "PSS2S": "(I)ş", "PSS3S": "(s)I"}
POSSESSORS |= {"PSS1P": "(I)lDA", "PSS2P": "(I)şDA", "PSS3P": "(s)InAk"}
CASES = {"NOM": "", "ACC": "(v)I", "DAT": "(y)A", "GEN": "(n)Im", "LOC": "DA", "ABL": "DAf", "INS": "(y)Ip"}
HELD_OUT = ({"PL", "PSS1P"}, {"PL", "INS"}, {"PSS2S", "ABL"}, {"PSS3P", "DAT"})

COMMON_LETTERS, RARE_LETTERS = ("bdfgklmnprstvz", "aeiou"), ("çðŋłñřšžþġħķťẁƙɓ", "áéíóúåøæąęőű")
# Prefix and ending of each tense. `2` stands for the first two letters of the verb once more.
TENSES = {"PRS": ("", "en"), "PST": ("2", "ot"), "FUT": ("sa", "en"), "COND": ("mi", "ot")}
VERB_FORMS = {
    f"V;{tense};{number}": (prefix, ending + plural)
    for tense, (prefix, ending) in TENSES.items()
    for number, plural in (("SG", ""), ("PL", "u"))
}


def attach(word: str, ending: str) -> str:
    """Return a word with an ending such as `(s)InAk`."""
    vowels = HARMONY[[letter for letter in word if letter in HARMONY][-1]]
    if ending.startswith("("):
        sound, ending = ending[1], ending[3:]
        if (word[-1] in HARMONY) != (sound in "AI"):
            ending = sound + ending
    if ending.startswith(("A", "I")) and sum(letter in HARMONY for letter in word) > 1:
        word = re.sub("(?<=[rlz])[ıiuü](?=[fmn]$)", "", word)
        word = word[:-1] + SOFTENED.get(word[-1], word[-1])
    for sound in ending:
        if sound == "D":
            sound = "t" if word[-1] in VOICELESS else "d"
        word += {"A": vowels[0], "I": vowels[1]}.get(sound, sound)
    return word


def decline(noun: str, number: str, possessor: str, case: str) -> str:
    """Return a form of a noun. The possessor may be an empty text."""
    for ending in (NUMBERS[number], POSSESSORS[possessor], CASES[case]):
        noun = attach(noun, ending)
    return noun


def make_noun(draw: random.Random) -> str:
    """Return a noun, most often with vowels of one harmony."""
    vowels = draw.choice(["aıou", "eiöü", "aıou", "eiöü", "aıoueiöü"])
    syllables = [draw.choice("bdgklmnprstvyzfş") + draw.choice(vowels) for _ in range(draw.randint(1, 3))]
    return "".join(syllables) + draw.choice(["", "", *"kptlnrsşfm"])


def make_agglutinative(num_train: int = 7000, hold_out: bool = False, seed: int = 8) -> Splits:
    """Return the triples of each split. The forms of a noun are spread over the splits.

    Args:
        num_train: Number of triples of training.
        hold_out: Whether the forms with features of `HELD_OUT` are in `test_systematic` alone.
        seed: Seed of all choices.
    """
    draw = random.Random(seed)
    triples, held_out = [], []
    for noun in sorted({make_noun(draw) for _ in range(700)}):
        for cell in product(NUMBERS, POSSESSORS, CASES):
            is_held_out = hold_out and any(features <= set(cell) for features in HELD_OUT)
            triple = noun, decline(noun, *cell), ";".join(["N", *filter(None, cell)])
            (held_out if is_held_out else triples).append(triple)
    draw.shuffle(triples)
    draw.shuffle(held_out)
    splits = {"train": triples[1500 : 1500 + num_train], "validation": triples[:500], "test": triples[500:1500]}
    return splits | ({"test_systematic": held_out[:1000]} if hold_out else {})


def conjugate(verb: str, features: str) -> str:
    """Return a form of a verb."""
    prefix, ending = VERB_FORMS[features]
    return prefix.replace("2", verb[:2]) + verb + ending


def make_verb(draw: random.Random) -> str:
    """Return a verb of 6 to 12 letters, about each tenth of them rare, and some much rarer than others."""

    def letter(kind: int) -> str:
        rare = RARE_LETTERS[kind]
        if draw.random() < 0.9:
            return draw.choice(COMMON_LETTERS[kind])
        return draw.choices(rare, [1 / rank for rank in range(1, len(rare) + 1)])[0]

    return "".join(letter(kind) for _ in range(draw.randint(3, 6)) for kind in (0, 1))


def make_copies(num_train: int = 7000, seed: int = 9) -> Splits:
    """Return the triples of each split."""
    draw = random.Random(seed)
    verbs = sorted({make_verb(draw) for _ in range(1800)})
    draw.shuffle(verbs)
    # Each verb that training never shows has one form.
    unseen = [(verb, draw.choice(list(VERB_FORMS))) for verb in verbs[:750]]
    seen = [(verb, features) for verb in verbs[750:] for features in VERB_FORMS]
    draw.shuffle(seen)
    cells = {
        "train": seen[750 : 750 + num_train],
        "validation": seen[:250] + unseen[:250],
        "test": seen[250:750] + unseen[250:],
    }
    return {split: [(verb, conjugate(verb, cell), cell) for verb, cell in chosen] for split, chosen in cells.items()}
