import numpy as np


def random_lengths(pairs=3000, seed=0):
    generator = np.random.default_rng(seed)
    sources = generator.lognormal(2.5, 0.5, pairs).astype(int) + 1
    return np.stack([sources, np.maximum(1, (sources * generator.normal(1, 0.2, pairs)).astype(int))], axis=1)
