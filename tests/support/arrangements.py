"""Helpers shared by several tests: arrangements."""

import datasets
import pytest
import torch
from small_runs import QUIET
from tiny_models import tiny_model
from transformers import Seq2SeqTrainingArguments

from metaphrase.data.collators import PackedCollator, PairCollator
from metaphrase.training.trainer import MetaphraseTrainer

COLLATORS = {"padded": PairCollator(0), "packed": PackedCollator()}


def make_pairs(count=24):
    generator = torch.Generator().manual_seed(1)

    def row():
        length = int(torch.randint(1, 14, (), generator=generator))
        return [*torch.randint(4, 60, (length,), generator=generator).tolist(), 2]

    sources, targets = [row() for _ in range(count)], [row() for _ in range(count)]
    lengths = {"source_length": list(map(len, sources)), "target_length": list(map(len, targets))}
    return datasets.Dataset.from_dict({"input_ids": sources, "labels": targets, **lengths})


def train(
    folder,
    collator=COLLATORS["padded"],
    max_tokens_per_batch=None,
    fields=None,
    model=None,
    r_drop_alpha=0.0,
    **options,
):
    """Trains two epochs and returns the weights and the logged losses."""
    model = model or tiny_model(vocab_size=60, **{"initializer_range": 0.2, **(fields or {})})
    settings = {"optim": "sgd", "learning_rate": 0.2, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    settings |= {"num_train_epochs": 2, "logging_steps": 1, "save_strategy": "no"}
    arguments = Seq2SeqTrainingArguments(output_dir=str(folder), **QUIET | settings | options)
    parts = {"data_collator": collator, "max_tokens_per_batch": max_tokens_per_batch, "r_drop_alpha": r_drop_alpha}
    trainer = MetaphraseTrainer(model=model, args=arguments, train_dataset=make_pairs(), **parts)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}, losses


def assert_same(actual, expected, **tolerance):
    for name, weight in expected[0].items():
        torch.testing.assert_close(actual[0][name], weight, msg=lambda text, name=name: f"{name}: {text}", **tolerance)
    assert actual[1] == pytest.approx(expected[1], rel=1e-4)
