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
# States of words in memory, of less than 1 KB each. The first ones stay: frequent words come early in a text.
_MAX_STATES = 200_000
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
    """BPE-dropout. What may follow a state of a word is computed once, so that a draw is a walk from state to state.

    A state holds its ids, the permitted merges, first learned first, and the states after them, as far as they are known.
    """

    def __init__(self, model: dict[str, Any], rate: float):
        self.vocabulary = model["vocab"]
        # Divisors that turn a uniform number into a geometric one. They are finite, so that a rate of 0 needs no case of its own.
        self._log_skipped, self._log_merged = math.log(rate or _NEAR_ZERO), math.log1p(-rate) or -_NEAR_ZERO
        self._merges: dict[Ids, tuple[int, int]] = {}
        for rank, merge in enumerate(model["merges"]):
            first, second = merge.split(" ") if isinstance(merge, str) else merge
            pair = self.vocabulary[first], self.vocabulary[second]
            self._merges.setdefault(pair, (rank, self.vocabulary[first + second]))
        self._words: dict[Ids, list] = {}
        self._num_states = 0

    def __getstate__(self) -> dict[str, Any]:
        # The states of a word are too deep for a pickle.
        return {**self.__dict__, "_words": {}, "_num_states": 0}

    def sample(self, plain: Ids, pieces: dict[int, str], random: Random) -> Ids:
        """Return a word's ids in a new segmentation."""
        # Two of three words skip no merge at a rate of 0.1, and take a single draw.
        states = self._words.get(plain) or self._word(plain, pieces)
        draw, log = random.random, math.log
        merged = int(log(1 - draw()) / self._log_merged)
        if merged >= len(states) - 1:
            return states[-1][0]
        state, skipped = states[merged], 1 + int(log(1 - draw()) / self._log_skipped)
        while True:
            ids, merges, following = state
            if skipped >= len(merges):
                return ids
            if (state := following[skipped]) is None:
                start, merged = merges[skipped]
                state = self._state((*ids[:start], merged, *ids[start + 2 :]))
                if self._num_states < _MAX_STATES:
                    self._num_states += 1
                    following[skipped] = state
            # The number of merges that are skipped before one is made.
            skipped = int(log(1 - draw()) / self._log_skipped)

    def _word(self, plain: Ids, pieces: dict[int, str]) -> list[list]:
        """Return the states of a word from its letters to the plain segmentation, which skips no merge."""
        letters = [self.vocabulary.get(letter) for index in plain for letter in pieces[index]]
        states = [[plain, [], []] if None in letters else self._state(tuple(letters))]
        while states[-1][1]:
            ids, [(start, merged), *_], following = states[-1]
            following[0] = self._state((*ids[:start], merged, *ids[start + 2 :]))
            states.append(following[0])
        if self._num_states < _MAX_STATES:
            self._num_states += len(states)
            self._words[plain] = states
        return states

    def _state(self, ids: Ids) -> list:
        merges = [
            (*merge, start) for start, pair in enumerate(pairwise(ids)) if (merge := self._merges.get(pair)) is not None
        ]
        merges.sort(key=lambda merge: (merge[0], merge[2]))
        return [ids, [(start, merged) for _, merged, start in merges], [None] * len(merges)]


class _Lattice:
    """Segmentations of a word, drawn from its end to its beginning with the probabilities of a forward pass."""

    def __init__(self, model: dict[str, Any], alpha: float, whole: set[int]):
        self._scores = {
            piece: (index, alpha * score) for index, (piece, score) in enumerate(model["vocab"]) if index not in whole
        }
        self._longest = max(map(len, self._scores))
        self._words: dict[Ids, list[tuple[list[float], list[tuple[int, int]]]]] = {}
        self._num_states = 0

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
        if self._num_states < _MAX_STATES:
            self._num_states += len(arcs)
            self._words[plain] = arcs
        return arcs
