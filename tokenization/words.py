"""Readable tokens: what one token is, by itself, for people to look at.

Words: which of a text's words each of its tokens belongs to.

A word is what white space parts, or, of a text that was split into pieces (`an@@ trie@@ b .`), what they are joined to. A
white-space token goes with the word that it stands before, as it does in byte-level and SentencePiece vocabularies. A token that
spans several words counts for the first of them.
"""

import re
from bisect import bisect_left, bisect_right
from itertools import takewhile

from transformers import PreTrainedTokenizerBase

from metaphrase.tokenization.tokenizer_pipeline import SPACE_MARK, find_joiner

# What byte-level tokenizers write for a space, and what a decoder writes for bytes that are no character.
_BYTE_LEVEL_SPACE, _REPLACEMENT = "\u0120", "\ufffd"


def readable_tokens(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    """Each token by itself, with a mark in place of a space.

    A byte-level tokenizer's token is decoded; one that is only a part of a character stays in the tokenizer's own alphabet, as
    do all tokens of the other kinds of tokenizers, which can be read as they are.
    """
    pieces = tokenizer.convert_ids_to_tokens(ids)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or "ByteLevel" not in repr(backend.decoder):
        return pieces
    shown = []
    for token, piece in zip(ids, pieces, strict=True):
        text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        is_whole = text and _REPLACEMENT not in text
        shown.append(text.replace(" ", SPACE_MARK) if is_whole else piece.replace(_BYTE_LEVEL_SPACE, SPACE_MARK))
    return shown


_PIECE = re.compile(r"\S+")
# What a decoder writes for bytes that are no character yet.
_REPLACEMENT = "\ufffd"


def words_of_source(
    tokenizer: PreTrainedTokenizerBase, text: str, ids: list[int], prefix: str = ""
) -> tuple[list[str], list[int | None] | None]:
    """The words of a source, and for each of its tokens the index of its word.

    Args:
        tokenizer: What made the ids.
        text: Without the prefix.
        ids: Of prefix and text together, with special tokens.
        prefix: Stands before the text; its tokens belong to no word.

    Returns:
        The words, and a list as long as `ids` with `None` for special tokens and those of the prefix; `None` instead of the list
        where the tokenizer tells no offsets and its tokens do not make up the words of the text.
    """
    return _words_of_text(tokenizer, text, ids, "text", prefix)


def words_of_target(
    tokenizer: PreTrainedTokenizerBase, text: str, ids: list[int]
) -> tuple[list[str], list[int | None] | None]:
    """As `words_of_source`, for a target text that was encoded."""
    return _words_of_text(tokenizer, text, ids, "text_target", "")


def words_of_decoded(
    tokenizer: PreTrainedTokenizerBase, text: str, ids: list[int]
) -> tuple[list[str], list[int | None]]:
    """As `words_of_source`, for ids that a model wrote and the text that they were decoded to."""
    words = text.split()
    found = _ids_by_decoding(tokenizer, ids)
    return words, [None if index is None or index >= len(words) else index for index in found]


def _words_of_text(
    tokenizer: PreTrainedTokenizerBase, text: str, ids: list[int], argument: str, prefix: str
) -> tuple[list[str], list[int | None] | None]:
    backend = getattr(tokenizer, "backend_tokenizer", None) if tokenizer.is_fast else None
    joiner = None if backend is None else find_joiner(backend)
    words, pieces = _split(text, joiner)
    found = None
    if backend is not None:
        found = _ids_by_offsets(tokenizer, prefix + text, ids, argument, len(prefix), pieces)
    if found is None:
        found = _ids_without_offsets(tokenizer, ids, len((prefix + text).split()), len(words))
    return words, found


def _split(text: str, joiner: str | None) -> tuple[list[str], list[tuple[int, int | None]]]:
    """The words, and for each white-space piece where it begins and the index of its word."""
    words: list[str] = []
    pieces: list[tuple[int, int | None]] = []
    open_end = None  # where the piece ended that the next one continues
    for match in _PIECE.finditer(text):
        start, end = match.span()
        is_open = joiner is not None and match.group().endswith(joiner) and text[end : end + 1] in ("", " ")
        written = match.group().removesuffix(joiner) if is_open else match.group()
        # A joiner alone at the beginning joins whatever follows.
        if open_end is not None and (start == open_end + 1 or not words[-1]):
            words[-1] += written
        else:
            words.append(written)
        pieces.append((start, len(words) - 1))
        open_end = end if is_open else None
    if words and not words[-1]:  # A joiner alone at the end joins nothing.
        words.pop()
        pieces = [(start, word if word < len(words) else None) for start, word in pieces]
    return words, pieces


def _ids_by_offsets(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    ids: list[int],
    argument: str,
    prefix_length: int,
    pieces: list[tuple[int, int | None]],
) -> list[int | None] | None:
    """By where each token stands in the text; `None` if the ids are not those of the text."""
    encoding = tokenizer(
        **{argument: [text]},
        padding=False,
        truncation=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,
    )
    [encoded], [offsets], sequences = encoding["input_ids"], encoding["offset_mapping"], encoding.sequence_ids(0)
    shared = min(len(encoded), len(ids))
    if list(encoded[:shared]) != list(ids[:shared]):
        return None
    special = _silent_ids(tokenizer, with_unknown=False)
    starts, words = [start for start, _ in pieces], [word for _, word in pieces]
    found: list[int | None] = []
    for token, (start, end), sequence in zip(ids[:shared], offsets[:shared], sequences[:shared], strict=True):
        written = text[start:end]
        place = start + len(written) - len(written.lstrip()) if written.strip() else start
        if sequence is None or token in special or place < prefix_length:
            found.append(None)
            continue
        place -= prefix_length
        # The piece that the place is inside of; for white space the one behind it.
        piece = bisect_right(starts, place) - 1 if written.strip() else bisect_left(starts, place)
        found.append(words[piece] if piece < len(words) else None)
    # What stands behind is the end of sequence that the pair of tokenizers puts there.
    found += [None] * (len(ids) - shared)
    return found


def _ids_without_offsets(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], num_with_prefix: int, num_words: int
) -> list[int | None] | None:
    """By decoding, or by SentencePiece's marks where unknown tokens would be lost; `None` if neither gives the words."""
    found = _ids_by_decoding(tokenizer, ids)
    if tokenizer.unk_token_id in ids or _count(found) != num_with_prefix:
        found = _ids_by_marks(tokenizer, ids)
    if _count(found) != num_with_prefix:
        return None
    first = num_with_prefix - num_words
    return [None if index is None or index < first else index - first for index in found]


def _count(word_ids: list[int | None]) -> int:
    return 1 + max((index for index in word_ids if index is not None), default=-1)


def _ids_by_decoding(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int | None]:
    """By what each token adds to the text of those before it."""
    special = _silent_ids(tokenizer, with_unknown=True)
    found: list[int | None] = [None] * len(ids)
    waiting: list[int] = []  # white space, and bytes of a character that is not whole yet, until a word follows
    kept: list[int] = []
    before = after = ""
    for place, token in enumerate(ids):
        if token in special:
            continue
        kept.append(token)
        before, after = after, tokenizer.decode(kept, skip_special_tokens=True)
        waiting.append(place)
        start = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False)))
        end = next((end for end in range(start + 1, len(after) + 1) if not after[end - 1].isspace()), None)
        if end is not None and not after.endswith(_REPLACEMENT):
            for index in waiting:
                found[index] = len(after[:end].split()) - 1
            waiting = []
    if after.endswith(_REPLACEMENT):
        for index in waiting:
            found[index] = len(after.split()) - 1
    return found


def _ids_by_marks(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int | None]:
    special = _silent_ids(tokenizer, with_unknown=False)
    found: list[int | None] = []
    word = -1
    for token, piece in zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True):
        if token in special:
            found.append(None)
            continue
        if piece.startswith(SPACE_MARK) or word < 0:
            word += 1
        found.append(word)
    return found


def _silent_ids(tokenizer: PreTrainedTokenizerBase, with_unknown: bool) -> set[int]:
    """Special tokens, which are no part of a text; the unknown token is one, but stands for a part."""
    ids = set(tokenizer.all_special_ids)
    return ids if with_unknown else ids - {tokenizer.unk_token_id}
