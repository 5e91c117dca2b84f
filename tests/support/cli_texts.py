"""Sources for the command line, and what its tiny model makes of them."""

from tiny_generator import tiny_generator

# Line feeds alone part lines: the characters that Python takes for line ends too are inside them.
ODD_LINES = ["a small\u2028dog runs", "the cat\rsleeps", "a\x85cat\x0b\x0c", "", " \t", "the dog\u2029"]


def targets_of(texts, **options):
    return tiny_generator(kind="byte").generate(texts, **options)


def as_lines(texts):
    return [text.replace("\r", " ").replace("\n", " ") for text in texts]


def damaged(compressed):
    """A compressed file of which a byte was changed, so that the rest cannot be told any more."""
    return compressed[:12] + bytes([compressed[12] ^ 0xFF]) + compressed[13:]
