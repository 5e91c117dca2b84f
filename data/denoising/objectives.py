"""Denoising objectives: span corruption (T5), text infilling with sentence permutation (BART), and UL2's mixture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np
from transformers import PreTrainedTokenizerBase

MIN_BLOCK_LENGTH = 2
SENTENCE_MARKS = (".", "!", "?", "…", "。", "！", "？", "．", "؟", "।")
CLOSING_MARKS = "\"'”’»)]}」』）"
# Mode, mean span length in tokens, noise density.
UL2_SPAN_CORRUPTIONS = (("R", 3.0, 0.15), ("R", 8.0, 0.15), ("X", 3.0, 0.5), ("X", 8.0, 0.5))
UL2_SPAN_CORRUPTIONS += (("X", 64.0, 0.15), ("X", 64.0, 0.5))
UL2_SUFFIX_FRACTION = 0.25
# Names of the modes R, S and X in the paper, and in the published models.
MODE_TOKENS = ({"R": "[R]", "S": "[S]", "X": "[X]"}, {"R": "[NLU]", "S": "[S2S]", "X": "[NLG]"})


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


@dataclass(frozen=True, kw_only=True)
class PrefixLanguageModeling:
    """Objective that splits a block: the source is its beginning, the target is the rest. The S-denoiser of UL2.

    The paper gives only the mean length of the target. Here all lengths from one token to twice the mean less one are equally
    likely.

    Attributes:
        eos_token_id: End of source and target.
        sentinel_id: Sentinel at the end of the source and at the beginning of the target, as in span corruption with a
            single span at the end.

    Source: Tay et al. 2022, section 3.1.2 (arXiv 2205.05131).
    """

    eos_token_id: int
    sentinel_id: int

    def longest_suffix(self, block_length: int) -> int:
        """Return the most tokens of a block that the target can hold."""
        mean = max(round(block_length * UL2_SUFFIX_FRACTION), 1)
        return min(2 * mean - 1, block_length - 1)

    def lengths(self, block_length: int) -> tuple[int, int]:
        """Return the most tokens of source and target of a block, with sentinel and end-of-sequence token."""
        return block_length + 1, self.longest_suffix(block_length) + 2

    def __call__(
        self, block: Sequence[int] | np.ndarray, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Split a block of at least two ids `(tokens,)` into source and target."""
        start = len(block) - int(generator.integers(1, self.longest_suffix(len(block)), endpoint=True))
        return replace_spans(block, np.array([[start, len(block)]]), [self.sentinel_id], self.eos_token_id)


@dataclass(frozen=True, kw_only=True)
class MixtureOfDenoisers:
    """Objective that draws one of several denoisers for each block.

    Attributes:
        denoisers: Mode and objective of each denoiser. All are equally frequent.
        mode_token_ids: Token before the source by mode; None for no token.

    Source: Tay et al. 2022, section 3.1.2 (arXiv 2205.05131).
    """

    denoisers: tuple[tuple[str, SpanCorruption | PrefixLanguageModeling], ...]
    mode_token_ids: Mapping[str, int] | None = None
    lengths_are_exact: ClassVar[bool] = False

    def lengths(self, block_length: int) -> tuple[int, int]:
        """Return the most tokens of source and target of a block, with mode token and end-of-sequence tokens."""
        sides = [objective.lengths(block_length) for _, objective in self.denoisers]
        source, target = map(max, zip(*sides, strict=True))
        return source + (self.mode_token_ids is not None), target

    def check_block_length(self, block_length: int) -> None:
        """Refuse blocks that some denoiser cannot corrupt.

        Raises:
            ValueError: As the objectives. The objective with most sentinels comes first.
        """
        check_long_enough(block_length)
        spans = [objective for _, objective in self.denoisers if isinstance(objective, SpanCorruption)]
        max(spans, key=lambda part: part.noise_counts(block_length)[1]).check_block_length(block_length)

    def __call__(
        self, block: Sequence[int] | np.ndarray, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Corrupt a block of ids `(tokens,)` and return source and target.

        Raises:
            ValueError: As the drawn objective.
        """
        count = len(self.denoisers)
        # Without `p`, NumPy would draw other numbers.
        mode, objective = self.denoisers[generator.choice(count, p=np.ones(count) / count)]
        source, target = objective(block, generator)
        return source if self.mode_token_ids is None else np.insert(source, 0, self.mode_token_ids[mode]), target


def ul2_mixture(
    sentinel_ids: Sequence[int],
    eos_token_id: int,
    mode_token_ids: Mapping[str, int] | None = None,
    spans_anywhere: bool = False,
) -> MixtureOfDenoisers:
    """Make the seven denoisers of UL2: two of regular, one of sequential and four of extreme noise, equally often.

    The paper leaves the distribution of span lengths open; its code draws spans as T5, and so does this function.

    Args:
        sentinel_ids: As for `SpanCorruption`. The first one also replaces the rest of a block in the S-denoiser.
        eos_token_id: End of source and target.
        mode_token_ids: Ids of the tokens before the source in the modes R, S and X, such as `mode_token_ids_of(tokenizer)`;
            None for no tokens.
        spans_anywhere: As for `SpanCorruption`.

    Source: Tay et al. 2022, section 3.1.2 with its table of settings, and 3.1.3 for the modes (arXiv 2205.05131).
    """
    denoisers = []
    for mode, mean, density in UL2_SPAN_CORRUPTIONS:
        options = {"noise_density": density, "mean_span_length": mean, "spans_anywhere": spans_anywhere}
        denoisers.append((mode, SpanCorruption(sentinel_ids=sentinel_ids, eos_token_id=eos_token_id, **options)))
    denoisers.append(("S", PrefixLanguageModeling(eos_token_id=eos_token_id, sentinel_id=sentinel_ids[0])))
    return MixtureOfDenoisers(denoisers=tuple(denoisers), mode_token_ids=mode_token_ids)


def mode_token_ids_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, int] | None:
    """Return the ids of the mode tokens by mode, with either set of names; None if the tokenizer has no mode token.

    Raises:
        ValueError: If the tokenizer has only some of them.
    """
    vocabulary = tokenizer.get_vocab()
    for names in MODE_TOKENS:
        present = [name for name in names.values() if name in vocabulary]
        if len(present) == len(names):
            return {mode: vocabulary[name] for mode, name in names.items()}
        if present:
            raise ValueError(f"A tokenizer must have all of {', '.join(names.values())} or none, got {present}.")
    return None
