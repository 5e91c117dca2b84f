"""MetaphraseTrainer from Python: what is given to it acts as it says, or is refused."""

import pytest
import torch
from datasets import Dataset
from other_families import other_model
from small_trainers import SIDES, make_trainer, with_lengths
from token_mean import token_mean

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


@pytest.mark.parametrize(
    ("family", "decodes"), [("metaphrase", False), ("metaphrase, packed", True), ("t5", False), ("t5", True)]
)
def test_a_loss_of_ones_own_trains_and_evaluates(family, decodes, model, pairs, tmp_path):
    network = other_model("t5") if family == "t5" else model
    most = network.config.vocab_size
    pairs = [{side: [token % (most - 3) + 3 for token in pair[side]] for side in SIDES.values()} for pair in pairs]
    options = {"compute_loss_func": token_mean, "predict_with_generate": decodes, "max_steps": 2, "logging_steps": 1}
    if decodes:
        options["score"] = lambda texts, labels: {"count": len(texts)}
    options |= {"max_tokens_per_batch": 60} if "packed" in family else {}
    state = {name: weight.clone() for name, weight in network.state_dict().items()}
    found = []
    for chosen in (options, {name: value for name, value in options.items() if name != "compute_loss_func"}):
        network.load_state_dict(state)
        trainer = make_trainer(network, pairs, tmp_path, **chosen)
        trainer.train_dataset = trainer.eval_dataset = with_lengths(pairs)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found.append([*losses, trainer.evaluate()["eval_loss"]])
    assert found[0] == pytest.approx(found[1], rel=1e-4) and len(found[0]) == 3


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
        (
            {"r_drop_alpha": 1.0, "compute_loss_func": token_mean},
            "`r_drop_alpha` must be left out with `compute_loss_func`",
        ),
    ],
)
def test_what_would_be_ignored_is_refused(options, message, model, pairs, tmp_path):
    options = dict(options)
    data, collator = options.pop("train", with_lengths(pairs)), options.pop("collator", None)
    with pytest.raises(ValueError, match=message):
        trainer = make_trainer(model, pairs, tmp_path, max_steps=1, **options)
        trainer.train_dataset, trainer.data_collator = data, collator or trainer.data_collator
        trainer.train()


def test_a_metric_that_would_choose_the_worst_is_pointed_out(model, pairs, tmp_path, caplog):
    make_trainer(model, pairs, tmp_path, metric_for_best_model="perplexity")
    assert "`greater_is_better` is True, while perplexity is better when it is lower" in caplog.text
    caplog.clear()
    for metric in ("loss", "bleu"):
        make_trainer(model, pairs, tmp_path, metric_for_best_model=metric)
    assert "greater_is_better" not in caplog.text
