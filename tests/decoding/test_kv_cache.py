"""Tests of `metaphrase.decoding.kv_cache`: the selected rows and tokens are in the cache."""

import pytest
import torch

from metaphrase.decoding.kv_cache import KeyValueCache

LAYERS, HEADS, HEAD_DIM = 2, 3, 4


def filled(rows, length):
    """A cache, and the keys and values that it holds, `(2, layers, rows, heads, length, head_dim)`."""
    states = torch.randn(2, LAYERS, rows, HEADS, length, HEAD_DIM)
    return KeyValueCache.from_layers(zip(*states, strict=True)), states


def held(cache, length):
    return torch.stack((cache.keys[..., :length].transpose(3, 4), cache.values[..., :length, :]))


ROWS = {
    "same": [0, 1, 2, 3],
    "all move": [3, 2, 1, 0],
    "one for all": [3] * 4,
    "fewer": [2, 1],
    "more": [0, 0, 1, 1, 3, 3],
}


@pytest.mark.parametrize("name", ROWS)
def test_selected_rows(name):
    rows = torch.tensor(ROWS[name])
    cache, states = filled(4, length=5)
    cache.select_rows(rows)
    assert cache.rows == len(rows)
    assert torch.equal(held(cache, 5), states[:, :, rows])


TOKENS = {
    "first ones": [[0, 1, 2]] * 3,
    "all": [[0, 1, 2, 3, 4, 5]] * 3,
    "last ones": [[3, 4, 5]] * 3,
    "of each row": [[0, 1, 4, 5], [0, 2, 3, 4], [0, 1, 2, 3]],
    "one": [[5], [0], [3]],
    "one that belongs there behind others": [[1, 0, 2]] * 3,
}


@pytest.mark.parametrize("name", TOKENS)
def test_selected_tokens(name):
    indices = torch.tensor(TOKENS[name])
    cache, states = filled(3, length=6)
    cache.grow(6, 9)
    cache.select_tokens(indices)
    index = indices[None, None, :, None, :, None].expand(2, LAYERS, -1, HEADS, -1, HEAD_DIM)
    assert torch.equal(held(cache, indices.shape[1]), states.take_along_dim(index, dim=4))


def test_growing_keeps_what_is_there():
    cache, states = filled(4, length=16)
    cache.grow(16, 17)
    assert cache.capacity >= 32
    assert torch.equal(held(cache, 16), states)
    cache.grow(16, 1000)
    assert cache.capacity >= 1000
    assert torch.equal(held(cache, 16), states)


def test_views_are_of_the_cache():
    cache, states = filled(4, length=5)
    for layer, (keys, values) in enumerate(cache.views(3)):
        assert keys.mT.shape == values.shape == (4 * HEADS, 3, HEAD_DIM)
        assert torch.equal(keys.mT, states[0, layer, :, :, :3].flatten(0, 1))
        assert torch.equal(values, states[1, layer, :, :, :3].flatten(0, 1))
        keys[0, 0, 0] = values[0, 0, 0] = 7.0
        assert cache.keys[layer, 0, 0, 0, 0] == cache.values[layer, 0, 0, 0, 0] == 7.0
