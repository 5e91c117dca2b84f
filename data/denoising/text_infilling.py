"""Text infilling with sentence permutation: spans of a shuffled text are masked, and the target is the original text."""

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
    """Objective that shuffles the sentences of a block and replaces spans of tokens by one mask each. The target is the block.

    Both sides get an end-of-sequence token. Sentences are shuffled within their document: an end-of-sequence token inside the
    block ends a document and stays in place until masking, which treats it as any other token.

    Span lengths follow a Poisson distribution. They are drawn until they reach the share of tokens to mask, and the last one
    is shortened to match it exactly. An empty span inserts a mask. If there are more spans than masked tokens (only in tiny
    blocks, or with a mean below 1), surplus empty spans are dropped: a source is never longer than its block. All positions of
    the spans are equally likely. Two spans that touch leave two masks.

    Attributes:
        mask_token_id: Mask of a span of any length.
        eos_token_id: End of source and target, and of documents within a block.
        full_stop_ids: Tokens that end a sentence, such as `full_stop_ids_of(tokenizer)`. Without any, sentences keep their
            order.
        noise_density: Share of masked tokens.
        mean_span_length: Mean of the Poisson distribution, in tokens.

    Raises:
        ValueError: If a field is out of range.

    Source: Lewis et al. 2020, section 2.2 for both kinds of noise, section 5.1 for the share (arXiv 1910.13461).
    """

    mask_token_id: int
    eos_token_id: int
    full_stop_ids: Sequence[int] = ()
    noise_density: float = 0.3
    mean_span_length: float = 3.0
    lengths_are_exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 < self.noise_density < 1:
            raise ValueError(f"`noise_density` must be above 0 and below 1, got {self.noise_density}.")
        if not 0 < self.mean_span_length < float("inf"):
            raise ValueError(f"`mean_span_length` must be above 0 and finite, got {self.mean_span_length}.")

    def lengths(self, block_length: int) -> tuple[int, int]:
        """Return the most tokens of a source and the tokens of its target, with end-of-sequence tokens."""
        return block_length + 1, block_length + 1

    def check_block_length(self, block_length: int) -> None:
        """Raise a `ValueError` for an empty block."""
        if block_length < 1:
            raise ValueError(f"A block must have at least 1 token to be masked, got {block_length}.")

    def __call__(
        self, block: Sequence[int] | np.ndarray, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Corrupt a block of ids `(tokens,)` and return source and target."""
        block = np.asarray(block, dtype=np.int64)
        shuffled = self._permute_in_documents(block, generator) if self.full_stop_ids else block
        lengths = self.span_lengths(len(block), generator)
        source = mask_spans(shuffled, lengths, self.mask_token_id, generator)
        return np.append(source, self.eos_token_id), np.append(block, self.eos_token_id)

    def span_lengths(self, block_length: int, generator: np.random.Generator) -> np.ndarray:
        """Draw the lengths of the spans to mask, `(spans,)`, in random order."""
        budget = max(round(block_length * self.noise_density), 1)
        lengths = np.empty(0, dtype=np.int64)
        while lengths.sum() < budget:
            lengths = np.append(lengths, generator.poisson(self.mean_span_length, size=budget))
        totals = np.cumsum(lengths)
        last = int(np.searchsorted(totals, budget))
        lengths = lengths[: last + 1]
        lengths[last] -= totals[last] - budget
        if (surplus := len(lengths) - budget) > 0:
            lengths = np.delete(lengths, np.flatnonzero(lengths == 0)[:surplus])
        # Otherwise the shortened span would always be the last of the text.
        return generator.permutation(lengths)

    def _permute_in_documents(self, block: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Put the sentences of each document into a random order. All orders are equally likely."""
        shuffled = block.copy()
        bounds = [-1, *np.flatnonzero(block == self.eos_token_id), len(block)]
        for before, behind in pairwise(bounds):
            document = block[before + 1 : behind]
            if len(document):
                sentences = np.split(document, sentence_ends(document, self.full_stop_ids)[:-1])
                order = generator.permutation(len(sentences))
                shuffled[before + 1 : behind] = np.concatenate([sentences[index] for index in order])
        return shuffled


def sentence_ends(ids: np.ndarray, full_stop_ids: Sequence[int]) -> np.ndarray:
    """Return the ends of sentences: behind each run of full stops, and at the end of the ids.

    Args:
        ids: At least one id, `(tokens,)`.
        full_stop_ids: Tokens that end a sentence.

    Returns:
        Indices behind the last token of each sentence, rising up to the number of tokens.
    """
    is_full_stop = np.isin(ids, full_stop_ids)
    is_last = is_full_stop & ~np.append(is_full_stop[1:], False)
    is_last[-1] = True
    return np.flatnonzero(is_last) + 1


def mask_spans(ids: np.ndarray, lengths: np.ndarray, mask_token_id: int, generator: np.random.Generator) -> np.ndarray:
    """Replace spans of the given lengths, in this order, by one mask each. An empty span inserts a mask.

    Args:
        ids: The tokens `(tokens,)`.
        lengths: Tokens of each span `(spans,)`, together at most all tokens.
        mask_token_id: Id of the mask.
        generator: Randomness of the positions, which are all equally likely.
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
    """Return the ids of all tokens that end in one of `SENTENCE_MARKS`.

    Closing quotes and brackets may follow the mark, and letters may stand before it. Abbreviations and ordinals look like ends
    of sentences.
    """
    ids = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))
    return tuple(
        token for token in ids if tokenizer.decode([token]).rstrip(CLOSING_MARKS + " ").endswith(SENTENCE_MARKS)
    )
