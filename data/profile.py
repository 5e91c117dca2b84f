"""Profile of training pairs: the numbers that the choices of a recipe follow from."""

import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from datasets import Dataset

from metaphrase.data.pairs import SIDES

# More pairs change the numbers little.
SAMPLE_PAIRS = 50_000
# Words of a closed set are symbols, such as phonemes or commands: the next word of unseen text is hardly ever new.
_MAX_NEW_SYMBOLS, _MAX_SYMBOLS = 1e-3, 1000
# Share of texts that are not longer than `long_letters` and `long_words`.
_LONG = 0.999


@dataclass(frozen=True)
class SideProfile:
    """Texts of one side. Words are split at white space.

    Attributes:
        repetitions: Mean number of times that a text occurs.
        mean_characters: Mean length of a text.
        long_letters: Length that 1 text of 1,000 exceeds, in characters that Unicode has taken apart (NFD).
        long_bytes: The same in bytes of UTF-8.
        mean_words: Mean number of words of a text.
        long_words: Number of words that 1 text of 1,000 exceeds.
        alphabet: Different characters.
        num_letters: Number of different characters that Unicode has taken apart.
        is_decomposed: True if no text has a character that Unicode can take apart.
        num_words: Number of different words.
        new_words: Probability that the next word is new: the share of words that occurred once (Good 1953).
    """

    repetitions: float
    mean_characters: float
    long_letters: int
    long_bytes: int
    mean_words: float
    long_words: int
    alphabet: frozenset[str]
    num_letters: int
    is_decomposed: bool
    num_words: int
    new_words: float

    @property
    def is_closed(self) -> bool:
        """True if the words are symbols of a closed set."""
        return self.new_words < _MAX_NEW_SYMBOLS and self.num_words <= _MAX_SYMBOLS

    @classmethod
    def of(cls, texts: Sequence[str]) -> "SideProfile":
        """Measure the texts of one side."""
        words = [text.split() for text in texts]
        counts = Counter(word for line in words for word in line)
        letters = [unicodedata.normalize("NFD", text) for text in texts]
        characters, lengths = [len(text) for text in texts], [len(line) for line in words]
        return cls(
            repetitions=len(texts) / len(set(texts)),
            mean_characters=float(np.mean(characters)),
            long_letters=int(np.quantile([len(text) for text in letters], _LONG)),
            long_bytes=int(np.quantile([len(text.encode()) for text in texts], _LONG)),
            mean_words=float(np.mean(lengths)),
            long_words=int(np.quantile(lengths, _LONG)),
            alphabet=frozenset().union(*texts),
            num_letters=len(frozenset().union(*letters)),
            is_decomposed=letters == list(texts),
            num_words=len(counts),
            new_words=sum(count == 1 for count in counts.values()) / max(1, counts.total()),
        )


@dataclass(frozen=True)
class CorpusProfile:
    """Training pairs.

    Attributes:
        pairs: Number of pairs.
        source: The sources.
        target: The targets.
        shared_characters: Share of the targets' visible characters that occur in the sources too.
    """

    pairs: int
    source: SideProfile
    target: SideProfile
    shared_characters: float

    @classmethod
    def of(cls, train: Dataset) -> "CorpusProfile":
        """Measure training pairs; of many pairs, those at regular distances."""
        sample = train.select(range(0, len(train), -(-len(train) // SAMPLE_PAIRS)))
        source, target = (SideProfile.of(sample[side][:]) for side in SIDES)
        counts = Counter(character for text in sample["target"][:] for character in text if not character.isspace())
        shared = sum(count for character, count in counts.items() if character in source.alphabet)
        return cls(len(train), source, target, shared / max(1, counts.total()))
