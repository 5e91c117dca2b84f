"""UL2: a mixture of denoisers, in which one of several objectives corrupts each block and a mode token may name it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from metaphrase.data.denoising.span_corruption import SpanCorruption, check_long_enough, replace_spans

# Mode, mean span length in tokens, noise density.
UL2_SPAN_CORRUPTIONS = (
    ("R", 3.0, 0.15),
    ("R", 8.0, 0.15),
    ("X", 3.0, 0.5),
    ("X", 8.0, 0.5),
    ("X", 64.0, 0.15),
    ("X", 64.0, 0.5),
)
UL2_SUFFIX_FRACTION = 0.25
# Names of the modes R, S and X in the paper, and in the published models.
MODE_TOKENS = ({"R": "[R]", "S": "[S]", "X": "[X]"}, {"R": "[NLU]", "S": "[S2S]", "X": "[NLG]"})


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
