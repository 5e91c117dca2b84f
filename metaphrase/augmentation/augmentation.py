"""Augmentation: training pairs whose texts and segmentations are drawn anew in each epoch, and are the same in a resumed run."""

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby, islice, pairwise
from random import Random
from typing import Any

import datasets
import numpy as np
import torch
from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

from metaphrase.augmentation.rare_words import RareWords
from metaphrase.augmentation.recombination import Recombination
from metaphrase.data.pairs import AUGMENTATIONS, COLUMN_TYPES, LENGTH_COLUMNS, SIDES, WEIGHT_COLUMN
from metaphrase.errors import MetaphraseError
from metaphrase.filtering.alignment import learn_terms
from metaphrase.filtering.rules import SPACED_WORD
from metaphrase.filtering.run import sample_pairs
from metaphrase.tokenization import TokenizerPair
from metaphrase.tokenization.texts import TERM_TOKENS
from metaphrase.training.corpora import PairCorpus

_MAX_TERMS = 3
_IDS = ("input_ids", "labels")
# Pairs on which the growth of the lengths is measured.
_MEASURED_PAIRS = 1000
_WORDS_PER_TYPO = _WORDS_PER_RARE_WORD = 10
_END_PUNCTUATION = ".!?…。！？؟।"
Ids = tuple[int, ...]
# Words and states of words in memory, of about 1 KB each. The first ones stay: frequent words come early in a text.
_MAX_STATES = 100_000
_NEAR_ZERO = 1e-300
# Pairs that terms and rare words are learned from. It bounds time and memory.
_MAX_LEARNED_PAIRS = 100_000
# Pairs that recombination learns from, in about 10 seconds.
_MAX_RECOMBINED = 30_000
# Pairs that are recombined to see their words and lengths.
_RECOMBINED_PAIRS = 3000
_EXAMPLES = 3

logger = logging.getLogger(__name__)


class EpochPairs(torch.utils.data.Dataset):
    """Pairs that depend on the epoch, which lies in shared memory, so that persistent workers see it change."""

    def __init__(self):
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    @property
    def epoch(self) -> int:
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, also in all workers of this process."""
        self._epoch.fill_(epoch)

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        # Only the pickle of a loader keeps a tensor in shared memory.
        self._epoch.share_memory_()


class SubwordSampler:
    """BPE-dropout: segmentations of one tokenizer, drawn anew for each text. Each merge is skipped with a probability.

    The dropout of the library `tokenizers` has no seed, so a resumed run would not repeat it. A word with an unknown character or
    a byte token keeps its plain segmentation. The permitted merges of a state of a word are computed once.

    Source: Provilkov et al. 2020, algorithm 1, arXiv 1910.13267.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, rate: float):
        """Take a tokenizer with BPE merges, and the probability of skipping a merge. 0 gives the plain segmentation."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        model = {} if backend is None else json.loads(backend.to_str())["model"]
        has_affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
        if model.get("type") != "BPE" or not model["merges"] or has_affixes:
            raise MetaphraseError(
                "`subword_sampling` must come with a tokenizer of the library `tokenizers` that has BPE merges, "
                f"got a {type(tokenizer).__name__} with {model.get('type', 'no such model')}."
            )
        self._vocabulary = model["vocab"]
        self._pieces = {index: piece for piece, index in backend.get_vocab().items()}
        self._whole = {*tokenizer.get_added_vocab().values(), tokenizer.unk_token_id}
        if model.get("byte_fallback"):
            self._whole |= {index for index, piece in self._pieces.items() if piece.startswith("<0x")}
        # Divisors that turn a uniform number into a geometric one. They are finite, also for a rate of 0.
        self._log_skipped, self._log_merged = math.log(rate or _NEAR_ZERO), math.log1p(-rate) or -_NEAR_ZERO
        self._merges: dict[Ids, tuple[int, int]] = {}
        for rank, (first, second) in enumerate(model["merges"]):
            pair = self._vocabulary[first], self._vocabulary[second]
            self._merges.setdefault(pair, (rank, self._vocabulary[first + second]))
        self._words: dict[Ids, Ids] = {}
        self._permitted: dict[Ids, list[tuple[int, int]]] = {}

    def __call__(self, encoding: Encoding, random: Random) -> list[int]:
        """Return the ids of a text in a new segmentation, from the plain one."""
        ids, plain_ids = [], iter(encoding.ids)
        for word, tokens in groupby(encoding.word_ids):
            plain = tuple(islice(plain_ids, len(list(tokens))))
            ids += plain if word is None or not self._whole.isdisjoint(plain) else self._sample(plain, random)
        return ids

    def _sample(self, plain: Ids, random: Random) -> Ids:
        ids = self._words.get(plain)
        if ids is None:
            letters = tuple(self._vocabulary.get(letter) for index in plain for letter in self._pieces[index])
            ids = plain if None in letters else letters
            if len(self._words) < _MAX_STATES:
                self._words[plain] = ids
        # Two of three words skip no merge at a rate of 0.1, and take a single draw.
        draw, log = random.random, math.log
        merged = int(log(1 - draw()) / self._log_merged)
        if merged >= len(ids) - len(plain):
            return plain
        for _ in range(merged):
            ids = _apply(self._permitted_merges(ids)[0], ids)
        # The number of merges that are skipped before one is made.
        skipped = 1 + int(log(1 - draw()) / self._log_skipped)
        while skipped < len(merges := self._permitted_merges(ids)):
            ids = _apply(merges[skipped], ids)
            skipped = int(log(1 - draw()) / self._log_skipped)
        return ids

    def _permitted_merges(self, ids: Ids) -> list[tuple[int, int]]:
        """Return start and merged id of each permitted merge, first learned first."""
        merges = self._permitted.get(ids)
        if merges is None:
            ranked = [(self._merges[pair], start) for start, pair in enumerate(pairwise(ids)) if pair in self._merges]
            # A rank belongs to one merge, so that equal ones are sorted by their start.
            merges = [(start, merged) for (_, merged), start in sorted(ranked)]
            if len(self._permitted) < _MAX_STATES:
                self._permitted[ids] = merges
        return merges


def _apply(merge: tuple[int, int], ids: Ids) -> Ids:
    start, merged = merge
    return (*ids[:start], merged, *ids[start + 2 :])


class Augmenter:
    """Random changes of pairs: other segmentations, and other texts by named rates.

    `rates` has the share of pairs for each of `AUGMENTATIONS`:

    - `uppercase`, `titlecase`: both sides in upper case, or with each word capitalized. A pair gets one of them at most.
    - `missing_punctuation`: both sides without the punctuation at their ends, if both have it.
    - `typos`: a source with two letters swapped, a letter left out or a letter doubled, once in about ten words.
    - `terms`: a source with up to three words of the target, each behind the word that it translates and between `TERM_TOKENS`
      (Dinu et al. 2019, Training Neural Machine Translation to Apply Terminology Constraints). The model learns to copy them.
    - `rare_words`: both sides with a rare word and its translation in place of another word and its translation.
    - `recombination`: a pair that is made of the pair and parts of others.

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
        combinations: tuple[RareWords, Recombination] | None = None,
    ):
        """Take the most tokens of each side, the rates, beginnings of sources that stay, terms with case folded, combinations.

        A side over its limit stays as it was, and with changes of both texts the other side, too.
        """
        self.tokenizers, self.seed, self.limits = tokenizers, seed, limits
        self._rates = dict.fromkeys(AUGMENTATIONS, 0.0) | dict(rates or {})
        self._terms, self._combinations = dict(terms or {}), combinations or (None, None)
        self._samplers: tuple[SubwordSampler | None, ...] = (None, None)
        if subword_sampling is not None:
            source = SubwordSampler(tokenizers.source, subword_sampling)
            target = source if tokenizers.is_joint else SubwordSampler(tokenizers.target, subword_sampling)
            self._samplers = source, target
        tokens = {*tokenizers.source.get_added_vocab(), *tokenizers.target.get_added_vocab()}
        parts = [f"^{re.escape(prefix)}" for prefix in sorted(prefixes, key=len, reverse=True)]
        parts += map(re.escape, sorted(tokens, key=len, reverse=True))
        self._unchanged = re.compile(f"({'|'.join(parts)})")

    def __call__(
        self, pairs: Sequence[Mapping[str, Any]], epoch: int, rows: Sequence[int]
    ) -> list[dict[str, list[int]]]:
        """Return new `input_ids` and `labels` of pairs with texts, and weights, in an epoch. Rows are numbers in all data."""
        generators = [Random(f"{self.seed} {epoch} {row}") for row in rows]
        texts = [self.change_texts(*map(pair.get, SIDES), draw) for pair, draw in zip(pairs, generators, strict=True)]
        encoders, sides = (self.tokenizers.encode_sources, self.tokenizers.encode_targets), []
        for encode, sampler, side in zip(encoders, self._samplers, zip(*texts, strict=True), strict=True):
            segment = sampler and (lambda row, encoding, draw=sampler: draw(encoding, generators[row]))
            sides.append(encode(list(side), segment))
        changed = []
        for pair, (_, target), *ids in zip(pairs, texts, *sides, strict=True):
            fits = [len(side) <= limit for side, limit in zip(ids, self.limits, strict=True)]
            if target != pair["target"]:
                # A change of both sides, such as upper case, must not reach one alone.
                fits = [all(fits)] * 2
            new = {name: side if fit else pair[name] for name, side, fit in zip(_IDS, ids, fits, strict=True)}
            changed.append({**new, WEIGHT_COLUMN: pair[WEIGHT_COLUMN]} if WEIGHT_COLUMN in pair else new)
        return changed

    def change_texts(self, source: str, target: str, random: Random) -> tuple[str, str]:
        """Return source and target with the changes of text that are drawn for the pair."""
        rates = self._rates
        if not any(rates.values()):
            return source, target
        rare_words, recombination = self._combinations
        if rates["recombination"] and random.random() < rates["recombination"]:
            has_tokens = any(map(self._unchanged.search, (source, target)))
            if not has_tokens and (pair := recombination.draw(source, target, random)) is not None:
                source, target = pair
        if rates["rare_words"] and random.random() < rates["rare_words"]:
            # A recombined pair is long, and may take the place of one with a rare word.
            for _ in range(1 + source.count(" ") // _WORDS_PER_RARE_WORD):
                bare = (" ".join(self._unchanged.split(text)[::2]) for text in (source, target))
                if drawn := rare_words.draw(*bare, random):
                    replace = (
                        partial(re.compile(rf"(?<!\S){re.escape(old)}(?!\S)").sub, lambda _, new=new: new)
                        for old, new in drawn
                    )
                    source, target = map(self._outside_tokens, replace, (source, target))
        case, has_missing, has_typos, has_terms = (random.random() for _ in range(4))
        if case < rates["uppercase"] + rates["titlecase"]:
            capitalize = partial(re.sub, r"\S+", lambda word: word[0][:1].upper() + word[0][1:])
            change = str.upper if case < rates["uppercase"] else capitalize
            source, target = (self._outside_tokens(change, text) for text in (source, target))
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
            for match in () if number % 2 else SPACED_WORD.finditer(part):
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

    def augment(self, pairs: datasets.Dataset) -> "AugmentedPairs":
        return AugmentedPairs(pairs, self)


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


def make_augmenter(corpus: PairCorpus, tokenizers: TokenizerPair) -> Augmenter:
    """Return the augmenter of a corpus, by its recipe. Terms and combinations are learned from the pairs."""
    recipe, rates, terms, combinations = corpus.recipe, corpus.recipe.augmentation, None, None
    if {"rare_words", "recombination"} & rates.keys():
        combinations = learn_combinations(corpus)
        if "rare_words" in rates and not combinations[0].substitutes:
            raise MetaphraseError("`augmentation.rare_words` must be left out: no words stand in the place of others.")
    if "terms" in rates:
        if not (terms := learn_terms(_sample_pairs(corpus))):
            raise MetaphraseError("`augmentation.terms` must be left out: no words are found to translate each other.")
        logger.info("%sLearned %d terms, to insert some into sources.", corpus.label, len(terms))
    return Augmenter(
        tokenizers, corpus.seed, corpus.limits, recipe.subword_sampling, rates, corpus.prefixes, terms, combinations
    )


def _sample_pairs(corpus: PairCorpus) -> list[tuple[str, str]]:
    return sample_pairs(zip(*corpus.sides(), strict=True), _MAX_LEARNED_PAIRS)[1]


def learn_combinations(corpus: PairCorpus) -> tuple[RareWords, Recombination]:
    """Learn words and parts of the training pairs that may take the places of others, once for a corpus."""
    if "combinations" not in corpus.learned:
        pairs = _sample_pairs(corpus)
        corpus.learned["combinations"] = RareWords.learn(pairs), Recombination(pairs[:_MAX_RECOMBINED])
    return corpus.learned["combinations"]


def recombined_pairs(corpus: PairCorpus) -> list[tuple[str, str]]:
    """Return pairs that recombination makes of training pairs, to see their words and lengths."""
    if "recombined" not in corpus.learned:
        random, (_, recombination) = Random(corpus.seed), learn_combinations(corpus)
        drawn = (recombination.draw(*pair, random) for pair in _sample_pairs(corpus)[:_RECOMBINED_PAIRS])
        corpus.learned["recombined"] = pairs = [pair for pair in drawn if pair is not None]
        if not pairs:
            raise MetaphraseError("`augmentation.recombination` must be left out: no parts of pairs are in others.")
        logger.info("%sRecombined %d of %d pairs, such as:", corpus.label, len(pairs), _RECOMBINED_PAIRS)
        for source, target in pairs[:_EXAMPLES]:
            logger.info("  %s\n    %s", source, target)
    return corpus.learned["recombined"]


class AugmentedPairs(EpochPairs):
    """Training pairs with the changes of the present epoch.

    `dataset["source_length"]` and `dataset["target_length"]` are the lengths to plan batches by: those of the plain pairs, times
    the mean growth by the changes. So batches have about their token budget; some have more, others less.
    """

    def __init__(self, pairs: datasets.Dataset, augmenter: Augmenter):
        """Take the plain pairs of `encode_pairs`, with their texts."""
        super().__init__()
        self.pairs, self.augmenter = pairs, augmenter
        self.column_names = [name for name in pairs.column_names if name not in SIDES]
        self._read = pairs.select_columns([name for name in (*COLUMN_TYPES, *_IDS) if name in pairs.column_names])
        rows = np.unique(np.linspace(0, len(pairs) - 1, _MEASURED_PAIRS).astype(np.int64)).tolist()
        sample = self.__getitems__(rows)
        self._growth = {}
        for ids, name, limit in zip(_IDS, LENGTH_COLUMNS, augmenter.limits, strict=True):
            self._growth[name] = sum(len(pair[ids]) for pair in sample) / sum(pairs[rows][name]), limit

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
        pairs = self._read.__getitems__([row % len(self) for row in rows])
        return self.augmenter(pairs, self.epoch, rows)
