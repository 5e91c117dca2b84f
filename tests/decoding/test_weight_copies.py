"""Tests of `metaphrase.decoding.weight_copies`: whatever is put in the place of a part is seen."""

import pytest
import torch
from tiny_models import tiny_model
from torch import nn
from torch.nn.utils import parametrize

from metaphrase.decoding.weight_copies import ModuleRecord, walk


def make_module():
    return nn.ModuleDict(
        {"deep": nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.LayerNorm(3))), "flat": nn.Linear(3, 3)}
    )


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


CHANGES = {
    "a module": lambda module: module["deep"][1].__setitem__(0, nn.LayerNorm(3)),
    "one module more": lambda module: module["deep"].append(nn.ReLU()),
    "one module less": lambda module: module["deep"].pop(1),
    "a parameter": lambda module: setattr(module["deep"][1][0], "bias", nn.Parameter(torch.zeros(3))),
    "no parameter": lambda module: setattr(module["flat"], "bias", None),
    "a class": lambda module: setattr(module["flat"], "__class__", nn.Bilinear),
    "a parametrization": lambda module: parametrize.register_parametrization(module["flat"], "weight", Doubled()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_takes_the_place_of_a_part_is_seen(change):
    module = make_module()
    record = ModuleRecord(module)
    assert record.is_current(module)
    CHANGES[change](module)
    assert not record.is_current(module)
    assert ModuleRecord(module).is_current(module)


def test_what_is_written_into_a_part_is_not():
    module = make_module()
    record = ModuleRecord(module)
    with torch.no_grad():
        module["flat"].weight.fill_(2)
    assert record.is_current(module.train(False).requires_grad_(False))


def test_others_of_the_same_kind_are_others():
    one, other = make_module(), make_module()
    record = ModuleRecord(one, other)
    assert record.is_current(one, other)
    assert not record.is_current(other, one) and not record.is_current(one) and not record.is_current(one, other, one)


def test_a_walk_finds_all_modules():
    model = tiny_model(position_embedding_type="relative", qk_norm=True, gated_mlp=True)
    assert set(walk(model)) == set(model.modules()) and len(walk(model)) == len(list(model.modules()))
    assert walk(nn.ReLU(), model)[1] is model
