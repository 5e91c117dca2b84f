"""Recall: a long text holds a mark at a random place, and the target is the sentence behind the mark.

All sentences are random words of one vocabulary, so nothing but the mark tells which sentence is the target. Validation and test
have sources of 8,000 tokens, words and full stops counted, less the rest that is too short for a sentence. Training has sources
of three ranges of lengths, to begin with the shortest: where few tokens compete, a network soon learns to look for the mark.
"""

import random

from .semantic_parsing import ANIMATE, INANIMATE, NAMES, PLACES

WORDS = [*ANIMATE, *INANIMATE, *NAMES, *PLACES]
MARK, STOP = "remember", "."
LONGEST = 8000
# Least and most words of a sentence.
_SENTENCE = (8, 12)
# Pairs of training, with the least and most tokens of their sources.
_TRAINING = {"train_short": (40_000, 30, 60), "train_medium": (3000, 60, 600), "train": (600, 600, LONGEST)}
_HELD_OUT = {"validation": 32, "test": 200}


def make_pair(draw: random.Random, length: int) -> tuple[str, str]:
    """Return a source of nearly `length` tokens, at most, and the sentence behind its mark."""
    sentences, rest = [], length - 1
    while rest > 1 + _SENTENCE[1]:
        sentences.append([*draw.sample(WORDS, draw.randint(*_SENTENCE)), STOP])
        rest -= len(sentences[-1])
    chosen = draw.choice(sentences)
    target = " ".join(chosen)
    chosen.insert(0, MARK)
    return " ".join(word for sentence in sentences for word in sentence), target


def make_splits(seed: int = 6) -> dict[str, list[tuple[str, str]]]:
    """Return the pairs of each split."""
    draw = random.Random(seed)
    splits = {split: [make_pair(draw, LONGEST) for _ in range(size)] for split, size in _HELD_OUT.items()}
    for split, (pairs, least, most) in _TRAINING.items():
        # Uniform logarithms: each doubling of the length has as many pairs.
        lengths = [round(least * (most / least) ** draw.random()) for _ in range(pairs)]
        splits[split] = [make_pair(draw, length) for length in lengths]
    return splits
