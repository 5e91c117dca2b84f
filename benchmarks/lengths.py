"""Sizes that several benchmarks share: length mixes of training pairs, and dimensions of published models."""

from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class LengthMix:
    """Correlated log-normal lengths of source and target, in tokens with the end of sequence, clipped to ranges.

    Spreads are standard deviations of the logarithm. `pairs_per_batch` is for peers that count pairs.
    """

    source_median: float
    target_median: float
    source_spread: float
    target_spread: float
    correlation: float
    source_range: tuple[int, int]
    target_range: tuple[int, int]
    pairs_per_batch: int

    def draw(self, pairs: int, seed: int) -> np.ndarray:
        """Return lengths (pairs, 2)."""
        generator = np.random.default_rng(seed)
        first = generator.standard_normal(pairs)
        second = self.correlation * first + (1 - self.correlation**2) ** 0.5 * generator.standard_normal(pairs)
        sources = np.exp(np.log(self.source_median) + self.source_spread * first)
        targets = np.exp(np.log(self.target_median) + self.target_spread * second)
        sides = [
            side.round().clip(*limits) for side, limits in ((sources, self.source_range), (targets, self.target_range))
        ]
        return np.stack(sides, axis=1).astype(np.int64)


STACKS = {
    f"{stack}_{name}": size
    for stack in ("encoder", "decoder")
    for name, size in (("layers", 6), ("attention_heads", 8), ("ffn_dim", 2048))
}
T5_SMALL = {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8}

MIXES = {
    # Fitted to the training pairs of Multi30k English to German with a joint BPE of 10 000.
    "multi30k": LengthMix(14.1, 14.1, 0.286, 0.315, 0.857, (5, 46), (3, 52), pairs_per_batch=128),
    # Like summarization: articles of all sizes, abstracts that hardly follow them.
    "heavy_tailed": LengthMix(180, 35, 0.75, 0.5, 0.3, (50, 800), (10, 120), pairs_per_batch=16),
    "512_tokens": LengthMix(512, 512, 0, 0, 0, (512, 512), (512, 512), pairs_per_batch=16),
}
MIXES["multi30k_large_batches"] = replace(MIXES["multi30k"], pairs_per_batch=512)
MIXES["512_tokens_few_pairs"] = replace(MIXES["512_tokens"], pairs_per_batch=4)


def make_pairs(mix: LengthMix, pairs: int, vocab_size: int, seed: int) -> dict[str, list]:
    """Return columns of random ids in the lengths of a mix. Each side ends with the end of sequence, 2."""
    lengths = mix.draw(pairs, seed)
    generator = np.random.default_rng(seed + 1)

    def rows(sizes: np.ndarray) -> list[list[int]]:
        return [[*generator.integers(4, vocab_size, size - 1).tolist(), 2] for size in sizes]

    sources, targets = rows(lengths[:, 0]), rows(lengths[:, 1])
    return {
        "input_ids": sources,
        "attention_mask": [[1] * len(source) for source in sources],
        "labels": targets,
        "source_length": lengths[:, 0].tolist(),
        "target_length": lengths[:, 1].tolist(),
        "length": lengths[:, 0].tolist(),
    }
