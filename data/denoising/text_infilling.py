"""Text infilling with sentence permutation: spans of a shuffled text masked, the target being the original text."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np
from transformers import PreTrainedTokenizerBase

SENTENCE_MARKS = (".", "!", "?", "…", "。", "！", "？", "．", "؟", "।")
CLOSING_MARKS = "\"'”’»)]}」』）"


@dataclass(frozen=True, kw_only=True)
class TextInfilling:
    """Shuffles the sentences of a block, then replaces spans of tokens by one mask each; the target is the block itself.

    Both sides are closed by the end of sequence. Sentences are shuffled inside their document: an end of sequence within the
    block parts two documents and stays in its place until the masking, which treats it as any other token.

    Span lengths are Poisson distributed. They are drawn until they hold the share of tokens to mask, and the last one is
    shortened to hold exactly that. A span without tokens inserts a mask. If there were more spans than masked tokens (only
    in tiny blocks, or with a mean below 1), as many of the empty ones are left out: a source is never longer than its block.
    All places for the spans are equally likely; two spans may touch and then leave two masks.

    Attributes:
        mask_token_id: Stands for a span of any length.
        eos_token_id: Closes source and target, and ends documents within a block.
        full_stop_ids: Tokens that end a sentence, such as `full_stop_ids_of(tokenizer)`. Without any, sentences stay in
            their order.
        mask_ratio: Share of the tokens that are masked.
        mean_span_length: Mean of the Poisson distribution, in tokens.

    Raises:
        ValueError: If a field is out of range.

    Source: Lewis et al. 2020, section 2.2 for both kinds of noise, section 5.1 for the share (arXiv 1910.13461).
    """

    mask_token_id: int
    eos_token_id: int
    full_stop_ids: Sequence[int] = ()
    mask_ratio: float = 0.3
    mean_span_length: float = 3.0
    lengths_are_exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 < self.mask_ratio < 1:
            raise ValueError(f"`mask_ratio` must be above 0 and below 1, got {self.mask_ratio}.")
        if not 0 < self.mean_span_length < float("inf"):
            raise ValueError(f"`mean_span_length` must be above 0 and finite, got {self.mean_span_length}.")
        full_stops = tuple(int(full_stop) for full_stop in self.full_stop_ids)
        if self.eos_token_id in full_stops:
            raise ValueError(
                f"`full_stop_ids` must not hold `eos_token_id`, which ends documents, got {full_stops} and {self.eos_token_id}."
            )
        object.__setattr__(self, "full_stop_ids", full_stops)

    def num_masked(self, block_length: int) -> int:
        """Returns how many tokens of a block are masked."""
        return max(round(block_length * self.mask_ratio), 1)

    def lengths(self, block_length: int) -> tuple[int, int]:
        """Returns the most tokens that the source of a block can have, and the tokens of its target, ends included."""
        return block_length + 1, block_length + 1

    def check_block_length(self, block_length: int) -> None:
        """Refuses empty blocks.

        Raises:
            ValueError: If there is no token to mask.
        """
        if block_length < 1:
            raise ValueError(f"A block must have at least 1 token to be masked, got {block_length}.")

    def __call__(
        self,
        block: Sequence[int] | np.ndarray,
        generator: np.random.Generator,
        ends: Sequence[int] | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Corrupts a block of ids `(tokens,)` and returns source and target.

        Args:
            block: The ids.
            generator: The source of randomness.
            ends: Where the sentences end, as for `permute_sentences`, if it is known better than from `full_stop_ids`. All
                sentences are then shuffled together.

        Raises:
            ValueError: As `check_block_length` and `permute_sentences` do.
        """
        self.check_block_length(len(block))
        block = np.asarray(block, dtype=np.int64)
        shuffled = block
        if ends is not None:
            shuffled = permute_sentences(block, ends, generator)
        elif self.full_stop_ids:
            shuffled = self._permute_in_documents(block, generator)
        lengths = self.span_lengths(len(block), generator)
        source = mask_spans(shuffled, lengths, self.mask_token_id, generator)
        return np.append(source, self.eos_token_id), np.append(block, self.eos_token_id)

    def span_lengths(self, block_length: int, generator: np.random.Generator) -> np.ndarray:
        """Draws the lengths of the spans to mask `(spans,)`, in random order."""
        budget = self.num_masked(block_length)
        lengths = np.empty(0, dtype=np.int64)
        while lengths.sum() < budget:
            lengths = np.append(lengths, generator.poisson(self.mean_span_length, size=budget))
        totals = np.cumsum(lengths)
        last = int(np.searchsorted(totals, budget))
        lengths = lengths[: last + 1]
        lengths[last] -= totals[last] - budget
        if (surplus := len(lengths) - budget) > 0:
            lengths = np.delete(lengths, np.flatnonzero(lengths == 0)[:surplus])
        # In the order of the draws, the shortened span would always be the last of the text.
        return generator.permutation(lengths)

    def _permute_in_documents(self, block: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        shuffled = block.copy()
        bounds = [-1, *np.flatnonzero(block == self.eos_token_id), len(block)]
        for before, behind in pairwise(bounds):
            document = block[before + 1 : behind]
            if len(document):
                ends = sentence_ends(document, self.full_stop_ids)
                shuffled[before + 1 : behind] = permute_sentences(document, ends, generator)
        return shuffled


def sentence_ends(ids: np.ndarray, full_stop_ids: Sequence[int]) -> np.ndarray:
    """Finds where sentences end: behind the last full stop of each run of them, and at the end of the ids.

    Args:
        ids: At least one id, `(tokens,)`.
        full_stop_ids: Tokens that end a sentence.

    Returns:
        The places behind the last token of each sentence, rising; the last one is the number of tokens.
    """
    is_full_stop = np.isin(ids, full_stop_ids)
    is_last = is_full_stop & ~np.append(is_full_stop[1:], False)
    is_last[-1] = True
    return np.flatnonzero(is_last) + 1


def permute_sentences(ids: np.ndarray, ends: Sequence[int], generator: np.random.Generator) -> np.ndarray:
    """Puts the sentences into a random order, all orders being equally likely.

    Args:
        ids: The tokens `(tokens,)`.
        ends: The places behind the last token of each sentence, rising up to the number of tokens.
        generator: The source of randomness.

    Raises:
        ValueError: If `ends` are not such places.
    """
    ends = np.asarray(ends, dtype=np.int64)
    if not len(ends) or ends[-1] != len(ids) or (np.diff(ends, prepend=0) < 1).any():
        raise ValueError(f"`ends` must rise from at least 1 to the {len(ids)} tokens, got {ends.tolist()}.")
    sentences = np.split(ids, ends[:-1])
    return np.concatenate([sentences[place] for place in generator.permutation(len(sentences))])


def mask_spans(ids: np.ndarray, lengths: np.ndarray, mask_token_id: int, generator: np.random.Generator) -> np.ndarray:
    """Replaces spans of the given lengths, in this order, by one mask each; a span without tokens inserts a mask.

    Args:
        ids: The tokens `(tokens,)`.
        lengths: Tokens of each span `(spans,)`, together no more than there are.
        mask_token_id: What stands for a span.
        generator: Decides the places, of which all choices are equally likely.
    """
    num_items = len(ids) - int(lengths.sum()) + len(lengths)
    is_mask = np.zeros(num_items, dtype=bool)
    is_mask[generator.choice(num_items, size=len(lengths), replace=False)] = True
    widths = np.ones(num_items, dtype=np.int64)
    widths[is_mask] = lengths
    starts = np.cumsum(widths) - widths
    masked = np.full(num_items, mask_token_id, dtype=np.int64)
    masked[~is_mask] = ids[starts[~is_mask]]
    return masked


def full_stop_ids_of(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Returns the ids of all tokens that end a sentence: those that end in one of `SENTENCE_MARKS`.

    Closing quotes and brackets may follow the mark within the token. A token may hold letters before it, since some tokenizers
    keep a word and its full stop together. Abbreviations and ordinals cannot be told from sentences.
    """
    found = []
    for index in sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids)):
        if tokenizer.decode([index]).rstrip(CLOSING_MARKS + " ").endswith(SENTENCE_MARKS):
            found.append(index)
    return tuple(found)
