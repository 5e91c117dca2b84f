"""Inflection: an invented verb and the name of a form become that form, as in *anroben V PTCP PST*: *angerobt*.

The task is known from the shared tasks of SIGMORPHON on inflection (Cotterell et al. 2016). The verbs are built like
German verbs. A verb is weak, strong or irregular, and its stem decides which. It has no prefix, an inseparable prefix
(*beroben*, without *ge-* in the participle) or a separable prefix (*anroben*: *robt an*). The forms of a verb are spread
over the splits, so that the class of each verb can be learned.
"""

# ruff: noqa: SIM905 (words are read more easily in one string)

import random

ONSETS = "b d f g h k l m n p r s w z br dr fl gr kl kr pl schl schm schr sp st str tr zw".split()
CODAS = "b ck d g hl ll m mm n ng nk r rb rd rk ss st t tt tz ff chs ch".split()
VOWELS = "a e i o u ä ö ü au ei eu".split()
# Endings of first, second and third person singular, then plural.
ENDINGS = {
    "PRS": ("e", "st", "t", "en", "t", "en"),
    "PST": ("te", "test", "te", "ten", "tet", "ten"),
    "STRONG": ("", "st", "", "en", "t", "en"),
    "SBJV": ("e", "est", "e", "en", "et", "en"),
}
# Vowel of the infinitive: vowels of the second and third person singular, of the past, and of the participle.
ABLAUT = {
    "ei": ("ei", "ie", "ie"),
    "i": ("i", "a", "u"),
    "e": ("i", "a", "o"),
    "a": ("ä", "u", "a"),
    "au": ("äu", "ie", "au"),
}
IRREGULAR = {
    "e": ("ie", "a", "e"),
    "i": ("i", "a", "o"),
    "ei": ("ei", "i", "i"),
    "a": ("ä", "ie", "a"),
    "au": ("äu", "o", "o"),
}
INSEPARABLE, SEPARABLE = ("be", "ver", "zer", "ent"), ("an", "auf", "aus", "ein", "mit", "nach", "vor", "zu")
PERSONS = [f"{person} {number}" for number in ("SG", "PL") for person in "123"]
CELLS = [f"{tense} {person}" for tense in ("PRS", "PST", "SBJV") for person in PERSONS] + [
    "IMP SG",
    "IMP PL",
    "PTCP PRS",
    "PTCP PST",
]


class Verb:
    """An invented verb.

    Args:
        onset: First consonants of the stem.
        vowel: Vowel of the stem.
        coda: Last consonants of the stem.
        prefix: A prefix, or an empty text.
        vowels: Changed vowels of a strong verb (see `ABLAUT`); None for a weak verb.
    """

    def __init__(self, onset: str, vowel: str, coda: str, prefix: str, vowels: tuple[str, str, str] | None):
        self.onset, self.vowel, self.coda, self.prefix, self.vowels = onset, vowel, coda, prefix, vowels
        self.infinitive = prefix + onset + vowel + coda + "en"

    def join(self, vowel: str, ending: str) -> str:
        """Return stem and ending with the sounds between them."""
        stem = self.onset + vowel + self.coda
        if stem.endswith(("t", "d")) and ending[:1] in ("s", "t"):
            stem += "e"
        elif stem.endswith(("s", "z", "x")) and ending == "st":
            ending = "t"
        return stem + ending

    def form(self, cell: str) -> str:
        """Return the form that a cell such as `PRS 3 SG` names."""
        tense, *rest = cell.split()
        is_separable = self.prefix in SEPARABLE
        if tense == "PTCP":
            if rest == ["PRS"]:
                return self.infinitive + "d"
            changed = self.onset + self.vowels[2] + self.coda + "en" if self.vowels else self.join(self.vowel, "t")
            return (self.prefix + "ge" if is_separable else self.prefix or "ge") + changed
        person = PERSONS.index(" ".join(rest)) if tense != "IMP" else None
        if tense == "IMP":
            verb = self.join(self.vowel, "" if rest == ["SG"] else "t")
        elif tense == "SBJV":
            verb = self.onset + self.vowel + self.coda + ENDINGS["SBJV"][person]
        elif tense == "PST" and self.vowels:
            verb = self.join(self.vowels[1], ENDINGS["STRONG"][person])
        elif tense == "PRS" and self.vowels and person in (1, 2):
            verb = self.join(self.vowels[0], ENDINGS["PRS"][person])
        else:
            verb = self.join(self.vowel, ENDINGS[tense][person])
        return f"{verb} {self.prefix}" if is_separable else self.prefix + verb


def make_verbs(number: int, draw: random.Random) -> list[Verb]:
    """Return different verbs."""
    verbs = {}
    while len(verbs) < number:
        onset, vowel, coda = draw.choice(ONSETS), draw.choice(VOWELS), draw.choice(CODAS)
        # The stem alone decides the class, so that verbs with the same stem and another prefix agree.
        is_strong = vowel in ABLAUT and random.Random(onset + vowel + coda).random() < 0.7 and coda not in ("st", "tz")
        is_irregular = random.Random(coda + vowel + onset).random() < 0.2
        vowels = (IRREGULAR if is_irregular else ABLAUT)[vowel] if is_strong else None
        prefix = draw.choice(["", "", draw.choice(INSEPARABLE), draw.choice(SEPARABLE)])
        verb = Verb(onset, vowel, coda, prefix, vowels)
        verbs.setdefault(verb.infinitive, verb)
    return list(verbs.values())


def make_splits(num_train: int = 10_000, seed: int = 3) -> dict[str, list[tuple[str, str]]]:
    """Return the pairs of each split."""
    draw = random.Random(seed)
    pairs = [(f"{verb.infinitive} V {cell}", verb.form(cell)) for verb in make_verbs(700, draw) for cell in CELLS]
    draw.shuffle(pairs)
    return {"train": pairs[1500 : 1500 + num_train], "validation": pairs[:500], "test": pairs[500:1500]}
