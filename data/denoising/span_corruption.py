"""Span corruption: spans of a text replaced by sentinels, the target being what they hid."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

MIN_BLOCK_LENGTH = 2


@dataclass(frozen=True, kw_only=True)
class SpanCorruption:
    """Hides spans of a block; the target is each sentinel followed by the tokens it stands for.

    The block `Thank you for inviting me to your party last week` may become the source
    `Thank you <X> me to your party <Y>` and the target `<X> for inviting <Y> last week`, each closed by the end of sequence.
    Figure 2 of the paper closes the target with one more sentinel; the code that trained the models closes both sides with
    the end of sequence instead, and so does this class.

    How many tokens and spans are hidden follows from the length of the block alone; which spans these are is random. As in the
    paper's code, parts kept and hidden alternate and begin with a kept one, so the first token is always kept and the last one
    always hidden. Where there is but one span (up to 30 tokens by default), it is thus always the same: `spans_anywhere`
    lets spans lie at any place instead.

    Attributes:
        sentinel_ids: Ids of the sentinels in the order of use. `sentinel_ids_of(tokenizer)` reads them from a tokenizer: in
            T5's vocabularies, where `<extra_id_0>` has the highest id, they fall.
        eos_token_id: Closes source and target.
        noise_density: Share of the tokens that are hidden.
        mean_span_length: Mean number of tokens in a hidden span.
        spans_anywhere: Whether a block may begin with a hidden span and end with a kept token.

    Raises:
        ValueError: If a field is out of range, or two sentinels are equal.

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
        sentinels = tuple(int(sentinel) for sentinel in self.sentinel_ids)
        if len({*sentinels, self.eos_token_id}) <= len(sentinels):
            raise ValueError(
                "`sentinel_ids` must differ from one another and from `eos_token_id`, "
                f"got {sentinels} and {self.eos_token_id}."
            )
        object.__setattr__(self, "sentinel_ids", sentinels)

    def noise_counts(self, block_length: int) -> tuple[int, int]:
        """Returns how many tokens of a block are hidden, and in how many spans."""
        num_noise = min(max(round(block_length * self.noise_density), 1), block_length - 1)
        num_spans = max(round(num_noise / self.mean_span_length), 1)
        # A kept token stands before each span. The paper's code would break where there are too few.
        return num_noise, min(num_spans, block_length - num_noise)

    def lengths(self, block_length: int) -> tuple[int, int]:
        """Returns the tokens of the source and of the target of a block, ends of sequence included."""
        num_noise, num_spans = self.noise_counts(block_length)
        return block_length - num_noise + num_spans + 1, num_noise + num_spans + 1

    def check_block_length(self, block_length: int) -> None:
        """Refuses blocks that cannot be corrupted.

        Raises:
            ValueError: If the block is shorter than two tokens, or there are fewer sentinels than it needs.
        """
        check_long_enough(block_length)
        _, needed = self.noise_counts(block_length)
        if needed > len(self.sentinel_ids):
            raise ValueError(
                f"`sentinel_ids` must hold at least {needed} ids for blocks of {block_length} tokens with `noise_density` "
                f"{self.noise_density} and `mean_span_length` {self.mean_span_length}, got {len(self.sentinel_ids)}: a new "
                "tokenizer has as many as `num_sentinels` says."
            )

    def is_fixed(self, block_length: int) -> bool:
        """Whether all blocks of this length are corrupted at the same place."""
        return self.noise_counts(block_length)[1] == 1 and not self.spans_anywhere

    def spans(self, block_length: int, generator: np.random.Generator) -> np.ndarray:
        """Draws the spans to hide: their first tokens and the tokens behind their last, `(spans, 2)`.

        Raises:
            ValueError: As `check_block_length` does.
        """
        self.check_block_length(block_length)
        num_noise, num_spans = self.noise_counts(block_length)
        hidden = random_segmentation(num_noise, num_spans, generator)
        num_kept = block_length - num_noise
        if self.spans_anywhere:
            # One part more, and with the two tokens taken back the outer parts may be empty.
            kept = random_segmentation(num_kept + 2, num_spans + 1, generator)[:-1]
            kept[0] -= 1
        else:
            kept = random_segmentation(num_kept, num_spans, generator)
        ends = np.cumsum(kept + hidden)
        return np.stack([ends - hidden, ends], axis=1)

    def __call__(
        self, block: Sequence[int] | np.ndarray, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Corrupts a block of ids `(tokens,)` and returns source and target.

        Raises:
            ValueError: As `check_block_length` does.
        """
        spans = self.spans(len(block), generator)
        return replace_spans(block, spans, self.sentinel_ids, self.eos_token_id)


def check_long_enough(block_length: int) -> None:
    """Refuses a block without a token to keep and a token to hide.

    Raises:
        ValueError: If the block is shorter than two tokens.
    """
    if block_length < MIN_BLOCK_LENGTH:
        raise ValueError(f"A block must have at least {MIN_BLOCK_LENGTH} tokens to be corrupted, got {block_length}.")


def random_segmentation(num_items: int, num_segments: int, generator: np.random.Generator) -> np.ndarray:
    """Cuts a row of items into segments of at least one item, all ways being equally likely.

    Returns:
        The lengths of the segments `(num_segments,)`.
    """
    cuts = np.sort(generator.choice(num_items - 1, size=num_segments - 1, replace=False)) + 1
    return np.diff(cuts, prepend=0, append=num_items)


def replace_spans(
    block: Sequence[int] | np.ndarray, spans: np.ndarray, sentinel_ids: Sequence[int], eos_token_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """Puts a sentinel in the place of each span.

    Args:
        block: The ids `(tokens,)`.
        spans: First token and the token behind the last one of each span `(spans, 2)`, in order and without overlap.
        sentinel_ids: At least one for each span.
        eos_token_id: Closes both sides.

    Returns:
        The source, and the target: each sentinel followed by its span.
    """
    block = np.asarray(block, dtype=np.int64)
    source, target, place = [], [], 0
    for (start, end), sentinel in zip(spans, sentinel_ids, strict=False):
        source += [block[place:start], [sentinel]]
        target += [[sentinel], block[start:end]]
        place = end
    source += [block[place:], [eos_token_id]]
    target += [[eos_token_id]]
    return np.concatenate(source).astype(np.int64), np.concatenate(target).astype(np.int64)
