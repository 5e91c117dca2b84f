import pytest
import torch
from datasets import Dataset
from small_trainers import make_trainer, with_lengths

from metaphrase.data.collators import PackedCollator, PairCollator
from metaphrase.modeling import IGNORED_LABEL


def padded_already(pairs, width=24):
    """As tokenizers with `padding="max_length"` leave them."""
    rows = []
    for pair in pairs:
        source, target = pair["input_ids"], pair["labels"]
        missing = width - len(source), width - len(target)
        mask = [1] * len(source) + [0] * missing[0]
        row = {"input_ids": source + [0] * missing[0], "attention_mask": mask}
        row["labels"] = target + [IGNORED_LABEL] * missing[1]
        rows.append(row | {"source_length": width, "target_length": width})
    return Dataset.from_list(rows)


@pytest.mark.parametrize("budget", [None, 100])
def test_pairs_that_were_padded_already_are_what_they_were(budget, model, pairs, tmp_path):
    seen = []

    def score(texts, labels):
        seen.append((texts, labels))
        return {"length": sum(map(len, texts))}

    options = {"score": score, "max_tokens_per_batch": budget, "generation_options": {"max_length": 12}}
    found = []
    for data in (with_lengths(pairs), padded_already(pairs)):
        trainer = make_trainer(
            model, pairs, tmp_path, **options, remove_unused_columns=False, max_steps=2, logging_steps=1
        )
        trainer.train_dataset = trainer.eval_dataset = data
        metrics = trainer.evaluate()
        found.append((metrics["eval_loss"], metrics["eval_length"]))
        with torch.no_grad():
            losses = [trainer.compute_loss(trainer.model.train(), dict(PackedCollator(0)(list(data)))).item()]
            losses.append(trainer.compute_loss(trainer.model.train(), dict(PairCollator(0)(list(data)))).item())
        found[-1] += tuple(losses)
    assert found[1] == pytest.approx(found[0], rel=1e-5) and seen[0] == seen[1]


BUDGET = {"max_tokens_per_batch": 60}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (BUDGET | {"neftune_noise_alpha": 5.0}, "`neftune_noise_alpha` must be left out with `max_tokens_per_batch`"),
        (BUDGET | {"train_sampling_strategy": "sequential"}, "`train_sampling_strategy` must be left out"),
        (
            BUDGET | {"train": Dataset.from_dict({"input_ids": [[5]], "labels": [[6]]})},
            "columns source_length and target_length",
        ),
        (BUDGET | {"collator": lambda pairs: 1 / 0}, "`data_collator` must be one that only pads .* got a function"),
        (BUDGET | {"collator": type("Noisy", (PairCollator,), {})(0)}, "must be one that only pads .* got a Noisy"),
        ({"compute_loss_func": max}, "`compute_loss_func` must be left out"),
        ({"push_to_hub": True}, "`push_to_hub` must be left out"),
    ],
)
def test_what_would_be_ignored_is_refused(options, message, model, pairs, tmp_path):
    options = dict(options)
    data, collator = options.pop("train", with_lengths(pairs)), options.pop("collator", None)
    with pytest.raises(ValueError, match=message):
        trainer = make_trainer(model, pairs, tmp_path, max_steps=1, **options)
        trainer.train_dataset, trainer.data_collator = data, collator or trainer.data_collator
        trainer.train()
