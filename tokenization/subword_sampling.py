"""BPE-dropout: random segmentations of the words of a text, for training alone.

The dropout of the library `tokenizers` has no seed, so a resumed run would not repeat it.
"""

import json
import math
from itertools import groupby, pairwise
from random import Random

from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

# Kinds of new tokenizers that can be sampled from.
SAMPLED_KINDS = ("byte_bpe", "bpe")
Ids = tuple[int, ...]
# Words and states of words in memory, of about 1 KB each. The first ones stay: frequent words come early in a text.
_MAX_STATES = 100_000
_NEAR_ZERO = 1e-300


class SubwordSampler:
    """Segmentations of one tokenizer, drawn anew for each text: each merge is skipped with a probability.

    A word with an unknown character or a byte token keeps its plain segmentation. The permitted merges of a state of a word are
    computed once.

    Source: Provilkov et al. 2020, algorithm 1, arXiv 1910.13267.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, rate: float):
        """Take a tokenizer with BPE merges, and the probability of skipping a merge. 0 gives the plain segmentation."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        model = {} if backend is None else json.loads(backend.to_str())["model"]
        has_affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
        if model.get("type") != "BPE" or not model["merges"] or has_affixes:
            raise ValueError(
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
        for rank, merge in enumerate(model["merges"]):
            first, second = merge.split(" ") if isinstance(merge, str) else merge
            pair = self._vocabulary[first], self._vocabulary[second]
            self._merges.setdefault(pair, (rank, self._vocabulary[first + second]))
        self._words: dict[Ids, tuple[Ids, int]] = {}
        self._permitted: dict[Ids, list[tuple[int, int]]] = {}

    def __call__(self, encoding: Encoding, random: Random) -> list[int]:
        """Return the ids of a text in a new segmentation, from the plain one."""
        ids: list[int] = []
        plain_ids, start = encoding.ids, 0
        for word, tokens in groupby(encoding.word_ids):
            end = start + len(list(tokens))
            plain, start = tuple(plain_ids[start:end]), end
            ids += plain if word is None or not self._whole.isdisjoint(plain) else self._sample(plain, random)
        return ids

    def _sample(self, plain: Ids, random: Random) -> Ids:
        # Two of three words skip no merge at a rate of 0.1, and take a single draw.
        ids, num_merges = self._words.get(plain) or self._word(plain)
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

    def _word(self, plain: Ids) -> tuple[Ids, int]:
        """Return the letters of a word, and the number of merges that make the plain segmentation of them."""
        letters = tuple(self._vocabulary.get(letter) for index in plain for letter in self._pieces[index])
        word = (plain, 0) if None in letters else (letters, len(letters) - len(plain))
        if len(self._words) < _MAX_STATES:
            self._words[plain] = word
        return word

    def _permitted_merges(self, ids: Ids) -> list[tuple[int, int]]:
        """Return start and merged id of each permitted merge, first learned first."""
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
