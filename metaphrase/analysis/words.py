"""Words of a text: the word of each token.

Words are separated by white space. A text split into pieces (`an@@ trie@@ b .`) has the words that its pieces join to. A
white-space token belongs to the word behind it, and a token that spans several words to the first of them.
"""

import re
from bisect import bisect_left, bisect_right
from itertools import takewhile

from tokenizers import decoders
from transformers import PreTrainedTokenizerBase

from metaphrase.tokenization.tokenizer_trainer import BYTE_LEVEL_SPACE, SPACE_MARK, find_joiner

WordIds = list[int | None]

_PIECE = re.compile(r"\S+")
# Decoders write this character for bytes that are no whole character.
_REPLACEMENT = "\ufffd"


def words_of_source(
    tokenizer: PreTrainedTokenizerBase, text: str, ids: list[int], prefix: str = "", argument: str = "text"
) -> tuple[list[str], WordIds | None]:
    """Return the words of a source, and the index of each token's word.

    Args:
        text: The source without the prefix.
        ids: Ids of prefix and text, with special tokens.
        prefix: Text before the source. Its tokens belong to no word.

    Returns:
        The words, and one index per id: None for special tokens and the prefix. The indices are None as a whole if the
        tokenizer has no offsets and its tokens do not add up to the words, such as with unknown characters.
    """
    words, pieces = _split(text, find_joiner(tokenizer))
    word_ids = None
    if tokenizer.is_fast:
        word_ids = word_ids_by_offsets(tokenizer, prefix + text, ids, argument, len(prefix), pieces)
    if word_ids is not None:
        return words, word_ids
    num_with_prefix = len((prefix + text).split())
    word_ids = _ids_by_decoding(tokenizer, ids)
    if 1 + max((index for index in word_ids if index is not None), default=-1) != num_with_prefix:
        return words, None
    first = num_with_prefix - len(words)
    return words, [None if index is None or index < first else index - first for index in word_ids]


def words_of_target(tokenizer: PreTrainedTokenizerBase, text: str, ids: list[int]) -> tuple[list[str], WordIds | None]:
    """Do the same as `words_of_source` for an encoded target."""
    return words_of_source(tokenizer, text, ids, argument="text_target")


def words_of_decoded(tokenizer: PreTrainedTokenizerBase, text: str, ids: list[int]) -> tuple[list[str], WordIds]:
    """Do the same as `words_of_source` for generated ids and their decoded text."""
    words = text.split()
    word_ids = _ids_by_decoding(tokenizer, ids)
    return words, [None if index is None or index >= len(words) else index for index in word_ids]


def _split(text: str, joiner: str | None) -> tuple[list[str], list[tuple[int, int]]]:
    """Return the words, and for each white-space piece its start and the index of its word."""
    words: list[str] = []
    pieces: list[tuple[int, int]] = []
    open_end = None  # end of the last piece, if the next one continues it
    for match in _PIECE.finditer(text):
        start, end = match.span()
        is_open = joiner is not None and match.group().endswith(joiner) and text[end : end + 1] in ("", " ")
        piece = match.group().removesuffix(joiner) if is_open else match.group()
        if open_end is not None and start == open_end + 1:
            words[-1] += piece
        else:
            words.append(piece)
        pieces.append((start, len(words) - 1))
        open_end = end if is_open else None
    return words, pieces


def word_ids_by_offsets(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    ids: list[int],
    argument: str,
    prefix_length: int,
    pieces: list[tuple[int, int]],
) -> WordIds | None:
    """Find words by each token's offset, or return None if the ids are not those of the text."""
    options = {"padding": False, "truncation": False, "return_offsets_mapping": True, "verbose": False}
    encoding = tokenizer(**{argument: [text]}, **options)
    [encoded], [offsets], sequences = encoding["input_ids"], encoding["offset_mapping"], encoding.sequence_ids(0)
    shared = min(len(encoded), len(ids))
    if list(encoded[:shared]) != list(ids[:shared]):
        return None
    # The unknown token is a special token, but stands for text.
    special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    starts, words = [start for start, _ in pieces], [word for _, word in pieces]
    word_ids: WordIds = []
    for token, (start, end), sequence in zip(ids[:shared], offsets[:shared], sequences[:shared], strict=True):
        is_space = not text[start:end].strip()
        offset = start if is_space else end - len(text[start:end].lstrip())
        if sequence is None or token in special or offset < prefix_length:
            word_ids.append(None)
            continue
        offset -= prefix_length
        # White space belongs to the piece behind it.
        piece = bisect_left(starts, offset) if is_space else bisect_right(starts, offset) - 1
        word_ids.append(words[piece] if piece < len(words) else None)
    # The rest is the end of sequence that `TokenizerPair` appends.
    return word_ids + [None] * (len(ids) - shared)


def _ids_by_decoding(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> WordIds:
    """Find words by the text that each token adds."""
    special = set(tokenizer.all_special_ids)
    word_ids: WordIds = [None] * len(ids)
    waiting: list[int] = []  # white space and incomplete characters, until a word follows
    read: list[int] = []
    before = after = ""
    for index, token in enumerate(ids):
        if token in special:
            continue
        read.append(token)
        before, after = after, tokenizer.decode(read, skip_special_tokens=True)
        waiting.append(index)
        start = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False)))
        end = next((end for end in range(start + 1, len(after) + 1) if not after[end - 1].isspace()), None)
        if end is not None and not after.endswith(_REPLACEMENT):
            for earlier in waiting:
                word_ids[earlier] = len(after[:end].split()) - 1
            waiting = []
    if after.endswith(_REPLACEMENT):
        for earlier in waiting:
            word_ids[earlier] = len(after.split()) - 1
    return word_ids


def readable_tokens(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    """Return each token in a readable form, with U+2581 for a space.

    Tokens of a byte-level tokenizer are decoded, except parts of a character. All other tokens stay as they are.
    """
    tokens = tokenizer.convert_ids_to_tokens(ids)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or "ByteLevel" not in repr(backend.decoder):
        return tokens
    # The whole decoder may remove the space of a first word.
    decoder = decoders.ByteLevel()
    texts = [decoder.decode([token]) for token in tokens]
    return [
        token.replace(BYTE_LEVEL_SPACE, SPACE_MARK)
        if not text or _REPLACEMENT in text
        else text.replace(" ", SPACE_MARK)
        for token, text in zip(tokens, texts, strict=True)
    ]
