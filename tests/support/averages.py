"""Helpers shared by several tests: averages."""

from pathlib import Path

from safetensors.torch import load_file


def mean_by_hand(states):
    return {name: sum(state[name].double() for state in states) / len(states) for name in states[0]}


def all_weights(folder):
    tensors = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        tensors.update(load_file(path))
    return tensors
