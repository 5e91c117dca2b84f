"""Tests of `metaphrase.training.distributed`: a process that leaves its group keeps no thread that needs the interpreter."""

import contextlib
import gc
from pathlib import Path

import pytest
import torch
from small_experiments import make_recipe
from torch import distributed, nn

from metaphrase.scripts import train
from metaphrase.training.distributed import leave_processes

TASKS = Path("/proc/self/task")


def num_gloo_threads():
    if not TASKS.exists():
        pytest.skip("threads have no names that a process can read here")
    names = []
    for task in TASKS.iterdir():
        # A thread may end meanwhile.
        with contextlib.suppress(OSError):
            names.append((task / "comm").read_text())
    return sum("gloo" in name for name in names)


@pytest.fixture
def group():
    """A process that has a group of its own, with the threads that one of several has: their number before that."""
    # Of what other tests have left behind.
    gc.collect()
    before = num_gloo_threads()
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield before
    if distributed.is_initialized():
        distributed.destroy_process_group()


def test_no_thread_is_left_of_a_model_that_knows_itself(group):
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
    model(torch.ones(2, 3)).sum().backward()
    model.trainer = {"model": model}
    del model
    assert num_gloo_threads() > group
    leave_processes()
    assert num_gloo_threads() == group and not distributed.is_initialized()


def test_a_process_by_itself_has_nothing_to_leave():
    leave_processes()
    assert not distributed.is_initialized()


@pytest.mark.parametrize("is_dry_run", [False, True], ids=["run", "dry_run"])
def test_a_recipe_ends_outside_of_the_group(is_dry_run, group, data, tmp_path, capsys):
    make_recipe(data, tmp_path / "run", max_steps=2).save(tmp_path / "recipe.yaml")
    places = ["--data_dir", str(data), "--output_dir", str(tmp_path / "run")]
    train.main([str(tmp_path / "recipe.yaml"), *places, *["--dry_run"][: int(is_dry_run)]])
    assert not distributed.is_initialized() and num_gloo_threads() == group
    assert (tmp_path / "run" / "metrics.json").exists() != is_dry_run
