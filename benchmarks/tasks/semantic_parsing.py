"""Semantic parsing: an English sentence becomes a logical form.

The task is known as COGS (Kim and Linzen 2020, arXiv 2010.05465). `test` is like training. `test_systematic` needs
combinations that training never shows:

- nouns as subjects that were objects only, and nouns as objects that were subjects only
- a verb in the passive that was active only
- deeper nesting
"""

# ruff: noqa: SIM905 (words are read more easily in one string)

import random

NOUNS = """cat dog girl boy teacher child king queen baker sailor doctor farmer bird horse frog bear mouse penguin chef judge cake
cookie rose ball drum book box hat ring shoe bottle melon sandwich guitar letter crown jar needle pen radio""".split()
NAMES = "Emma Liam Olivia Noah Ava Lucas Mia Ethan Zoe Oliver Sophia Mason Ella Henry Lily Jack".split()
PLACES = "table tree car house garden stage bed shelf truck room desk road chair bench tent rug".split()
PREPOSITIONS = "in on beside".split()
TRANSITIVE = {  # past: lemma, for both the active and the passive
    "saw": ("see", "seen"),
    "ate": ("eat", "eaten"),
    "found": ("find", "found"),
    "drew": ("draw", "drawn"),
    "held": ("hold", "held"),
    "painted": ("paint", "painted"),
    "cleaned": ("clean", "cleaned"),
    "helped": ("help", "helped"),
    "moved": ("move", "moved"),
    "liked": ("like", "liked"),
    "noticed": ("notice", "noticed"),
    "touched": ("touch", "touched"),
    "admired": ("admire", "admired"),
}
DITRANSITIVE = {
    "gave": ("give", "given"),
    "sold": ("sell", "sold"),
    "sent": ("send", "sent"),
    "offered": ("offer", "offered"),
    "lent": ("lend", "lent"),
}
INTRANSITIVE = {
    "slept": "sleep",
    "laughed": "laugh",
    "ran": "run",
    "smiled": "smile",
    "danced": "dance",
    "sneezed": "sneeze",
}
CLAUSAL = {"said": "say", "believed": "believe", "thought": "think", "hoped": "hope", "knew": "know"}
CONTROL = {"wanted": "want", "tried": "try", "planned": "plan"}
INFINITIVES = ("sleep", "laugh", "run", "smile", "dance", "sing")
SUBJECTS_ONLY, OBJECTS_ONLY, ACTIVE_ONLY = ("penguin", "Jack"), ("cookie", "Lily"), ("admired",)


class Sentence:
    """A random sentence with its logical form.

    Args:
        draw: Source of all choices.
        depth: Number of nested clauses, and of nested prepositional phrases.
        special: A combination that training never shows: `subject`, `object` or `passive`. None in training.
    """

    def __init__(self, draw: random.Random, depth: int, special: str | None):
        self.draw, self.special = draw, special
        self.words, self.definite, self.conjuncts = [], [], []
        self.clause(depth)

    def pair(self) -> tuple[str, str]:
        """Return the text and the logical form, definite nouns first."""
        text = " ".join(self.words)
        return text[0].upper() + text[1:] + " .", " ; ".join([*self.definite, " AND ".join(self.conjuncts)])

    def add(self, *words: str) -> str:
        """Append words and return the variable of the last word."""
        self.words += words
        return f"x _ {len(self.words) - 1}"

    def noun_phrase(self, role: str, depth: int) -> str:
        """Append a noun phrase and return its variable or name."""
        draw = self.draw
        other_role = OBJECTS_ONLY if role == "subject" else SUBJECTS_ONLY
        if self.special == role:
            noun = draw.choice(other_role)
            self.special = None
        else:
            noun = draw.choice([word for word in (*NOUNS, *NAMES) if word not in other_role])
        if noun in NAMES:
            self.add(noun)
            return noun
        variable = self.described(noun)
        if (role != "subject" and depth and draw.random() < 0.5) or depth > 2:
            self.modifiers(noun, variable, depth)
        return variable

    def described(self, noun: str) -> str:
        """Append determiner and noun and return the variable of the noun."""
        determiner = self.draw.choice(["a", "the"])
        variable = self.add(determiner, noun)
        if determiner == "the":
            self.definite.append(f"* {noun} ( {variable} )")
        else:
            self.conjuncts.append(f"{noun} ( {variable} )")
        return variable

    def modifiers(self, noun: str, variable: str, depth: int) -> None:
        """Append prepositional phrases, each of the noun before it."""
        for _ in range(depth):
            preposition = self.draw.choice(PREPOSITIONS)
            self.add(preposition)
            slot = len(self.conjuncts)
            place = self.described(self.draw.choice(PLACES))
            self.conjuncts.insert(slot, f"{noun} . nmod . {preposition} ( {variable} , {place} )")
            noun, variable = self.words[-1], place

    def clause(self, depth: int) -> str:
        """Append a clause and return the variable of its verb."""
        draw = self.draw
        if (depth > 2 and self.special is None and draw.random() < 0.8) or (depth and draw.random() < 0.2):
            return self.with_clause(depth)
        if self.special == "passive":
            return self.passive(depth)
        if self.special == "object":
            return self.transitive(depth)
        clauses = [self.transitive, self.transitive, self.passive, self.ditransitive, self.intransitive, self.control]
        return draw.choice(clauses)(depth)

    def predicate(self, lemma: str, variable: str, roles: dict[str, str], slot: int) -> str:
        """Insert the roles of a verb and return its variable."""
        self.conjuncts[slot:slot] = [f"{lemma} . {role} ( {variable} , {filler} )" for role, filler in roles.items()]
        return variable

    def with_clause(self, depth: int) -> str:
        subject = self.noun_phrase("subject", 0)
        verb = self.draw.choice(list(CLAUSAL))
        slot, variable = len(self.conjuncts), self.add(verb)
        self.add("that")
        inner = self.clause(depth - 1)
        return self.predicate(CLAUSAL[verb], variable, {"agent": subject, "ccomp": inner}, slot)

    def transitive(self, depth: int) -> str:
        subject = self.noun_phrase("subject", 0)
        verb = self.draw.choice(list(TRANSITIVE))
        slot, variable = len(self.conjuncts), self.add(verb)
        thing = self.noun_phrase("object", depth)
        return self.predicate(TRANSITIVE[verb][0], variable, {"agent": subject, "theme": thing}, slot)

    def passive(self, depth: int) -> str:
        verbs = {
            past: forms for past, forms in TRANSITIVE.items() if (past in ACTIVE_ONLY) == (self.special == "passive")
        }
        self.special = None
        lemma, participle = self.draw.choice(list(verbs.values()))
        subject = self.noun_phrase("object", 0)
        slot, variable = len(self.conjuncts), self.add("was", participle)
        roles = {"theme": subject}
        if self.draw.random() < 0.6:
            self.add("by")
            roles["agent"] = self.noun_phrase("subject", 0)
        return self.predicate(lemma, variable, roles, slot)

    def ditransitive(self, depth: int) -> str:
        subject = self.noun_phrase("subject", 0)
        verb = self.draw.choice(list(DITRANSITIVE))
        slot, variable = len(self.conjuncts), self.add(verb)
        if self.draw.random() < 0.5:
            recipient = self.noun_phrase("object", 0)
            thing = self.noun_phrase("object", depth)
        else:
            thing = self.noun_phrase("object", depth)
            self.add("to")
            recipient = self.noun_phrase("object", 0)
        return self.predicate(
            DITRANSITIVE[verb][0], variable, {"agent": subject, "theme": thing, "recipient": recipient}, slot
        )

    def intransitive(self, depth: int) -> str:
        subject = self.noun_phrase("subject", 0)
        verb = self.draw.choice(list(INTRANSITIVE))
        slot, variable = len(self.conjuncts), self.add(verb)
        return self.predicate(INTRANSITIVE[verb], variable, {"agent": subject}, slot)

    def control(self, depth: int) -> str:
        subject = self.noun_phrase("subject", 0)
        verb, infinitive = self.draw.choice(list(CONTROL)), self.draw.choice(INFINITIVES)
        slot, variable = len(self.conjuncts), self.add(verb)
        inner = self.add("to", infinitive)
        self.predicate(infinitive, inner, {"agent": subject}, slot)
        return self.predicate(CONTROL[verb], variable, {"agent": subject, "xcomp": inner}, slot)


def make_splits(num_train: int = 24_000, seed: int = 4) -> dict[str, list[tuple[str, str]]]:
    """Return the pairs of each split. No sentence occurs twice."""
    draw = random.Random(seed)
    pairs, systematic = {}, {}
    while len(pairs) < num_train + 1500:
        pairs.update([Sentence(draw, draw.choice([0, 1, 1, 2]), None).pair()])
    while len(systematic) < 1000:
        kind = draw.choice(["subject", "object", "passive", "deep"])
        sentence = Sentence(draw, 4 if kind == "deep" else 0, None if kind == "deep" else kind)
        if sentence.special is None:
            systematic.update([sentence.pair()])
    systematic = [pair for pair in systematic.items() if pair[0] not in pairs]
    pairs = list(pairs.items())
    draw.shuffle(pairs)
    return {"train": pairs[1500:], "validation": pairs[:500], "test": pairs[500:1500], "test_systematic": systematic}
