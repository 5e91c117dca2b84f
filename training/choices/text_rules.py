"""Rules that choose validation pairs, tokenizers, limits of length and scores from the text of the pairs."""

import math
from typing import Any

from metaphrase.data.profile import CorpusProfile, SideProfile
from metaphrase.tokenization.tokenizer_settings import KINDS_THAT_FILL_A_VOCABULARY
from metaphrase.training.choices.rules import OpenRecipe
from metaphrase.training.recipe.checks import VALIDATION_FIELDS

# Share of new words on a side whose words are built from words of the other side, as in inflection.
_MANY_NEW_WORDS = 0.2
# In characters. Entries of a dictionary are shorter.
_SHORT_TEXT = 30
# In words, as the mean of a side.
_SINGLE = 1.5
# Share of the targets' characters that the sources have too. Languages of one script share nearly all.
_SHARED_SCRIPT = 0.9
_BYTES_PER_PIECE = 2.5
# In tokens. Attention takes time and memory with the square of the length.
_LONGEST = 1024
_TEXT_NAMES = {"word": "symbols", "char": "short strings", "byte_bpe": "text"}
# A text is a label if each occurs so often.
_LABEL_REPETITIONS = 20
# A script with more letters writes words by signs of their own, as Chinese does. Longer texts are sentences, not words.
_MANY_LETTERS, _LOGOGRAPHIC_SENTENCE = 500, 8
# Scripts with more characters between two spaces put none between words.
_LONG_WORD = 12
# From Thai on.
_EASTERN = "\u0e00"


def choose_from_text(recipe: OpenRecipe, profile: CorpusProfile) -> None:
    """Choose validation pairs, tokenizers, limits of length, and scores."""
    if recipe.is_open(*VALIDATION_FIELDS):
        pairs = profile.pairs
        size = min(1000, max(pairs // 20, min(50, pairs // 5)))
        recipe.choose(f"no validation pairs are given, and there are {pairs:,} pairs", num_validation=size)
    source, target = profile.source, profile.target
    kinds = side_kind(source, target), side_kind(target, source)
    if recipe.is_open("tokenizer_name_or_path", "model_name_or_path"):
        choose_tokenizers(recipe, profile, kinds)
    if recipe.is_open("model_name_or_path"):
        kind = recipe.recipe.tokenizer_kind
        limits = max_length(source, kind), max_length(target, recipe.recipe.target_tokenizer_kind or kind)
        shown = {"max_source_length": min(_LONGEST, limits[0]), "max_target_length": min(_LONGEST, limits[1])}
        recipe.choose(
            "nearly all texts are shorter (99.9 %)" if max(limits) <= _LONGEST else "the longest that is usual", **shown
        )
        if limits[0] > _LONGEST >= limits[1]:
            recipe.choose("some sources are longer, and their beginnings are read", too_long="truncate")
    scores = {"word": ["exact_match", "wer"], "char": ["exact_match", "cer"]}.get(
        kinds[1], ["bleu", "chrf", "exact_match"]
    )
    recipe.choose(f"targets are {_TEXT_NAMES[kinds[1]]}", metrics=scores)
    has_bleu = "bleu" in recipe.recipe.metrics
    if has_bleu and kinds[1] == "byte_bpe" and (tokenize := bleu_tokenize(target)):
        recipe.choose("targets have no spaces between words", bleu_tokenize=tokenize)


def choose_tokenizers(recipe: OpenRecipe, profile: CorpusProfile, kinds: tuple[str, str]) -> None:
    """Choose kinds of tokenizers, one vocabulary or two, and its size. Each field that is given stays.

    Args:
        recipe: The recipe.
        profile: Profile of the pairs.
        kinds: The kinds that suit sources and targets.
    """
    settings = recipe.recipe
    # The marks of terms are tokens of one vocabulary, and its pieces serve any text.
    must_join = settings.joint_vocabulary or "terms" in settings.augmentation
    reason = f"sources are {_TEXT_NAMES[kinds[0]]}, targets {_TEXT_NAMES[kinds[1]]}"
    if settings.subword_sampling is not None:
        kinds, reason = ("byte_bpe", "byte_bpe"), "only pieces can be sampled"
    elif must_join and kinds[0] != kinds[1]:
        kinds, reason = ("byte_bpe", "byte_bpe"), "both sides have one vocabulary"
    if settings.tokenizer_kind is not None:
        kinds = (settings.tokenizer_kind, settings.target_tokenizer_kind or settings.tokenizer_kind)
        reason = "the kind is given"
    elif settings.target_tokenizer_kind is not None:
        kinds = (kinds[0], settings.target_tokenizer_kind)
    has_own_target = settings.target_tokenizer_kind is not None or settings.target_vocab_size is not None
    must_separate = has_own_target or kinds[0] != kinds[1]
    has_one_script = kinds[0] != "word" and profile.shared_characters >= _SHARED_SCRIPT
    values: dict[str, Any] = {"tokenizer_kind": kinds[0]}
    values["joint_vocabulary"] = bool(must_join or (has_one_script and not must_separate))
    if kinds[0] != kinds[1]:
        values["target_tokenizer_kind"] = kinds[1]
    if any(kind in KINDS_THAT_FILL_A_VOCABULARY for kind in kinds):
        values["vocab_size"] = vocabulary_size(profile)
    shared = f"{100 * profile.shared_characters:.0f} % of the targets' characters occur in the sources"
    recipe.choose(f"{reason}; {shared}", **values)
    if kinds[0] == "char" and is_spelled_by_syllables(profile):
        letters = f"{len(profile.source.alphabet):,} characters consist of {profile.source.num_letters} letters"
        recipe.choose(f"the sources' {letters}", normalization="nfd")


def side_kind(side: SideProfile, other: SideProfile) -> str:
    """Return the kind of tokenizer for one side: `word` for symbols, `char` for short strings, `byte_bpe` for text."""
    is_single, is_sentence = side.mean_words < _SINGLE, side.num_letters > _MANY_LETTERS
    if side.is_closed and is_single and side.repetitions >= _LABEL_REPETITIONS:
        return "word"
    if side.mean_characters <= (_LOGOGRAPHIC_SENTENCE if is_sentence else _SHORT_TEXT):
        is_built = other.mean_words < _SINGLE and other.new_words > _MANY_NEW_WORDS
        is_built = is_built and len(side.alphabet & other.alphabet) > len(other.alphabet) / 2
        if is_single or (is_built and side.num_words > 2 * len(side.alphabet)):
            return "char"
    return "word" if side.is_closed else "byte_bpe"


def bleu_tokenize(target: SideProfile) -> str | None:
    """Return sacreBLEU's tokenizer for text without spaces between words; None for its default."""
    # Code has long words too.
    num_eastern = sum(character >= _EASTERN for character in target.alphabet)
    if target.mean_characters <= _LONG_WORD * target.mean_words or 2 * num_eastern < len(target.alphabet):
        return None
    has_kana = any("\u3040" <= character <= "\u30ff" for character in target.alphabet)
    has_han = any("\u4e00" <= character <= "\u9fff" for character in target.alphabet)
    return "zh" if has_han and not has_kana else "char"


def is_spelled_by_syllables(profile: CorpusProfile) -> bool:
    """Return True if a source character stands for several letters, as in Hangul, and Unicode can take it apart.

    Targets must stay as they are, since they are compared with the references.
    """
    return profile.source.num_letters * 4 <= len(profile.source.alphabet) and profile.target.is_decomposed


def vocabulary_size(profile: CorpusProfile) -> int:
    """Return the entries of a vocabulary of pieces: they grow with the square root of the text, from 1,000 to 32,000."""
    characters = profile.pairs * (profile.source.mean_characters + profile.target.mean_characters)
    return 500 * max(2, min(64, round(3 * math.sqrt(characters) / 500)))


def max_length(side: SideProfile, kind: str | None) -> int:
    """Return a limit in tokens that hardly any text exceeds, a multiple of 16."""
    pieces = side.long_bytes / _BYTES_PER_PIECE
    tokens = {"word": side.long_words, "char": side.long_letters, "byte": side.long_bytes}.get(kind, pieces)
    return 16 * math.ceil((1.2 * tokens + 8) / 16)
