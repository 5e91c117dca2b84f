"""Semantic parsing: an English sentence becomes a logical form.

The task and its 21 kinds of new combinations are those of COGS (Kim and Linzen 2020, arXiv 2010.05465, table 1). Two more
are of SLOG (see `slog`), and one has clauses and modifiers at once. The grammar and its words are our own. `test` is like
training. Each file in `systematic` is one kind. Its words stand in training once, in one construction, and the file has
them in another, or its sentences are built as none in training. `test_systematic` has the 21 kinds together.

The same sentences have logical forms of two formalisms. *A cat saw the cake .* becomes:

- positional, as in COGS: `* cake ( x _ 4 ) ; cat ( x _ 1 ) AND see . agent ( x _ 2 , x _ 1 ) AND see . theme ( x _ 2 , x _ 4 )`.
  A variable has the position of its word, from 0.
- nested, without variables, as in Qiu et al. 2022 (arXiv 2112.07610): `see ( agent = cat , theme = * cake )`. A star marks
  a definite noun. The modified noun fills its role in the relative clause, too, and the subject fills that of the infinitive:
  *the cake that a cat saw* is `* cake ( nmod = see ( agent = cat , theme = * cake ) )`. There it stands without modifiers.
"""

# ruff: noqa: SIM905 (words are read more easily in one string)

import random
from dataclasses import dataclass, field

ANIMATE = """cat dog girl boy baby child teacher student king queen prince baker sailor doctor nurse farmer lawyer judge pilot
poet painter tailor soldier captain guest tourist neighbor cousin uncle aunt mother father brother sister bird horse frog bear
mouse rabbit fox wolf lion tiger goat sheep cow hen goose owl crow eagle whale seal otter beaver squirrel turtle lizard snake
spider bee ant dragon giant wizard pirate thief guard waiter singer dancer clown writer""".split()
INANIMATE = """cake cookie pie apple pear plum lemon melon grape bean onion carrot soup sandwich pizza muffin pancake candy
rose tulip daisy leaf seed ball kite doll drum flute violin guitar book letter map coin ring crown hat scarf coat shoe glove
button needle brush pen pencil crayon hammer nail bucket rope bottle cup bowl plate spoon fork knife clock lamp candle mirror
key purse basket box toy puzzle flag bell stone shell feather""".split()
PLACES = """table chair bed shelf desk bench sofa stage car truck bus boat train house barn tent castle tower garden yard
field road bridge beach island hill cave pond room kitchen attic cellar hall carpet rug tray stool stand wagon nest
crate""".split()
NAMES = """Emma Liam Olivia Noah Ava Lucas Mia Ethan Zoe Oliver Sophia Mason Ella Henry Lily Jack Nora Leo Ruby Oscar Ivy Hugo
Clara Felix Alice Simon Rosa Victor Julia Martin Helen Peter Laura Thomas Sarah Daniel Grace Samuel Anna David""".split()
PREPOSITIONS = ("in", "on", "beside")

# The places of a frame: `V` past tense, `P` participle, `C` a clause, `I` an infinitive; roles are noun phrases.
UNERGATIVE = ("agent V",)
OMISSIBLE = ("agent V", "agent V theme", "theme was P", "theme was P by agent")
TRANSITIVE = ("agent V theme", "theme was P", "theme was P by agent")
UNACCUSATIVE = ("theme V", *TRANSITIVE)
DATIVE = (
    "agent V recipient theme",
    "agent V theme to recipient",
    "theme was P to recipient",
    "theme was P to recipient by agent",
    "recipient was P theme",
    "recipient was P theme by agent",
)
CLAUSAL = ("agent V that C",)
CONTROL = ("agent V to I",)
# Lemma, or lemma/past/participle where these do not end in -ed.
VERBS = {
    UNERGATIVE: """sleep/slept laugh run/ran smile dance sneeze walk talk jump swim/swam snore cry/cried nap/napped wink
        giggle sing/sang shout wave""",
    OMISSIBLE: """eat/ate/eaten paint draw/drew/drawn clean cook hunt read/read/read study/studied/studied knit/knitted/knitted
        sketch investigate pack dust call plow weave/wove/woven""",
    TRANSITIVE: """see/saw/seen find/found/found hold/held/held help move like notice touch admire love hear/heard/heard
        catch/caught/caught chase follow hug/hugged/hugged kiss lift miss/missed/missed need observe push save throw/threw/threw
        poke trust visit watch want/wanted/wanted respect praise discover worship""",
    UNACCUSATIVE: """roll freeze/froze/frozen burn break/broke/broken float grow/grew/grown slide/slid/slid drop/dropped/dropped
        melt crack burst/burst/burst redden bounce tilt spin/spun/spun""",
    DATIVE: """give/gave/given sell/sold/sold send/sent/sent offer lend/lent/lent pass hand bring/brought/brought
        show/showed/shown promise mail rent loan award feed/fed/fed post""",
    CLAUSAL: """say/said believe think/thought hope know/knew claim imagine declare mean/meant prove notice dream
        admit/admitted/admitted""",
    CONTROL: """want try/tried plan/planned/planned hope need/needed prefer/preferred intend""",
}


def forms(entry: str) -> tuple[str, str, str]:
    """Return lemma, past tense and participle of an entry of `VERBS`."""
    lemma, *irregular = entry.split("/")
    regular = lemma + ("d" if lemma.endswith("e") else "ed")
    past = irregular[0] if irregular else regular
    return lemma, past, irregular[-1] if irregular else regular


VERB_FRAMES = [
    (forms(entry), frame) for frames, entries in VERBS.items() for entry in entries.split() for frame in frames
]


@dataclass(frozen=True)
class Kind:
    """New combination of one word: training shows it in one place, and the test asks for it in another.

    Args:
        words: Words of the kind, each shown once. Verbs are entries as in `VERBS`.
        shown: Frame of training, or None where the word is shown alone, with its meaning.
        asked: Frames of the test.
        role: The role that a noun has in `shown` and in `asked`. None for a verb.
    """

    words: tuple[str, ...]
    shown: str | None
    asked: tuple[str, ...]
    role: tuple[str, str] | None = None


OBJECT = ("agent V theme",)
SUBJECT = ("agent V theme", "agent V", "agent V theme to recipient")
KINDS = {
    "subject_to_object_common": Kind(("hedgehog", "badger"), "agent V theme", OBJECT, ("agent", "theme")),
    "subject_to_object_proper": Kind(("Lena", "Otto"), "agent V theme", OBJECT, ("agent", "theme")),
    "object_to_subject_common": Kind(("cricket", "weasel"), "agent V theme", SUBJECT, ("theme", "agent")),
    "object_to_subject_proper": Kind(("Irene", "Boris"), "agent V theme", SUBJECT, ("theme", "agent")),
    "alone_to_subject_common": Kind(("shark", "walrus"), None, SUBJECT, ("", "agent")),
    "alone_to_subject_proper": Kind(("Paula", "Edgar"), None, SUBJECT, ("", "agent")),
    "alone_to_object_common": Kind(("moth", "camel"), None, OBJECT, ("", "theme")),
    "alone_to_object_proper": Kind(("Greta", "Ivan"), None, OBJECT, ("", "theme")),
    "alone_to_infinitive": Kind(("crawl", "yawn"), None, CONTROL),
    "active_to_passive": Kind(("bless", "rescue"), "agent V theme", TRANSITIVE[1:]),
    "passive_to_active": Kind(("squeeze", "guide"), "theme was P", OBJECT),
    "omitted_object_to_transitive": Kind(("bake", "carve"), "agent V", OBJECT),
    "unaccusative_to_transitive": Kind(("shatter", "soften"), "theme V", OBJECT),
    "double_object_to_prepositional": Kind(("teach/taught/taught", "grant"), DATIVE[0], DATIVE[1:2]),
    "prepositional_to_double_object": Kind(("ship/shipped/shipped", "assign"), DATIVE[1], DATIVE[:1]),
    "agent_to_unaccusative_subject": Kind(("cobra", "panther"), "agent V theme", ("theme V",), ("agent", "theme")),
    "theme_to_omitted_object_subject": Kind(("hippo", "parrot"), "agent V theme", ("agent V",), ("theme", "agent")),
    "theme_to_unergative_subject": Kind(("hero", "monk"), "agent V theme", ("agent V",), ("theme", "agent")),
}
# "agent V" alone would not say which verbs.
VERBS_OF = {"theme_to_omitted_object_subject": OMISSIBLE, "theme_to_unergative_subject": UNERGATIVE}

# Frames with an object after the verb, which training modifies.
WITH_OBJECT = ("agent V theme", *DATIVE[:2])


# Order of the roles of a verb in the positional formalism.
ROLES = ("agent", "theme", "recipient", "ccomp", "xcomp")


@dataclass(eq=False)
class Node:
    """Noun or verb of a logical form.

    Args:
        word: The noun, or the lemma of the verb.
        position: Position of the word in the sentence, from 0.
        is_definite: Whether *the* stands before the noun. None for a verb.
        roles: Names of roles with their fillers, in the order of a frame. A filler is a node or a name.
    """

    word: str
    position: int
    is_definite: bool | None = None
    roles: list[tuple[str, "Node | str"]] = field(default_factory=list)

    def facts(self) -> list[str]:
        """Return what the positional formalism says of the word, less its definite article."""
        facts = [f"{self.word} ( x _ {self.position} )"] if self.is_definite is False else []
        for role, filler in sorted(self.roles, key=lambda role: ROLES.index(role[0]) if role[0] in ROLES else 0):
            variable = f"x _ {filler.position}" if isinstance(filler, Node) else filler
            facts.append(f"{self.word} . {role} ( x _ {self.position} , {variable} )")
        return facts

    def nested(self, told: set["Node"]) -> str:
        """Return the word with its roles, or alone if it is one of the nodes of `told`, which it joins."""
        word = f"* {self.word}" if self.is_definite else self.word
        if self in told or not self.roles:
            return word
        told.add(self)
        fillers = [(role, filler.nested(told) if isinstance(filler, Node) else filler) for role, filler in self.roles]
        return f"{word} ( {' , '.join(f'{role} = {filler}' for role, filler in fillers)} )"


@dataclass
class Sentence:
    """Random sentence with its logical form.

    Args:
        draw: Source of all choices.
        fillers: Words for the roles of the innermost clause.
        verb: Entry of the verb of the innermost clause. Drawn if None.
        frames: Frames that the innermost clause may have. All if empty.
        verbs_of: Row of `VERBS` that the verb is drawn from. All if None.
        clauses: Number of clauses around the innermost one.
        modifiers: Number of prepositional phrases, each of the noun before it.
        modified: The role that the first prepositional phrase belongs to, if that is no subject. `subject` for subjects alone.
        relative: The noun's role in a relative clause after the modified noun. None without such a clause.
        embedding: Number of relative clauses, each of the agent of the one before it.
        question: The role in the innermost clause that the sentence asks for. None for a statement.
    """

    draw: random.Random
    fillers: dict[str, str] = field(default_factory=dict)
    verb: str | None = None
    frames: tuple[str, ...] = ()
    verbs_of: tuple[str, ...] | None = None
    clauses: int = 0
    modifiers: int = 0
    modified: str = "theme"
    relative: str | None = None
    embedding: int = 1
    question: str | None = None

    def __post_init__(self):
        self.words: list[str] = []
        self.nodes: list[Node] = []
        if self.question:
            self.add(self.draw.choice(["who", "what"]) if self.question == "theme" else "who")
        self.root = self.clause(self.clauses)

    def pair(self, nested: bool = False) -> tuple[str, str]:
        """Return the text and the logical form.

        The positional form has the definite nouns first, then all facts in the order of their words.
        """
        text = " ".join(self.words)
        text = text[0].upper() + text[1:] + (" ?" if self.question else " .")
        if nested:
            return text, self.root.nested(set())
        nodes = sorted(self.nodes, key=lambda node: node.position)
        definite = [f"* {node.word} ( x _ {node.position} )" for node in nodes if node.is_definite]
        return text, " ; ".join([*definite, " AND ".join(fact for node in nodes for fact in node.facts())])

    def add(self, word: str, lemma: str | None = None, is_definite: bool | None = None) -> Node:
        """Append a word and return its node, which is part of the logical form if it has a lemma."""
        node = Node(lemma or word, len(self.words), is_definite)
        self.words.append(word)
        if lemma:
            self.nodes.append(node)
        return node

    def clause(self, depth: int) -> Node:
        """Append a clause and return its verb."""
        draw, is_innermost = self.draw, not depth
        if not is_innermost:
            (lemma, past, participle), frame = draw.choice([entry for entry in VERB_FRAMES if entry[1] in CLAUSAL])
        elif self.verb is not None:
            (lemma, past, participle), frame = forms(self.verb), draw.choice(self.frames)
        else:
            frames = self.frames or tuple({frame: None for _, frame in VERB_FRAMES if frame not in CLAUSAL})
            # First the frame, then a verb, so that rare frames occur often enough.
            frame = draw.choice(frames)
            rows = [self.verbs_of] if self.verbs_of else VERBS
            lemma, past, participle = draw.choice(
                [forms(entry) for row in rows if frame in row for entry in VERBS[row].split()]
            )
        asked = self.question if is_innermost else None
        if self.question and depth == self.clauses and frame.split()[0] != asked:
            self.add("did")
            past = lemma
        roles: dict[str, Node | str] = {}
        for number, place in enumerate(frame.split()):
            if place == asked:
                roles[place] = "?"
            elif place in ("V", "P"):
                verb = self.add(past if place == "V" else participle, lemma)
            elif place == "C":
                roles["ccomp"] = self.clause(depth - 1)
            elif place == "I":
                infinitive = self.fillers.get("infinitive") or draw.choice(VERBS[UNERGATIVE].split()).split("/")[0]
                roles["xcomp"] = self.add(infinitive, infinitive)
                roles["xcomp"].roles.append(("agent", roles["agent"]))
            elif place in ("agent", "theme", "recipient"):
                roles[place] = self.noun_phrase(place, "subject" if not number else place, is_innermost)
            else:
                self.add(place)
        verb.roles += roles.items()
        return verb

    def noun_phrase(self, role: str, place: str, is_innermost: bool) -> Node | str:
        """Append a noun phrase and return its noun or name. `place` is its role, or `subject` before the verb."""
        draw = self.draw
        is_modified = is_innermost and place == self.modified and (self.modifiers or self.relative)
        word = self.fillers.get(role) if is_innermost else None
        if word is None:
            nouns = (ANIMATE, ANIMATE, NAMES) if role != "theme" else (ANIMATE, INANIMATE, INANIMATE, NAMES)
            word = draw.choice(draw.choice(nouns[:-1] if is_modified else nouns))
        if word[0].isupper():
            self.add(word)
            return word
        noun = self.described(word)
        if is_modified:
            if self.relative:
                self.relative_clause(noun, self.embedding)
            self.prepositional_phrases(noun)
        return noun

    def described(self, noun: str) -> Node:
        """Append determiner and noun and return the noun."""
        determiner = self.draw.choice(["a", "the"])
        self.add("an" if determiner == "a" and noun[0] in "aeiou" else determiner)
        return self.add(noun, noun, determiner == "the")

    def prepositional_phrases(self, noun: Node) -> None:
        for _ in range(self.modifiers):
            preposition = self.draw.choice(PREPOSITIONS)
            self.add(preposition)
            place = self.described(self.draw.choice(PLACES))
            noun.roles.append((f"nmod . {preposition}", place))
            noun = place

    def relative_clause(self, noun: Node, depth: int) -> None:
        """Append a clause about a noun: *that saw a cat*, *that a cat saw* or *that a cat gave a book to*."""
        self.add("that")
        verbs, frame = (DATIVE, DATIVE[1]) if self.relative == "recipient" else (TRANSITIVE, OBJECT[0])
        lemma, past, _ = forms(self.draw.choice(VERBS[verbs].split()))
        roles: dict[str, Node] = {}
        for place in frame.split():
            if place == self.relative:
                roles[place] = noun
            elif place == "V":
                verb = self.add(past, lemma)
            elif place == "to":
                self.add("to")
            else:
                roles[place] = self.described(self.draw.choice(INANIMATE if verbs is DATIVE and roles else ANIMATE))
                if place == "agent" and depth > 1:
                    self.relative_clause(roles[place], depth - 1)
        noun.roles.append(("nmod", verb))
        verb.roles += roles.items()


# Kinds whose words are all known, but which are built as no sentence of training.
STRUCTURES = {
    "modifier_of_subject": lambda draw: Sentence(
        draw, frames=("agent V theme", "agent V"), modifiers=draw.randint(1, 2), modified="subject"
    ),
    "modifier_of_recipient": lambda draw: Sentence(
        draw, frames=DATIVE[:2], modifiers=draw.randint(1, 2), modified="recipient"
    ),
    "relative_clause_of_subject": lambda draw: Sentence(
        draw, frames=("agent V theme", "agent V"), relative=draw.choice(["agent", "theme"]), modified="subject"
    ),
    "deeper_modifiers": lambda draw: Sentence(draw, frames=WITH_OBJECT, modifiers=draw.randint(3, 12)),
    "deeper_clauses": lambda draw: Sentence(draw, clauses=draw.randint(3, 12)),
    "clauses_with_modifiers": lambda draw: Sentence(draw, frames=WITH_OBJECT, clauses=2, modifiers=2),
}

# These are not of COGS, and no part of `test_systematic`.
OTHERS = ("modifier_of_recipient", "relative_clause_of_subject", "clauses_with_modifiers")


def alone(word: str) -> tuple[str, str]:
    """Return a word without a sentence, and its meaning."""
    if word[0].isupper():
        return word, word
    if word in ANIMATE + INANIMATE + PLACES or word in {
        word for kind in KINDS.values() if kind.role for word in kind.words
    }:
        return word, f"LAMBDA a . {word} ( a )"
    return word, f"LAMBDA a . LAMBDA e . {word} . agent ( e , a )"


def usual(draw: random.Random) -> Sentence:
    """Return a sentence as in training: up to two clauses around it, up to two modifiers of an object or a relative clause."""
    depth = draw.choice([0, 0, 1, 1, 2])
    shape = draw.choice(["clauses", "modifiers", "relative"] if depth else [""])
    if shape == "clauses":
        return Sentence(draw, clauses=depth)
    if shape == "modifiers":
        return Sentence(draw, frames=WITH_OBJECT, modifiers=depth)
    if shape == "relative":
        return Sentence(draw, frames=WITH_OBJECT, relative=draw.choice(["agent", "theme"]))
    return Sentence(draw)


def shown(kind: Kind, word: str, draw: random.Random, nested: bool) -> tuple[str, str]:
    """Return the one training pair that has the word of a kind."""
    if kind.shown is None:
        return alone(word)
    if kind.role is None:
        return Sentence(draw, verb=word, frames=(kind.shown,)).pair(nested)
    return Sentence(draw, {kind.role[0]: word}, frames=(kind.shown,)).pair(nested)


def asked(name: str, draw: random.Random) -> Sentence:
    """Return a sentence of a kind of new combinations, with up to two clauses around it."""
    if name in STRUCTURES:
        return STRUCTURES[name](draw)
    kind = KINDS[name]
    word, verb, fillers = draw.choice(kind.words), None, {}
    if name == "alone_to_infinitive":
        fillers["infinitive"] = word
    elif kind.role is None:
        verb = word
    else:
        fillers[kind.role[1]] = word
    return Sentence(draw, fillers, verb, kind.asked, VERBS_OF.get(name), clauses=draw.choice([0, 0, 0, 1, 2]))


def make_splits(
    num_train: int = 24_000, num_of_kind: int = 200, seed: int = 4, nested: bool = False
) -> dict[str, list[tuple[str, str]]]:
    """Return the pairs of each split. No sentence occurs twice.

    Args:
        num_train: Number of sentences of training. The words that stand alone and those of the kinds come on top.
        num_of_kind: Number of sentences of each kind.
        seed: Seed of all choices.
        nested: Whether logical forms are nested. The sentences are the same.
    """
    draw = random.Random(seed)
    pairs = {}
    while len(pairs) < num_train + 1500:
        pairs.update([usual(draw).pair(nested)])
    pairs = list(pairs.items())
    words = [
        *draw.sample([*ANIMATE, *INANIMATE, *PLACES], 80),
        *draw.sample(NAMES, 20),
        "sleep",
        "laugh",
        "smile",
        "jump",
    ]
    train = pairs[1500:] + [alone(word) for word in words]
    train += [shown(kind, word, draw, nested) for kind in KINDS.values() for word in kind.words]
    draw.shuffle(train)
    splits = {"train": train, "validation": pairs[:500], "test": pairs[500:1500], "test_systematic": []}
    for name in (*KINDS, *STRUCTURES):
        sentences = {}
        while len(sentences) < num_of_kind:
            sentences.update([asked(name, draw).pair(nested)])
        splits[f"systematic/{name}"] = list(sentences.items())
        if name not in OTHERS:
            splits["test_systematic"] += sentences.items()
    return splits
