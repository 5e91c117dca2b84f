"""Augmentation: training pairs whose texts and segmentations are drawn anew in each epoch, and are the same in a resumed run."""

import math
import re
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import datasets
import numpy as np
import torch
from tokenizers import Encoding
from torch.utils.data import DataLoader

from metaphrase.data.pairs import LENGTH_COLUMNS, SIDES
from metaphrase.tokenization import TokenizerPair
from metaphrase.tokenization.subword_sampling import SubwordSampler
from metaphrase.tokenization.texts import SPACED_WORD

AUGMENTATIONS = ("uppercase", "titlecase", "missing_punctuation", "typos", "terms")
# Around a term that a source asks for. They stand behind the word that the term translates.
TERM_TOKENS = ("<term>", "</term>")
_MAX_TERMS = 3
_IDS = ("input_ids", "labels")
# Pairs on which the growth of the lengths is measured.
_MEASURED_PAIRS = 1000
_WORDS_PER_TYPO = 10
_END_PUNCTUATION = ".!?…。！？؟।"


class EpochPairs(torch.utils.data.Dataset):
    """Pairs that depend on the epoch, which lies in shared memory, so that persistent workers see it change.

    `set_epoch` must be called before each epoch.
    """

    def __init__(self):
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    @property
    def epoch(self) -> int:
        """The present epoch."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the pairs, also in all workers of this process."""
        self._epoch.fill_(epoch)

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        # Only the pickle of a loader keeps a tensor in shared memory.
        self._epoch.share_memory_()


def announce_epoch(loader: DataLoader, epoch: int) -> None:
    """Call `set_epoch` of a loader, of its data set, and of its samplers at any depth.

    The loaders of accelerate stop at the first sampler that takes an epoch.
    """
    parts = [loader, loader.dataset]
    sampler = loader.batch_sampler
    while sampler is not None:
        parts += [sampler, getattr(sampler, "sampler", None)]
        sampler = getattr(sampler, "batch_sampler", None)
    for part in parts:
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


class Augmenter:
    """Random changes of pairs: other segmentations, and other texts by named rates.

    `rates` has the share of pairs for each of `AUGMENTATIONS`:

    - `uppercase`, `titlecase`: both sides in upper case, or with each word capitalized. A pair gets one of them at most.
    - `missing_punctuation`: both sides without the punctuation at their ends, if both have it.
    - `typos`: a source with two letters swapped, a letter left out or a letter doubled, once in about ten words.
    - `terms`: a source with up to three words of the target, each behind the word that it translates and between `TERM_TOKENS`
      (Dinu et al. 2019, Training Neural Machine Translation to Apply Terminology Constraints). The model learns to copy them.

    Special tokens and prefixes stay. The changes of a pair depend on seed, epoch and row alone, so that they are equal in all
    orders, batches, workers and processes.
    """

    def __init__(
        self,
        tokenizers: TokenizerPair,
        seed: int,
        limits: tuple[int, int],
        subword_sampling: float | None = None,
        rates: Mapping[str, float] | None = None,
        prefixes: Sequence[str] = (),
        terms: Mapping[str, Sequence[str]] | None = None,
    ):
        """Take the most tokens of each side, the rates, the beginnings of sources that stay, and terms with case folded.

        A side over its limit stays as it was, and with changes of both texts the other side, too.
        """
        self.tokenizers, self.seed, self.limits = tokenizers, seed, limits
        self._rates = dict.fromkeys(AUGMENTATIONS, 0.0) | dict(rates or {})
        self._terms = dict(terms or {})
        self._samplers: tuple[SubwordSampler | None, ...] = (None, None)
        if subword_sampling is not None:
            source = SubwordSampler(tokenizers.source, subword_sampling)
            is_joint = tokenizers.is_joint
            self._samplers = source, source if is_joint else SubwordSampler(tokenizers.target, subword_sampling)
        tokens = {token for side in (tokenizers.source, tokenizers.target) for token in side.get_added_vocab()}
        names = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))
        starts = "|".join(re.escape(prefix) for prefix in sorted(prefixes, key=len, reverse=True))
        self._unchanged = re.compile(f"(^(?:{starts})|{names})" if starts else f"({names})")

    def __call__(
        self, pairs: Sequence[Mapping[str, Any]], epoch: int, rows: Sequence[int]
    ) -> list[dict[str, list[int]]]:
        """Return new `input_ids` and `labels` of pairs with texts, in an epoch. Rows are the numbers of the pairs in all data."""
        generators = [Random(f"{self.seed} {epoch} {row}") for row in rows]
        texts = [
            self.change_texts(*map(pair.get, SIDES), random) for pair, random in zip(pairs, generators, strict=True)
        ]
        sides = []
        encoders = self.tokenizers.encode_sources, self.tokenizers.encode_targets
        for encode, sampler, side in zip(encoders, self._samplers, zip(*texts, strict=True), strict=True):

            def segment(number: int, encoding: Encoding, sampler=sampler) -> list[int]:
                return sampler(encoding, generators[number])

            sides.append(encode(list(side), None if sampler is None else segment))
        return [self._within_limits(*row) for row in zip(pairs, texts, zip(*sides, strict=True), strict=True)]

    def _within_limits(
        self, pair: Mapping[str, Any], texts: tuple[str, str], ids: tuple[list[int], list[int]]
    ) -> dict[str, list[int]]:
        """Return the new ids of a pair, and its own for a side that is too long."""
        fits = [len(side) <= limit for side, limit in zip(ids, self.limits, strict=True)]
        if texts[1] != pair["target"]:
            # A change of both sides, such as upper case, must not reach one alone.
            fits = [all(fits)] * 2
        return {name: side if fit else pair[name] for name, side, fit in zip(_IDS, ids, fits, strict=True)}

    def change_texts(self, source: str, target: str, random: Random) -> tuple[str, str]:
        """Return source and target with the changes of text that are drawn for the pair."""
        rates = self._rates
        if not any(rates.values()):
            return source, target
        case, has_missing, has_typos, has_terms = (random.random() for _ in range(4))
        if case < rates["uppercase"]:
            source, target = (self._outside_tokens(str.upper, text) for text in (source, target))
        elif case < rates["uppercase"] + rates["titlecase"]:
            source, target = (self._outside_tokens(_capitalize, text) for text in (source, target))
        if has_missing < rates["missing_punctuation"]:
            bare = [text.rstrip().rstrip(_END_PUNCTUATION) for text in (source, target)]
            is_shorter = [len(text) < len(whole.rstrip()) for text, whole in zip(bare, (source, target), strict=True)]
            if all(is_shorter) and all(map(str.strip, bare)):
                source, target = bare
        if has_typos < rates["typos"]:
            source = self._outside_tokens(lambda text: _misspell(text, random), source)
        if has_terms < rates["terms"]:
            source = self._insert_terms(source, target, random)
        return source, target

    def _insert_terms(self, source: str, target: str, random: Random) -> str:
        """Return the source with words of the target behind some of the words that they translate."""
        words = {word.casefold(): word for word in SPACED_WORD.findall(target)}
        positions, start = [], 0
        for number, part in enumerate(self._unchanged.split(source)):
            if number % 2 == 0:
                for match in SPACED_WORD.finditer(part):
                    partners = self._terms.get(match.group().casefold(), ())
                    if terms := [words[partner] for partner in partners if partner in words]:
                        positions.append((start + match.end(), random.choice(terms)))
            start += len(part)
        chosen = sorted(random.sample(positions, min(len(positions), random.randint(1, _MAX_TERMS))), reverse=True)
        opening, closing = TERM_TOKENS
        for end, term in chosen:
            source = f"{source[:end]} {opening} {term} {closing}{source[end:]}"
        return source

    def _outside_tokens(self, change: Any, text: str) -> str:
        parts = self._unchanged.split(text)
        # Each second part is a special token or a prefix.
        return "".join(part if number % 2 else change(part) for number, part in enumerate(parts))


def _capitalize(text: str) -> str:
    return re.sub(r"\S+", lambda word: word[0][:1].upper() + word[0][1:], text)


def _misspell(text: str, random: Random) -> str:
    for _ in range(max(1, len(text.split()) // _WORDS_PER_TYPO)):
        starts = [start for start in range(len(text) - 1) if text[start].isalpha() and text[start + 1].isalpha()]
        if not starts:
            return text
        start = random.choice(starts)
        first, second = text[start], text[start + 1]
        changed = random.choice((second + first, second, first + first + second))
        text = text[:start] + changed + text[start + 2 :]
    return text


class AugmentedPairs(EpochPairs):
    """Training pairs with the changes of the present epoch.

    `dataset["source_length"]` and `dataset["target_length"]` are the lengths to plan batches by: those of the plain pairs, times
    the mean growth by the changes. So batches have about their token budget; some have more, others less.

    Attributes:
        pairs: The plain pairs of `encode_pairs`, with their texts.
        column_names: Names of `dataset[name]`, and the fields of a pair.
    """

    def __init__(self, pairs: datasets.Dataset, augmenter: Augmenter):
        super().__init__()
        self.pairs, self.augmenter = pairs, augmenter
        self.column_names = [name for name in pairs.column_names if name not in SIDES]
        rows = np.unique(np.linspace(0, len(pairs) - 1, _MEASURED_PAIRS).astype(np.int64)).tolist()
        sample = self.__getitems__(rows)
        self._growth = {}
        for ids, name, limit in zip(_IDS, LENGTH_COLUMNS, augmenter.limits, strict=True):
            plain = np.asarray(pairs[rows][name])
            self._growth[name] = sum(len(pair[ids]) for pair in sample) / int(plain.sum()), limit

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, key: int | str) -> dict[str, list[int]] | list[int]:
        if not isinstance(key, str):
            return self.__getitems__([key])[0]
        if key not in LENGTH_COLUMNS:
            return self.pairs[key][:]
        growth, limit = self._growth[key]
        return [min(limit, math.ceil(length * growth)) for length in self.pairs[key][:]]

    def __getitems__(self, rows: list[int]) -> list[dict[str, list[int]]]:
        """Return the pairs of a batch. A number beyond the end is that of a later reading. Loaders of torch call this method."""
        columns = self.pairs.select_columns([*SIDES, *_IDS])[[row % len(self) for row in rows]]
        pairs = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return self.augmenter(pairs, self.epoch, rows)
