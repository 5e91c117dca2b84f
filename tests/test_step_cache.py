"""Tests of `metaphrase.modeling.step_cache`: rows are those that were chosen, however they got there."""

import pytest
import torch

from metaphrase.modeling.step_cache import StepCache, layer_views

LAYERS, HEADS, HEAD_DIM = 2, 3, 4


def filled(rows, length, capacity=16):
    """A cache whose entries tell their row, and what it holds."""
    cache = StepCache(LAYERS, rows, HEADS, HEAD_DIM, like=torch.zeros(1))
    cache.grow(0, capacity)
    states = torch.randn(LAYERS, 2, rows, HEADS, length, HEAD_DIM)
    cache.states[:, :, :, :, :length] = states
    return cache, states


def held(cache, length):
    cache.settle(length)
    return cache.states[:, :, :, :, :length]


CHOICES = {
    "same": [0, 1, 2, 3, 4, 5, 6, 7],
    "one moves": [0, 1, 1, 3, 4, 5, 6, 7],
    "all move": [7, 6, 5, 4, 3, 2, 1, 0],
    "one for all": [3] * 8,
    "fewer": [6, 1],
    "more": [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7],
}


@pytest.mark.parametrize("name", list(CHOICES))
def test_rows_are_those_chosen(name):
    rows = torch.tensor(CHOICES[name])
    cache, states = filled(8, length=5)
    cache.choose(rows)
    assert cache.rows == len(rows)
    assert torch.equal(held(cache, 5), states[:, :, rows])


def test_choices_add_up():
    generator = torch.Generator().manual_seed(0)
    cache, states = filled(8, length=5)
    for turn in range(40):
        count = (8, 8, 8, 12, 6)[turn % 5]
        rows = torch.randint(0, cache.rows, (count,), generator=generator)
        cache.choose(rows)
        states = states[:, :, rows]
        if turn % 3:
            assert torch.equal(held(cache, 5), states)
    assert torch.equal(held(cache, 5), states)


def test_unchanged_beginnings_are_not_moved():
    cache, states = filled(4, length=6)
    states[:, :, :, :, :4] = states[:, :, :1, :, :4]
    cache.states[:, :, :, :, :6] = states
    rows = torch.tensor([2, 2, 3, 0])
    cache.choose(rows)
    before = cache.states.data_ptr()
    cache.settle(6, unchanged=4)
    assert cache.states.data_ptr() == before
    assert torch.equal(held(cache, 6), states[:, :, rows])


def test_two_buffers_do_for_rows_that_change_places():
    cache, _ = filled(4, length=6)
    places = set()
    for _ in range(6):
        cache.choose(torch.tensor([1, 2, 3, 0]))
        cache.settle(6)
        places.add(cache.states.data_ptr())
    assert len(places) == 2


def test_growing_keeps_what_is_there():
    cache, states = filled(4, length=16)
    rows = torch.tensor([3, 0])
    cache.choose(rows)
    cache.grow(16, 17)
    assert cache.capacity >= 32
    assert torch.equal(held(cache, 16), states[:, :, rows])
    cache.grow(16, 1000)
    assert cache.capacity >= 1000
    assert torch.equal(held(cache, 16), states[:, :, rows])


def test_views_are_of_the_cache():
    cache, states = filled(4, length=5)
    for layer, (keys, values) in enumerate(layer_views(cache.states[:, :, :, :, :5])):
        assert keys.shape == (4 * HEADS, 5, HEAD_DIM)
        assert torch.equal(keys, states[layer, 0].flatten(0, 1))
        assert torch.equal(values, states[layer, 1].flatten(0, 1))
        keys[0, 0, 0] = 7.0
        assert cache.states[layer, 0, 0, 0, 0, 0] == 7.0
