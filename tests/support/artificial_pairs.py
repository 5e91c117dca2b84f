"""Pairs of an artificial language, whose words have a translation each."""

import random


def make_pairs(number, seed=0, num_words=400):
    """Return pairs of an artificial language: each word has a translation, which may stand anywhere."""
    generator = random.Random(seed)
    pairs = []
    for _ in range(number):
        words = [int(num_words * generator.random() ** 2) for _ in range(generator.randint(4, 9))]
        target = [f"t{word}" for word in words if generator.random() < 0.9] or ["t0"]
        generator.shuffle(target)
        pairs.append((" ".join(f"s{word}" for word in words), " ".join(target)))
    return pairs
