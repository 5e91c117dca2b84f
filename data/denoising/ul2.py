"""UL2: a mixture of denoisers, in which one of several objectives corrupts each block and a mode token may name it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

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


class Objective(Protocol):
    """Objective that turns a block of ids into source and target. `SpanCorruption` documents each method.

    `lengths` is an upper bound for both sides unless `lengths_are_exact`.
    """

    @property
    def lengths_are_exact(self) -> bool: ...

    def lengths(self, block_length: int) -> tuple[int, int]: ...

    def check_block_length(self, block_length: int) -> None: ...

    def __call__(
        self, block: Sequence[int] | np.ndarray, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]: ...


@dataclass(frozen=True, kw_only=True)
class PrefixLanguageModeling:
    """Objective that splits a block: the source is its beginning, the target is the rest. The S-denoiser of UL2.

    The paper gives only the mean length of the target. Here all lengths from one token to twice the mean less one are equally
    likely.

    Attributes:
        eos_token_id: End of source and target.
        sentinel_id: Sentinel at the end of the source and at the beginning of the target, as in span corruption with a
            single span at the end; None for no sentinel.
        suffix_fraction: Mean share of the tokens in the target.

    Raises:
        ValueError: If `suffix_fraction` is out of range.

    Source: Tay et al. 2022, section 3.1.2 (arXiv 2205.05131).
    """

    eos_token_id: int
    sentinel_id: int | None = None
    suffix_fraction: float = UL2_SUFFIX_FRACTION
    lengths_are_exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 < self.suffix_fraction <= 0.5:
            raise ValueError(f"`suffix_fraction` must be above 0 and at most 0.5, got {self.suffix_fraction}.")

    def longest_suffix(self, block_length: int) -> int:
        """Return the most tokens of a block that the target can hold."""
        mean = max(round(block_length * self.suffix_fraction), 1)
        return min(2 * mean - 1, block_length - 1)

    def lengths(self, block_length: int) -> tuple[int, int]:
        """Return the most tokens of source and target of a block, with end-of-sequence tokens."""
        extra = 1 if self.sentinel_id is None else 2
        return block_length - 1 + extra, self.longest_suffix(block_length) + extra

    def check_block_length(self, block_length: int) -> None:
        """Raise a `ValueError` for a block shorter than two tokens."""
        check_long_enough(block_length)

    def __call__(
        self, block: Sequence[int] | np.ndarray, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Split a block of ids `(tokens,)` into source and target.

        Raises:
            ValueError: As `check_block_length`.
        """
        self.check_block_length(len(block))
        start = len(block) - int(generator.integers(1, self.longest_suffix(len(block)), endpoint=True))
        if self.sentinel_id is not None:
            return replace_spans(block, np.array([[start, len(block)]]), [self.sentinel_id], self.eos_token_id)
        block = np.asarray(block, dtype=np.int64)
        return np.append(block[:start], self.eos_token_id), np.append(block[start:], self.eos_token_id)


@dataclass(frozen=True)
class Denoiser:
    """One objective of a mixture.

    Attributes:
        mode: Name of the mode, such as R.
        objective: Objective that corrupts the block.
        mode_token_id: Token before the source; None for no token.
    """

    mode: str
    objective: Objective
    mode_token_id: int | None = None


@dataclass(frozen=True, kw_only=True)
class MixtureOfDenoisers:
    """Objective that draws one of several denoisers for each block.

    Attributes:
        denoisers: At least one, all equally frequent.

    Source: Tay et al. 2022, section 3.1.2 (arXiv 2205.05131).
    """

    denoisers: tuple[Denoiser, ...]
    lengths_are_exact: ClassVar[bool] = False

    def lengths(self, block_length: int) -> tuple[int, int]:
        """Return the most tokens of source and target of a block, with mode token and end-of-sequence tokens."""
        sides = []
        for denoiser in self.denoisers:
            source, target = denoiser.objective.lengths(block_length)
            sides.append((source + (denoiser.mode_token_id is not None), target))
        return max(source for source, _ in sides), max(target for _, target in sides)

    def check_block_length(self, block_length: int) -> None:
        """Refuse blocks that some denoiser cannot corrupt.

        Raises:
            ValueError: As the objectives. The objective with most sentinels comes first.
        """
        parts = [denoiser.objective for denoiser in self.denoisers if isinstance(denoiser.objective, SpanCorruption)]
        check_long_enough(block_length)
        for objective in sorted(parts, key=lambda part: -part.noise_counts(block_length)[1]):
            objective.check_block_length(block_length)
        for denoiser in self.denoisers:
            denoiser.objective.check_block_length(block_length)

    def draw(self, generator: np.random.Generator) -> Denoiser:
        count = len(self.denoisers)
        # Without `p`, NumPy would draw other numbers.
        return self.denoisers[generator.choice(count, p=np.ones(count) / count)]

    def __call__(
        self, block: Sequence[int] | np.ndarray, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Corrupt a block of ids `(tokens,)` and return source and target.

        Raises:
            ValueError: As the drawn objective.
        """
        denoiser = self.draw(generator)
        source, target = denoiser.objective(block, generator)
        if denoiser.mode_token_id is not None:
            source = np.insert(source, 0, denoiser.mode_token_id)
        return source, target


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

    Raises:
        ValueError: If there is no sentinel, a mode has no token, or an argument of a denoiser is wrong.

    Source: Tay et al. 2022, section 3.1.2 with its table of settings, and 3.1.3 for the modes (arXiv 2205.05131).
    """
    if not len(sentinel_ids):
        raise ValueError("`sentinel_ids` must hold at least one id, got none.")
    if mode_token_ids is not None and set(mode_token_ids) != set("RSX"):
        raise ValueError(f"`mode_token_ids` must name the modes R, S and X, got {sorted(mode_token_ids)}.")
    modes = dict(mode_token_ids or {})
    denoisers = []
    for mode, mean, density in UL2_SPAN_CORRUPTIONS:
        options = {"noise_density": density, "mean_span_length": mean, "spans_anywhere": spans_anywhere}
        objective = SpanCorruption(sentinel_ids=sentinel_ids, eos_token_id=eos_token_id, **options)
        denoisers.append(Denoiser(mode, objective, modes.get(mode)))
    sequential = PrefixLanguageModeling(eos_token_id=eos_token_id, sentinel_id=sentinel_ids[0])
    denoisers.append(Denoiser("S", sequential, modes.get("S")))
    return MixtureOfDenoisers(denoisers=tuple(denoisers))


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
