"""Types of options: each parses a word, and gives its name to the help. This file imports no heavy library."""

import argparse
import re
from pathlib import Path


def _check(is_valid: object, text: str, word: str) -> None:
    if not is_valid:
        raise argparse.ArgumentTypeError(f"must be {text}, got {word!r}")


def boolean(word: str) -> bool:
    """Parse a truth value."""
    values = dict.fromkeys(("yes", "true", "t", "y", "1"), True) | dict.fromkeys(("no", "false", "f", "n", "0"), False)
    _check(word.lower() in values, "true or false", word)
    return values[word.lower()]


def boolean_or_never(word: str) -> bool | str:
    """Parse a value of `early_stopping`."""
    return word if word == "never" else boolean(word)


def count(word: str) -> int:
    """Parse a whole number of at least 0."""
    _check(re.fullmatch(r"\d+", word, re.ASCII), "a whole number of at least 0", word)
    return int(word)


def file(word: str) -> str:
    """Check that a file exists."""
    _check(Path(word).exists() and not Path(word).is_dir(), "a file that exists", word)
    return word


def path(word: str) -> str:
    """Check a file or folder to write, which is not standard output."""
    _check(word not in ("", "-"), "a path", word)
    return word


def path_or_dash(word: str) -> str | None:
    """Parse a file to write; None is standard output."""
    return None if word == "-" else word


def model(word: str) -> str:
    """Check the folder or Hub id of a model."""
    is_path = word.startswith((".", "/", "~")) or word.count("/") > 1
    is_valid = Path(word).is_dir() if is_path else not Path(word).is_file()
    _check(is_valid, "a folder that exists, or a name on the Hub", word)
    return word


def column(word: str) -> int | str:
    """Parse the number or the name of a column."""
    return int(word) if word.isascii() and word.isdecimal() else word


def part(word: str) -> tuple[int, int]:
    """Parse a part of the input: its number, from 1, and the number of parts."""
    numbers = re.fullmatch(r"(\d+)/(\d+)", word, re.ASCII)
    number, num_parts = map(int, numbers.groups()) if numbers else (0, 0)
    _check(1 <= number <= num_parts, "K/N with K from 1 to N", word)
    return number, num_parts


def layer(word: str) -> int | None:
    """Parse the number of a layer; None is the mean of all."""
    _check(re.fullmatch(r"-?\d+|mean", word, re.ASCII), "a whole number or mean", word)
    return None if word == "mean" else int(word)


def layers(word: str) -> list[int]:
    """Parse numbers and ranges of layers."""
    _check(re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", word, re.ASCII), "numbers of layers, such as 0-5,8", word)
    ends = [[*map(int, span.split("-"))] for span in word.split(",")]
    return [number for span in ends for number in range(span[0], span[-1] + 1)]


def repo_id(word: str) -> str:
    """Check the name of a repository on the Hub."""
    _check("/" in word, "user/name or organization/name", word)
    return word
