"""Vocabulary map of a model: for each source token the target tokens that its translations may hold.

The file `vmap.txt` is that of CTranslate2: on each line a source token, a tab, and target tokens with spaces between. The line
without a source token has the tokens that every target may hold.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from transformers.utils import cached_file

from metaphrase.errors import MetaphraseError, naming_damaged_file
from metaphrase.storage.folders import VOCABULARY_MAP_NAME, read_text
from metaphrase.tokenization import TokenizerPair


class VocabularyMap:
    """Target tokens that each source token permits.

    Source: L'Hostis et al. 2016, Vocabulary Selection Strategies for Neural Machine Translation, arXiv 1610.00072.

    Attributes:
        path: The file of the map; None for a map that was not loaded.
    """

    def __init__(self, always: Sequence[int], tokens: Mapping[int, Sequence[int]]):
        """Take the ids that every target may hold, and for each source id those that a target may hold."""
        self._tokens = {key: np.asarray(ids, dtype=np.int64) for key, ids in tokens.items()}
        largest = max(int(ids.max(initial=0)) for ids in (np.asarray(always, dtype=np.int64), *self._tokens.values()))
        self._is_always = np.zeros(1 + largest, dtype=bool)
        self._is_always[always] = True
        self.path: Path | None = None

    def save(self, path: str | os.PathLike, tokenizers: TokenizerPair) -> None:
        """Write the map. The format allows no token with white space."""
        vocabularies = tokenizers.source.get_vocab(), tokenizers.target.get_vocab()
        if spaced := [name for names in vocabularies for name in names if not name or set(name) & set(" \t\r\n")]:
            raise MetaphraseError(f"{VOCABULARY_MAP_NAME} needs tokens without white space, got {spaced[0]!r}.")
        sources, targets = ({index: name for name, index in names.items()} for names in vocabularies)
        lines = {"": self._is_always.nonzero()[0]} | {sources[key]: self._tokens[key] for key in sorted(self._tokens)}
        with open(path, "w", encoding="utf-8", newline="\n") as file:
            for name, ids in lines.items():
                file.write(f"{name}\t{' '.join(targets[index] for index in ids)}\n")

    def permitted(self, sources: Iterable[Sequence[int]]) -> np.ndarray:
        """Return the ids that targets of these sources may hold, ascending."""
        is_permitted = self._is_always.copy()
        for key in self._tokens.keys() & {index for source in sources for index in source}:
            is_permitted[self._tokens[key]] = True
        return is_permitted.nonzero()[0]


def find_vocabulary_map(name_or_path: str | os.PathLike) -> Path | None:
    """Return the path of a model's map, or None if the model has none."""
    options = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    path = cached_file(os.fspath(name_or_path), VOCABULARY_MAP_NAME, **options)
    return None if path is None else Path(path)


def load_vocabulary_map(name_or_path: str | os.PathLike, tokenizers: TokenizerPair) -> VocabularyMap:
    """Load the map of a model, a folder or a Hub id, with its tokenizers."""
    path = find_vocabulary_map(name_or_path)
    if path is None:
        raise MetaphraseError(
            f"`use_vmap` needs a model with {VOCABULARY_MAP_NAME}, got {os.fspath(name_or_path)!r} without. Make the file by "
            "`metaphrase shortlist MODEL PAIRS`."
        )
    sources, targets = tokenizers.source.get_vocab(), tokenizers.target.get_vocab()
    always, tokens = [], {}
    with naming_damaged_file(path, "a map of the model's own tokens, such as `metaphrase shortlist` makes"):
        for line in read_text(path).removesuffix("\n").split("\n"):
            source, _, names = line.partition("\t")
            ids = [targets[name] for name in names.split(" ") if name]
            if source:
                tokens[sources[source]] = ids
            else:
                always = ids
    loaded = VocabularyMap(always, tokens)
    loaded.path = path
    return loaded
