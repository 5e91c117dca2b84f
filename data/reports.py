"""Reports: how many pairs were read, how many are used, and why the others are not."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

# An unused pair counts under exactly one reason.
DROP_REASONS = {
    "malformed": "malformed",
    "invalid_utf8": "invalid UTF-8",
    "beyond_max_samples": "beyond max_samples",
    "other_splits": "in other splits",
    "empty_source": "empty source",
    "empty_target": "empty target",
    "source_too_long": "source too long",
    "target_too_long": "target too long",
}


@dataclass(frozen=True)
class LengthStatistics:
    """Lengths of one side in tokens, with end-of-sequence tokens."""

    mean: float
    percentile_95: float
    longest: int

    @classmethod
    def of(cls, lengths: np.ndarray) -> "LengthStatistics":
        """Summarize the lengths of at least one sequence."""
        return cls(float(np.mean(lengths)), float(np.percentile(lengths, 95)), int(np.max(lengths)))

    def __str__(self) -> str:
        return f"mean {self.mean:.1f}, 95% within {self.percentile_95:.0f}, longest {self.longest}"


@dataclass
class DataReport:
    """Counts of pairs. `read` equals `kept` plus the counts of all `DROP_REASONS`.

    Truncated pairs are kept. A pair cut on both sides counts on both.
    """

    read: int = 0
    malformed: int = 0
    invalid_utf8: int = 0
    beyond_max_samples: int = 0
    other_splits: int = 0
    empty_source: int = 0
    empty_target: int = 0
    source_too_long: int = 0
    target_too_long: int = 0
    source_truncated: int = 0
    target_truncated: int = 0
    source_lengths: LengthStatistics | None = None
    target_lengths: LengthStatistics | None = None

    @property
    def dropped(self) -> int:
        """Number of unused pairs."""
        return sum(getattr(self, reason) for reason in DROP_REASONS)

    @property
    def kept(self) -> int:
        """Number of used pairs."""
        return self.read - self.dropped

    def to_dict(self) -> dict[str, Any]:
        """Return all counts and statistics as plain values for JSON."""
        return {**asdict(self), "kept": self.kept, "dropped": self.dropped}

    def __str__(self) -> str:
        parts = [f"{self.kept} of {self.read} pairs kept"]
        if reasons := [f"{getattr(self, name)} {text}" for name, text in DROP_REASONS.items() if getattr(self, name)]:
            parts.append(f"not used: {', '.join(reasons)}")
        if self.source_truncated or self.target_truncated:
            parts.append(f"truncated: {self.source_truncated} sources, {self.target_truncated} targets")
        for side in ("source", "target"):
            if (statistics := getattr(self, f"{side}_lengths")) is not None:
                parts.append(f"{side} tokens: {statistics}")
        return "; ".join(parts) + "."
