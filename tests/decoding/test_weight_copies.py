"""Tests of `metaphrase.decoding.prepacked_weights`: a record shows every replaced module and parameter."""

import pytest
import torch
from tiny_models import tiny_model
from torch import nn
from torch.nn.utils import parametrize

from metaphrase.decoding.prepacked_weights import WeightRecord, walk


def make_module():
    deep = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.LayerNorm(3)))
    return nn.ModuleDict({"deep": deep, "flat": nn.Linear(3, 3)})


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


CHANGES = {
    "another module": lambda module: module["deep"][1].__setitem__(0, nn.LayerNorm(3)),
    "one module more": lambda module: module["deep"].append(nn.ReLU()),
    "one module less": lambda module: module["deep"].pop(1),
    "another parameter": lambda module: setattr(module["deep"][1][0], "bias", nn.Parameter(torch.zeros(3))),
    "no parameter": lambda module: setattr(module["flat"], "bias", None),
    "another class": lambda module: setattr(module["flat"], "__class__", nn.Bilinear),
    "parametrization": lambda module: parametrize.register_parametrization(module["flat"], "weight", Doubled()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_replaced_objects_are_seen(change):
    module = make_module()
    record = WeightRecord(module, [])
    assert record.is_current(module) and not record.is_current(make_module())
    change(module)
    assert not record.is_current(module)
    assert WeightRecord(module, []).is_current(module)


def test_written_entries_are_seen_in_recorded_weights():
    module = make_module()
    records = [WeightRecord(module, weights) for weights in ([], [module["flat"].weight])]
    with torch.no_grad():
        module["flat"].weight.fill_(2)
    module.train(False).requires_grad_(False)
    assert [record.is_current(module) for record in records] == [True, False]


def test_a_walk_finds_all_modules():
    model = tiny_model(position_embedding_type="relative", qk_norm=True, gated_mlp=True)
    assert set(walk(model)) == set(model.modules()) and len(walk(model)) == len(list(model.modules()))
    assert walk(nn.ReLU(), model)[1] is model
