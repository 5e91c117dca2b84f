"""States of the process-wide random generators: saved, restored, and made from a seed."""

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


def get_random_states() -> tuple:
    """Return the states of the process-wide generators of Python, numpy and torch on the CPU."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002


def set_random_states(states: tuple) -> None:
    """Set the process-wide generators to states of `get_random_states` or `make_random_states`."""
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    torch.set_rng_state(states[2])


def make_random_states(seed: int, epoch: int) -> tuple:
    """Return states that follow from seed and epoch. The process-wide generators stay as they are."""
    words = np.random.SeedSequence([seed, epoch]).generate_state(3).tolist()
    return (
        random.Random(words[0]).getstate(),
        np.random.RandomState(words[1]).get_state(),
        torch.Generator().manual_seed(words[2]).get_state(),
    )


def are_equal_states(first: tuple, second: tuple) -> bool:
    """True if both states draw the same numbers."""
    is_numpy_equal = first[1][2] == second[1][2] and np.array_equal(first[1][1], second[1][1])
    return is_numpy_equal and first[0] == second[0] and torch.equal(first[2], second[2])


@contextlib.contextmanager
def seeded_torch(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator inside this context, and restore all random states afterwards."""
    states = get_random_states()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        set_random_states(states)


@contextlib.contextmanager
def unchanged_random_states(device: torch.device) -> Iterator[None]:
    """Restore all random states after this context, the device's too."""
    states = get_random_states()
    is_forked = device.type not in ("cpu", "mps")
    devices, device_type = ([device], device.type) if is_forked else ([], "cuda")
    try:
        with torch.random.fork_rng(devices, device_type=device_type):
            yield
    finally:
        set_random_states(states)
