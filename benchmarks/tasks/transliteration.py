"""Transliteration: a name of an invented language becomes Cyrillic, as in *Cheguille*: *Чегийе*.

A letter sounds by its neighbors: *c* is К or Ц, *s* is С or З, *e* is Э or Е. One sound has several spellings (*k*, *c*,
*qu*), and one spelling several sounds: in a name with a learned ending (*-os*, *-ia*), *ch*, *y*, *z*, *c* and *th* sound
as in no other name.
"""

# ruff: noqa: SIM905 (words are read more easily in one string)

import random
import re

# A part of a name is of one of several rows, all as often, so that simple letters come twice as often as others.
SIMPLE_ONSETS, SIMPLE_VOWELS, NONE = "bcdfghjklmnprstvz", "aeiou", [""]
ONSET = (SIMPLE_ONSETS, SIMPLE_ONSETS, "ch cl gh gr gu ll nh ph pr qu rh sch sh st th tr w x y".split())
VOWELS = (SIMPLE_VOWELS, SIMPLE_VOWELS, "y ai au ei eu ia ie io oi ou ee oo".split())
CODA = (NONE, NONE, "c ck l ll m n ng nn r rr s ss t tt x".split())
ENDINGS = "a o e el en er ik ille in ine ou y".split()
LEARNED_ENDINGS = "os es is ia".split()
# Letters, with those around them, and their sounds behind the colon. The first rule that fits a place counts.
FRONT, VOWEL = "[eiy]", "[aeiouy]"
LEARNED = dict(rule.split(":") for rule in f"ch:х th:ф c(?={FRONT}):к y:и z:дз".split())
RULES = dict(
    rule.split(":")
    for rule in f"""
sch|sh:ш c+h(?={FRONT}):ч c+h:к c+(?={FRONT}):ц ck|c+|k:к qu(?={FRONT}):к qu:кв (?<={VOWEL})x(?={VOWEL}):гз x:кс ph:ф th:т
rh|r+:р gu(?={FRONT})|gh:г g(?={FRONT}):ж nh:нь n+:н (?<=i)ll(?={VOWEL}):й ^ll(?={VOWEL})|ll(?=$):ль l+:л t+:т
(?<={VOWEL})s(?={VOWEL}):з s+:с ou|oo:у ee:и ^io|eu:ё ai:ай ei:ей oi:уа au:о (?<=[lnrt])ia:ья ia:ия (?<=[lnrt])ie:ье
^y(?={VOWEL})|(?<=[aeio])y:й ^e:э (?<={VOWEL})h|h(?=$):
a:а b:б d:д e:е f:ф g:г h:х i:и j:ж m:м o:о p:п u:у v:в w:у y:ы z:з""".split()
)


def sounds(name: str) -> str:
    """Return a name in Cyrillic letters, in lower case."""
    # The rules of learned names come first, and their sounds count for rules of both.
    rules = LEARNED | RULES | LEARNED if name.endswith(tuple(LEARNED_ENDINGS)) else RULES
    letters = list(rules.values())
    return re.sub("|".join(f"({rule})" for rule in rules), lambda match: letters[match.lastindex - 1], name)


def make_name(draw: random.Random) -> str:
    """Return a name in Latin letters, in lower case."""
    start = (NONE, NONE, NONE, SIMPLE_VOWELS)
    parts = [start, *draw.randint(1, 2) * [ONSET, VOWELS, CODA], ONSET, (ENDINGS, LEARNED_ENDINGS)]
    return "".join(draw.choice(draw.choice(part)) for part in parts)


def make_splits(num_train: int = 8000, seed: int = 10) -> dict[str, list[tuple[str, str]]]:
    """Return the pairs of each split. No name occurs twice."""
    draw, names = random.Random(seed), {}
    while len(names) < num_train + 1500:
        name = make_name(draw)
        names[name.capitalize()] = sounds(name).capitalize()
    pairs = list(names.items())
    return {"train": pairs[1500:], "validation": pairs[:500], "test": pairs[500:1500]}
