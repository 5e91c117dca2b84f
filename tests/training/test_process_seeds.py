"""Several processes: what each draws for itself, and what all share."""

import random
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import distributed
from transformers import set_seed

from metaphrase.training import distributed as processes
from metaphrase.training.distributed import ProcessSeedsMixin


class Parent:
    def get_train_dataloader(self):
        return torch.random.initial_seed()

    def _init_training_state(self):
        return [random.random(), np.random.rand(), torch.rand(()).item()]  # noqa: NPY002


class Trainer(ProcessSeedsMixin, Parent):
    def __init__(self, process_index, world_size, parallelism_config=None, seed=5):
        self.args = SimpleNamespace(seed=seed, process_index=process_index, world_size=world_size)
        self.accelerator = SimpleNamespace(parallelism_config=parallelism_config)
        set_seed(seed)


@pytest.fixture(autouse=True)
def states():
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])  # noqa: NPY002
    torch.set_rng_state(before[2])


def drawn_by(*args, **kwargs):
    return Trainer(*args, **kwargs)._init_training_state()


def test_each_process_draws_other_numbers_and_the_same_ones_again():
    alone, others = drawn_by(0, 1), [drawn_by(rank, 3) for rank in range(3)]
    # Runs of one process are as ever.
    assert alone == others[0] == drawn_by(0, 2)
    for drawn in zip(*others, strict=True):
        assert len(set(drawn)) == 3
    assert [drawn_by(rank, 3) for rank in range(3)] == others
    assert drawn_by(1, 3, seed=6)[2] not in (others[1][2], others[2][2])


def test_processes_that_share_a_batch_draw_alike():
    assert drawn_by(1, 2, parallelism_config="tensors") == drawn_by(0, 1)


def test_the_order_of_pairs_is_one_for_all_processes_whatever_they_have_drawn():
    for rank in range(2):
        trainer = Trainer(rank, 2)
        assert trainer.get_train_dataloader() == 5
        trainer._init_training_state()
        state = torch.get_rng_state()
        # As where a smaller batch is tried.
        assert trainer.get_train_dataloader() == 5
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("size", "has_met", "meets"), [("2", False, True), ("2", True, False), ("1", False, False)])
def test_processes_on_a_cpu_wait_for_each_other_as_long_as_they_are_told(size, has_met, meets, monkeypatch):
    made = []
    monkeypatch.setenv("WORLD_SIZE", size)
    monkeypatch.setattr(distributed, "is_initialized", lambda: has_met)
    monkeypatch.setattr(processes, "PartialState", lambda **options: made.append(options))
    processes.meet_on_cpu(21600, "gloo")
    assert made == [{"cpu": True, "backend": "gloo", "timeout": timedelta(hours=6)}] * meets
