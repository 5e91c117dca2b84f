import contextlib
import gc
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import skip_first_batches
from accelerate.data_loader import prepare_data_loader
from small_experiments import ONE_STEP, make_recipe
from small_trainers import make_trainer, tiny_bart
from subcommands import execute
from tiny_models import tiny_model
from torch import distributed
from torch.utils.data import DataLoader
from transformers import Seq2SeqTrainingArguments, set_seed

from metaphrase.data.collators import PairCollator
from metaphrase.modeling import IGNORED_LABEL
from metaphrase.scripts import train
from metaphrase.training import distributed as training_distributed
from metaphrase.training.distributed import check_same_in_all, seed_process


@pytest.fixture(autouse=True)
def states():
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])  # noqa: NPY002
    torch.set_rng_state(before[2])


def drawn_by(process_index, world_size, parallelism_config=None, seed=5):
    set_seed(seed)
    arguments = SimpleNamespace(seed=seed, process_index=process_index, world_size=world_size)
    seed_process(arguments, SimpleNamespace(parallelism_config=parallelism_config))
    return [random.random(), np.random.rand(), torch.rand(()).item()]  # noqa: NPY002


def test_each_process_draws_other_numbers_and_the_same_ones_again():
    alone, others = drawn_by(0, 1), [drawn_by(rank, 3) for rank in range(3)]
    assert alone == others[0] == drawn_by(0, 2)
    for drawn in zip(*others, strict=True):
        assert len(set(drawn)) == 3
    assert [drawn_by(rank, 3) for rank in range(3)] == others
    assert drawn_by(1, 3, seed=6)[2] not in (others[1][2], others[2][2])
    # Processes that share a batch draw alike.
    assert drawn_by(1, 2, parallelism_config="tensors") == drawn_by(0, 1)


def test_a_trainer_gives_all_processes_one_order(model, pairs, tmp_path, monkeypatch):
    trainer = make_trainer(model, pairs, tmp_path)
    seeds = []
    monkeypatch.setattr(trainer, "_get_train_sampler", lambda _: seeds.append(torch.random.initial_seed()))
    monkeypatch.setattr(Seq2SeqTrainingArguments, "world_size", 2)
    for number in range(2):
        torch.manual_seed(100 + number)
        state = torch.get_rng_state()
        trainer.get_train_dataloader()
        assert torch.equal(torch.get_rng_state(), state)
    assert seeds == [trainer.args.seed] * 2


def num_gloo_threads():
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            names.append((task / "comm").read_text())
    return sum("gloo" in name for name in names)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads have no names that a process can read here")
def test_a_recipe_ends_outside_of_the_group(data, tmp_path):
    # Free the groups of earlier tests.
    gc.collect()
    before = num_gloo_threads()
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    make_recipe(data, tmp_path / "run", **ONE_STEP).save(tmp_path / "recipe.yaml")
    execute(train, [str(tmp_path / "recipe.yaml"), "--data_dir", str(data), "--output_dir", str(tmp_path / "run")])
    assert not distributed.is_initialized() and num_gloo_threads() == before
    assert (tmp_path / "run" / "model.safetensors").exists()


def trained_on(trainer, processes, monkeypatch, skipped=0):
    """Labels of all steps, of the first process and those after it, and how many labels each process counts in a step."""
    steps = []
    loader = DataLoader(trainer.train_dataset, 5, collate_fn=PairCollator(0))
    for rank in range(processes):
        monkeypatch.setattr(Seq2SeqTrainingArguments, "process_index", rank)
        monkeypatch.setattr(Seq2SeqTrainingArguments, "world_size", processes)
        monkeypatch.setattr(trainer.args, "average_tokens_across_devices", False)
        share = prepare_data_loader(loader, num_processes=processes, process_index=rank)
        batches = iter(skip_first_batches(share, skipped))
        for number in range(len(share) - skipped):
            [batch], num_items = trainer.get_batch_samples(batches, 1, torch.device("cpu"))
            steps += [[]] * (number + 1 - len(steps))
            rows = [row[row != IGNORED_LABEL].tolist() for row in batch["labels"]]
            assert num_items == sum(map(len, rows))
            steps[number] = steps[number] + [row for row in rows if row]
    monkeypatch.undo()
    return steps


@pytest.mark.parametrize(
    ("family", "processes", "count"),
    [("ours", 2, 12), ("other", 2, 11), ("ours", 3, 6), ("ours", 3, 2), ("ours", 2, 10)],
)
def test_each_pair_is_trained_on_once_in_an_epoch(family, processes, count, pairs, tmp_path, monkeypatch):
    trainer = make_trainer(tiny_model(vocab_size=60) if family == "ours" else tiny_bart(), pairs[:count], tmp_path)
    steps = trained_on(trainer, processes, monkeypatch)
    size = 5 * processes
    assert steps == [[pair["labels"] for pair in pairs[start:count][:size]] for start in range(0, count, size)]
    # A run that goes on in the middle of an epoch knows it too.
    for skipped in range(1, len(steps)):
        assert trained_on(trainer, processes, monkeypatch, skipped) == steps[skipped:]


@pytest.mark.parametrize(("name", "value"), [("data", {"num_pairs": 7}), ("checkpoint", None), ("versions", "5.24")])
def test_processes_that_differ_are_refused(name, value, monkeypatch):
    facts = {"data": {"num_pairs": 8}, "checkpoint": "checkpoint-3", "versions": "5.23"}
    check_same_in_all(**facts)
    for others, changed in (([{}, {}], {}), ([{}, {name: value}], {name: value})):
        monkeypatch.setattr(
            training_distributed, "gather_object", lambda own, new=others: own + [facts | one for one in new]
        )
        context = pytest.raises(ValueError, match=f"0 and 2: {name} ") if changed else contextlib.nullcontext()
        with context:
            check_same_in_all(**facts)
