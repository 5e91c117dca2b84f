import pytest
import torch
from accelerate import skip_first_batches
from accelerate.data_loader import prepare_data_loader
from small_trainers import make_trainer, tiny_bart
from tiny_models import tiny_model
from torch.utils.data import DataLoader
from transformers import Seq2SeqTrainingArguments

from metaphrase.data.collators import PackedCollator, PairCollator
from metaphrase.modeling import IGNORED_LABEL


def trained_on(trainer, processes, monkeypatch, skipped=0, collator=None):
    """Labels of all steps, of the first process and those after it, and how many labels each process counts in a step."""
    steps = []
    loader = DataLoader(trainer.train_dataset, 5, collate_fn=collator or PairCollator(0))
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


def test_packed_pairs_have_no_rows_to_ignore(pairs, tmp_path, monkeypatch):
    trainer = make_trainer(tiny_model(vocab_size=60), pairs[:7], tmp_path)
    [step] = trained_on(trainer, 2, monkeypatch, collator=PackedCollator())
    assert sum(map(len, step)) > sum(len(pair["labels"]) for pair in pairs[:7])
