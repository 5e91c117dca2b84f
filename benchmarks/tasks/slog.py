"""Semantic parsing of sentences that are built as none in training, all of known words.

The 17 kinds are those of SLOG (Li et al. 2023, arXiv 2310.15040). The grammar and its words are those of `semantic_parsing`.
SLOG has the logical forms of COGS (the task `slog`) and the same nested (`slog_nested`). A question has `?` in the role that
it asks for. Each kind is a file in `systematic`, and `test_systematic` has all of them:

| kind | training shows | the kind asks for |
|---|---|---|
| `deeper_modifiers` | objects with 0, 1, 2 or 4 prepositional phrases, each of the noun before it | 5 to 12 |
| `modifiers_of_depth_3` | the same | 3 |
| `deeper_clauses` | 0, 1, 2 or 4 *that* clauses, each the object of the one before it | 5 to 12 |
| `clauses_of_depth_3` | the same | 3 |
| `deeper_embedding` | 0, 1, 2 or 4 relative clauses, each of the subject of the one before it | 5 to 12 |
| `embedding_of_depth_3` | the same | 3 |
| `modifier_of_subject` | prepositional phrases of direct objects alone | those of subjects |
| `modifier_of_recipient` | the same | those of indirect objects |
| `relative_clause_of_subject` | relative clauses of direct objects alone | those of subjects |
| `relative_clause_of_recipient` | the same | those of indirect objects |
| `relative_clause_with_recipient` | relative clauses without subject or direct object | those without indirect object |
| `question_of_recipient` | questions of subject and direct object of transitive verbs | *Who did Ava give a cake to ?* |
| `question_of_subject` | the same | subjects of verbs with no object or two, or with an infinitive |
| `question_of_passive_subject` | the same | *What was given to Ava ?* |
| `question_of_one_of_two_objects` | the same | *What did Ava give to Leo ?* |
| `question_of_clause` | the same, of the main clause | *What did Ava say that Leo ate ?* |
| `question_with_modifier` | the same, without modifiers | *Who ate the cake in a box ?* |
"""

import random

from .semantic_parsing import DATIVE, OBJECT, STRUCTURES, TRANSITIVE, UNERGATIVE, WITH_OBJECT, Sentence, usual

GAPS = ("agent", "theme")


def question_of_passive_subject(draw: random.Random) -> Sentence:
    frame = draw.choice([*TRANSITIVE[1:], *DATIVE[2:]])
    return Sentence(draw, frames=(frame,), question=frame.split()[0])


def question_with_modifier(draw: random.Random) -> Sentence:
    question = draw.choice(GAPS)
    modifier = draw.choice([{"modifiers": 1}, {"modifiers": 2}, {"relative": "agent"}, {"relative": "theme"}])
    modified = "theme" if question == "agent" else "subject"
    return Sentence(draw, frames=OBJECT, question=question, modified=modified, **modifier)


def with_modifiers(draw: random.Random, depth: int) -> Sentence:
    return Sentence(draw, frames=WITH_OBJECT, modifiers=depth)


def with_clauses(draw: random.Random, depth: int) -> Sentence:
    return Sentence(draw, clauses=depth)


def with_embedding(draw: random.Random, depth: int) -> Sentence:
    return Sentence(draw, frames=WITH_OBJECT, relative="theme", embedding=depth)


KINDS = {
    "deeper_modifiers": lambda draw: with_modifiers(draw, draw.randint(5, 12)),
    "modifiers_of_depth_3": lambda draw: with_modifiers(draw, 3),
    "deeper_clauses": lambda draw: with_clauses(draw, draw.randint(5, 12)),
    "clauses_of_depth_3": lambda draw: with_clauses(draw, 3),
    "deeper_embedding": lambda draw: with_embedding(draw, draw.randint(5, 12)),
    "embedding_of_depth_3": lambda draw: with_embedding(draw, 3),
    **{
        name: STRUCTURES[name]
        for name in ("modifier_of_subject", "modifier_of_recipient", "relative_clause_of_subject")
    },
    "relative_clause_of_recipient": lambda draw: Sentence(
        draw, frames=DATIVE[:2], relative=draw.choice(GAPS), modified="recipient"
    ),
    "relative_clause_with_recipient": lambda draw: Sentence(draw, frames=OBJECT, relative="recipient"),
    "question_of_recipient": lambda draw: Sentence(draw, frames=DATIVE[1:2], question="recipient"),
    "question_of_subject": lambda draw: Sentence(
        draw, frames=(*UNERGATIVE, *DATIVE[:2], "agent V to I"), question="agent"
    ),
    "question_of_passive_subject": question_of_passive_subject,
    "question_of_one_of_two_objects": lambda draw: Sentence(draw, frames=DATIVE[:2], question="theme"),
    "question_of_clause": lambda draw: Sentence(draw, frames=OBJECT, clauses=draw.randint(1, 2), question="theme"),
    "question_with_modifier": question_with_modifier,
}


def shown(draw: random.Random) -> Sentence:
    """Return a sentence as in training."""
    shape = draw.choices(["usual", "question", with_modifiers, with_clauses, with_embedding], [14, 3, 1, 1, 1])[0]
    if shape == "usual":
        return usual(draw)
    if shape == "question":
        return Sentence(draw, frames=OBJECT, question=draw.choice(GAPS))
    return shape(draw, 2 if shape is with_embedding and draw.random() < 0.5 else 4)


def make_splits(
    num_train: int = 24_000, num_of_kind: int = 200, seed: int = 7, nested: bool = False
) -> dict[str, list[tuple[str, str]]]:
    """Return the pairs of each split. No sentence occurs twice in a split or in training and another split.

    Args:
        num_train: Number of sentences of training.
        num_of_kind: Number of sentences of each kind.
        seed: Seed of all choices.
        nested: Whether logical forms are nested. The sentences are the same.
    """
    draw = random.Random(seed)
    splits: dict[str, list[tuple[str, str]]] = {}
    for name, size in ("shown", num_train + 1500), *((f"systematic/{kind}", num_of_kind) for kind in KINDS):
        make = KINDS.get(name.removeprefix("systematic/"), shown)
        pairs: dict[str, str] = {}
        while len(pairs) < size:
            pairs.update([make(draw).pair(nested)])
        splits[name] = list(pairs.items())
    pairs_shown = splits.pop("shown")
    return {
        "train": pairs_shown[1500:],
        "validation": pairs_shown[:500],
        "test": pairs_shown[500:1500],
        "test_systematic": [pair for pairs in splits.values() for pair in pairs],
        **splits,
    }
