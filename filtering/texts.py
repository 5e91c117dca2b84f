"""Forms of a text for filtering: normalized text, normal form, words, scripts, and hashes with their counts."""

import functools
import hashlib
import importlib.util
import re
import unicodedata
from collections.abc import Sequence
from types import ModuleType

import numpy as np

from metaphrase.tokenization.texts import SPACED_WORD

INSTALL_HINT = "Install it: pip install 'metaphrase[filter]'."
# Zero-width space, byte-order mark, soft hyphen. The zero-width joiners belong to the spelling of some languages.
_INVISIBLE = str.maketrans(dict.fromkeys("\u200b\ufeff\u00ad"))
# A word, or one letter of a script without spaces, or one other character.
_WORD = re.compile(rf"{SPACED_WORD.pattern}|[^\W_]|[^\w\s]")
# Japanese mixes these three, and Chinese has the last.
_SCRIPT_GROUPS = dict.fromkeys(("HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "IDEOGRAPHIC", "CJK"), "CJK")


def import_extra(name: str, purpose: str) -> ModuleType:
    """Import a module of the extra `filter`.

    Raises:
        ImportError: If it is not installed.
    """
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        raise ImportError(f"{purpose} needs the package {name.partition('.')[0]}. {INSTALL_HINT}")
    return importlib.import_module(name)


class _NormalForm(dict):
    """Table for `str.translate`: case is folded, a digit is 0, and only letters, marks and digits stay."""

    def __missing__(self, code: int) -> str | None:
        character = chr(code)
        category = unicodedata.category(character)
        value = None if category[0] in "PSZC" else "0" if category == "Nd" else character.casefold()
        self[code] = value
        return value


_NORMAL_FORM = _NormalForm()


def normal_form(text: str) -> str:
    """Return the letters and digits of a text with case folded and each digit as 0. Near duplicates have equal forms."""
    return text.translate(_NORMAL_FORM)


@functools.cache
def script_of(letter: str) -> str:
    """Return the script of a letter, such as "LATIN"; an empty text for marks, digits and letters without a script."""
    if not letter.isalpha():
        return ""
    name = unicodedata.name(letter, "").partition(" ")[0]
    return "" if name in ("MODIFIER", "FEMININE", "MASCULINE", "MICRO") else _SCRIPT_GROUPS.get(name, name)


class ForeignLetters(dict):
    """Table for `str.translate` that leaves only the letters of other scripts than the given ones."""

    def __init__(self, scripts: frozenset[str]):
        super().__init__()
        self._scripts = scripts | {""}

    def __missing__(self, code: int) -> str | None:
        self[code] = None if script_of(chr(code)) in self._scripts else chr(code)
        return self[code]


def split_words(text: str) -> list[str]:
    """Return the words and punctuation marks of a text, with case folded."""
    return _WORD.findall(text.casefold())


def hash_text(text: str) -> bytes:
    """Return a hash of 8 bytes."""
    return hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()


def normalize(text: str) -> str:
    """Return a text in NFC, with broken encoding repaired, straight quotes, and single spaces between words.

    Raises:
        ImportError: If ftfy is not installed.
    """
    if not text.isascii() or "&" in text:
        ftfy = import_extra("ftfy", "Normalization")
        options = {"fix_latin_ligatures": False, "fix_character_width": False, "uncurl_quotes": True}
        text = ftfy.fix_text(text, normalization="NFC", **options).translate(_INVISIBLE)
    return " ".join(text.split())


class SeenHashes:
    """Hashes that occurred before, as sorted runs. A new run is merged with runs of its size or less.

    All hashes stand in memory. A look-up takes a binary search in each of the few runs.
    """

    def __init__(self, hashes: bytes = b""):
        """Begin with hashes of an earlier run.

        Args:
            hashes: Hashes of 8 bytes one after the other.
        """
        self._runs = [np.sort(np.frombuffer(hashes, dtype=np.uint64))] if hashes else []

    def counts(self, hashes: Sequence[bytes]) -> np.ndarray:
        """Return how often each hash occurred before it: in earlier calls of `add`, and earlier in `hashes`.

        Args:
            hashes: Hashes of 8 bytes.
        """
        values = _as_array(hashes)
        order = np.argsort(values, kind="stable")
        ordered = values[order]
        counts = np.arange(len(values)) - np.searchsorted(ordered, ordered)
        for run in self._runs:
            counts += np.searchsorted(run, ordered, side="right") - np.searchsorted(run, ordered)
        result = np.empty_like(counts)
        result[order] = counts
        return result

    def add(self, hashes: Sequence[bytes]) -> None:
        """Add hashes."""
        run = np.sort(_as_array(hashes))
        while self._runs and len(self._runs[-1]) <= len(run):
            # The stable sort merges two sorted halves in linear time.
            run = np.sort(np.concatenate([self._runs.pop(), run]), kind="stable")
        if len(run):
            self._runs.append(run)


def _as_array(hashes: Sequence[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(hashes), dtype=np.uint64)
