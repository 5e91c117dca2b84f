"""Span corruption: sentinels replace spans of a text, and the target holds the spans."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

MIN_BLOCK_LENGTH = 2


@dataclass(frozen=True, kw_only=True)
class SpanCorruption:
    """Objective that replaces spans of a block by sentinels. The target is each sentinel followed by its span.

    The block `Thank you for inviting me to your party last week` may become the source
    `Thank you <X> me to your party <Y>` and the target `<X> for inviting <Y> last week`, each with an end-of-sequence token.
    Figure 2 of the paper ends the target with one more sentinel; the published training code does not, and neither does this
    class.

    The length of a block decides how many tokens and spans are hidden; the generator decides which ones. As in the paper's
    code, kept and hidden parts alternate and begin with a kept one: the first token is always kept and the last one always
    hidden. A single span (up to 30 tokens by default) therefore never moves. `spans_anywhere` lifts this rule.

    Attributes:
        sentinel_ids: Ids of the sentinels in the order of use, such as `sentinel_ids_of(tokenizer)`.
        eos_token_id: End of source and target.
        noise_density: Share of hidden tokens.
        mean_span_length: Mean number of tokens in a hidden span.
        spans_anywhere: True if a block may begin with a hidden span and end with a kept token.

    Raises:
        ValueError: If a field is out of range.

    Source: Raffel et al. 2020, sections 3.1.4, 3.3.3 and 3.3.4 (arXiv 1910.10683).
    """

    sentinel_ids: Sequence[int]
    eos_token_id: int
    noise_density: float = 0.15
    mean_span_length: float = 3.0
    spans_anywhere: bool = False
    lengths_are_exact: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.noise_density < 1:
            raise ValueError(f"`noise_density` must be above 0 and below 1, got {self.noise_density}.")
        if not self.mean_span_length >= 1:
            raise ValueError(f"`mean_span_length` must be at least 1, got {self.mean_span_length}.")

    def noise_counts(self, block_length: int) -> tuple[int, int]:
        """Return the numbers of hidden tokens and of spans of a block."""
        num_noise = min(max(round(block_length * self.noise_density), 1), block_length - 1)
        num_spans = max(round(num_noise / self.mean_span_length), 1)
        # A kept token stands before each span. The paper's code breaks if there are too few.
        return num_noise, min(num_spans, block_length - num_noise)

    def lengths(self, block_length: int) -> tuple[int, int]:
        """Return the tokens of source and target of a block, with end-of-sequence tokens."""
        num_noise, num_spans = self.noise_counts(block_length)
        return block_length - num_noise + num_spans + 1, num_noise + num_spans + 1

    def check_block_length(self, block_length: int) -> None:
        """Refuse blocks that cannot be corrupted.

        Raises:
            ValueError: If the block is shorter than two tokens, or there are fewer sentinels than it needs.
        """
        check_long_enough(block_length)
        _, needed = self.noise_counts(block_length)
        if needed > len(self.sentinel_ids):
            raise ValueError(
                f"`sentinel_ids` must hold at least {needed} ids for blocks of {block_length} tokens with `noise_density` "
                f"{self.noise_density} and `mean_span_length` {self.mean_span_length}, got {len(self.sentinel_ids)}. Set "
                "`num_sentinels` for a new tokenizer."
            )

    def is_fixed(self, block_length: int) -> bool:
        """Return True if all blocks of this length hide the same span."""
        return self.noise_counts(block_length)[1] == 1 and not self.spans_anywhere

    def spans(self, block_length: int, generator: np.random.Generator) -> np.ndarray:
        """Draw the spans to hide, as indices of the first token and behind the last token, `(spans, 2)`.

        Raises:
            ValueError: As `check_block_length`.
        """
        self.check_block_length(block_length)
        num_noise, num_spans = self.noise_counts(block_length)
        hidden = random_segmentation(num_noise, num_spans, generator)
        num_kept = block_length - num_noise
        if self.spans_anywhere:
            # Both outer parts get one token more and lose it again, so that they may be empty.
            visible = random_segmentation(num_kept + 2, num_spans + 1, generator)[:-1]
            visible[0] -= 1
        else:
            visible = random_segmentation(num_kept, num_spans, generator)
        ends = np.cumsum(visible + hidden)
        return np.stack([ends - hidden, ends], axis=1)

    def __call__(
        self, block: Sequence[int] | np.ndarray, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Corrupt a block of ids `(tokens,)` and return source and target.

        Raises:
            ValueError: As `check_block_length`.
        """
        spans = self.spans(len(block), generator)
        return replace_spans(block, spans, self.sentinel_ids, self.eos_token_id)


def check_long_enough(block_length: int) -> None:
    """Raise a `ValueError` for a block without a token to keep and a token to hide."""
    if block_length < MIN_BLOCK_LENGTH:
        raise ValueError(f"A block must have at least {MIN_BLOCK_LENGTH} tokens to be corrupted, got {block_length}.")


def random_segmentation(num_items: int, num_segments: int, generator: np.random.Generator) -> np.ndarray:
    """Cut a row of items into segments of at least one item. All ways are equally likely.

    Returns:
        The lengths of the segments `(num_segments,)`.
    """
    cuts = np.sort(generator.choice(num_items - 1, size=num_segments - 1, replace=False)) + 1
    return np.diff(cuts, prepend=0, append=num_items)


def replace_spans(
    block: Sequence[int] | np.ndarray, spans: np.ndarray, sentinel_ids: Sequence[int], eos_token_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """Replace each span by a sentinel.

    Args:
        block: The ids `(tokens,)`.
        spans: Index of the first token and behind the last token of each span `(spans, 2)`, in order and without overlap.
        sentinel_ids: At least one for each span.
        eos_token_id: End of both sides.

    Returns:
        The source, and the target: each sentinel followed by its span.
    """
    block = np.asarray(block, dtype=np.int64)
    source, target, position = [], [], 0
    for (start, end), sentinel in zip(spans, sentinel_ids, strict=False):
        source += [block[position:start], [sentinel]]
        target += [[sentinel], block[start:end]]
        position = end
    source += [block[position:], [eos_token_id]]
    target += [[eos_token_id]]
    return np.concatenate(source).astype(np.int64), np.concatenate(target).astype(np.int64)
