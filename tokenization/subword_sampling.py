"""Subword sampling: random segmentations of the words of a text, for training alone.

The sampling of the library `tokenizers` has no seed, so a resumed run would not repeat it.
"""

import json
import math
from bisect import bisect
from itertools import groupby, pairwise
from random import Random
from typing import Any

from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

# Kinds of new tokenizers that can be sampled from.
SAMPLED_KINDS = ("byte_bpe", "bpe", "unigram")
Ids = tuple[int, ...]
# States of words in memory, of about 1 KB each. The first ones stay: frequent words come early in a text.
_MAX_STATES = 100_000
_NEAR_ZERO = 1e-300


class SubwordSampler:
    """Segmentations of one tokenizer, drawn anew for each text.

    - BPE: each merge is skipped with probability `alpha` (BPE-dropout). 0 gives the plain segmentation.
    - Unigram: a segmentation is drawn in proportion to its probability to the power of `alpha`. A small `alpha` varies most.

    A word with an unknown character or a byte token keeps its plain segmentation.

    Source: Provilkov et al. 2020, algorithm 1, arXiv 1910.13267; Kudo 2018, section 3.2, arXiv 1804.10959, over all
    segmentations.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, alpha: float):
        """Args:
        tokenizer: A tokenizer of the library `tokenizers` with a BPE or Unigram model.
        alpha: Probability of skipping a merge, or exponent of probabilities.

        Raises:
            ValueError: If the tokenizer has another model.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        model = {} if backend is None else json.loads(backend.to_str())["model"]
        has_affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
        is_merging = model.get("type") == "BPE" and bool(model["merges"]) and not has_affixes
        if not is_merging and model.get("type") != "Unigram":
            raise ValueError(
                f"`subword_sampling` must come with a tokenizer of the library `tokenizers` that has a Unigram model or BPE "
                f"merges, got a {type(tokenizer).__name__} with {model.get('type', 'no such model')}."
            )
        self._pieces = {index: piece for piece, index in backend.get_vocab().items()}
        self._whole = {*tokenizer.get_added_vocab().values(), tokenizer.unk_token_id}
        if model.get("byte_fallback"):
            self._whole |= {
                index for index, piece in self._pieces.items() if piece.startswith("<0x") and len(piece) == 6
            }
        self._words: _Merges | _Lattice = _Merges(model, alpha) if is_merging else _Lattice(model, alpha, self._whole)

    def __call__(self, encoding: Encoding, random: Random) -> list[int]:
        """Return the ids of a text in a new segmentation.

        Args:
            encoding: The plain segmentation.
            random: Source of all random choices.
        """
        ids: list[int] = []
        plain_ids, start = encoding.ids, 0
        for word, tokens in groupby(encoding.word_ids):
            end = start + len(list(tokens))
            plain, start = tuple(plain_ids[start:end]), end
            if word is None or not self._whole.isdisjoint(plain):
                ids += plain
            else:
                ids += self._words.sample(plain, self._pieces, random)
        return ids


class _Merges:
    """BPE-dropout. The permitted merges of a state of a word, first learned first, are computed once."""

    def __init__(self, model: dict[str, Any], rate: float):
        self.vocabulary = model["vocab"]
        # Divisors that turn a uniform number into a geometric one. They are finite, so that a rate of 0 needs no case of its own.
        self._log_skipped, self._log_merged = math.log(rate or _NEAR_ZERO), math.log1p(-rate) or -_NEAR_ZERO
        self._merges: dict[Ids, tuple[int, int]] = {}
        for rank, merge in enumerate(model["merges"]):
            first, second = merge.split(" ") if isinstance(merge, str) else merge
            pair = self.vocabulary[first], self.vocabulary[second]
            self._merges.setdefault(pair, (rank, self.vocabulary[first + second]))
        self._words: dict[Ids, tuple[Ids, int]] = {}
        self._permitted: dict[Ids, list[tuple[int, int]]] = {}

    def sample(self, plain: Ids, pieces: dict[int, str], random: Random) -> Ids:
        """Return a word's ids in a new segmentation."""
        # Two of three words skip no merge at a rate of 0.1, and take a single draw.
        ids, num_merges = self._words.get(plain) or self._word(plain, pieces)
        draw, log = random.random, math.log
        merged = int(log(1 - draw()) / self._log_merged)
        if merged >= num_merges:
            return plain
        for _ in range(merged):
            ids = _merge(ids, self._permitted_merges(ids)[0])
        # The number of merges that are skipped before one is made.
        skipped = 1 + int(log(1 - draw()) / self._log_skipped)
        while skipped < len(merges := self._permitted_merges(ids)):
            ids = _merge(ids, merges[skipped])
            skipped = int(log(1 - draw()) / self._log_skipped)
        return ids

    def _word(self, plain: Ids, pieces: dict[int, str]) -> tuple[Ids, int]:
        """Return the letters of a word, and the number of merges that make the plain segmentation of them."""
        letters = tuple(self.vocabulary.get(letter) for index in plain for letter in pieces[index])
        word = (plain, 0) if None in letters else (letters, len(letters) - len(plain))
        if len(self._words) < _MAX_STATES:
            self._words[plain] = word
        return word

    def _permitted_merges(self, ids: Ids) -> list[tuple[int, int]]:
        """Return start and merged id of each permitted merge."""
        merges = self._permitted.get(ids)
        if merges is None:
            ranked = [
                (*merge, start)
                for start, pair in enumerate(pairwise(ids))
                if (merge := self._merges.get(pair)) is not None
            ]
            ranked.sort(key=lambda merge: (merge[0], merge[2]))
            merges = [(start, merged) for _, merged, start in ranked]
            if len(self._permitted) < _MAX_STATES:
                self._permitted[ids] = merges
        return merges


def _merge(ids: Ids, merge: tuple[int, int]) -> Ids:
    start, merged = merge
    return (*ids[:start], merged, *ids[start + 2 :])


class _Lattice:
    """Segmentations of a word, drawn from its end to its beginning with the probabilities of a forward pass."""

    def __init__(self, model: dict[str, Any], alpha: float, whole: set[int]):
        self._scores = {
            piece: (index, alpha * score) for index, (piece, score) in enumerate(model["vocab"]) if index not in whole
        }
        self._longest = max(map(len, self._scores))
        self._words: dict[Ids, list[tuple[list[float], list[tuple[int, int]]]]] = {}

    def sample(self, plain: Ids, pieces: dict[int, str], random: Random) -> Ids:
        """Return a word's ids in a new segmentation."""
        arcs = self._words.get(plain) or self._word(plain, "".join([pieces[index] for index in plain]))
        end, ids = len(arcs) - 1, []
        while end > 0:
            shares, choices = arcs[end]
            # The last share may be a little below 1.
            end, index = choices[min(bisect(shares, random.random()), len(choices) - 1)] if shares else choices[0]
            ids.append(index)
        return tuple(ids[::-1])

    def _word(self, plain: Ids, word: str) -> list[tuple[list[float], list[tuple[int, int]]]]:
        """Return, for each end, the cumulative shares of the pieces that end there, and their starts and ids.

        A single piece has no shares.
        """
        totals, arcs = [0.0], [([], [])]
        for end in range(1, len(word) + 1):
            choices, weights = [], []
            for start in range(max(0, end - self._longest), end):
                if (piece := self._scores.get(word[start:end])) is not None and totals[start] > -math.inf:
                    choices.append((start, piece[0]))
                    weights.append(totals[start] + piece[1])
            highest = max(weights, default=-math.inf)
            shares = [math.exp(weight - highest) for weight in weights]
            totals.append(highest + math.log(sum(shares)) if shares else highest)
            cumulative = [sum(shares[: number + 1]) / sum(shares) for number in range(len(shares))]
            arcs.append((cumulative if len(choices) > 1 else [], choices))
        if len(self._words) < _MAX_STATES:
            self._words[plain] = arcs
        return arcs
