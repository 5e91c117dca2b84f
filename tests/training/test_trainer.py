import pytest
import torch
from datasets import Dataset
from other_families import other_model
from small_trainers import SIDES, loss_for_each_token, make_trainer, tiny_bart, with_lengths
from tiny_generator import SOURCES, TARGETS, tiny_pair
from tiny_models import tiny_model
from transformers import DataCollatorForSeq2Seq

from metaphrase.data.collators import PackedCollator, PairCollator
from metaphrase.data.token_budget import WithFillers
from metaphrase.modeling import IGNORED_LABEL, sequence_loss, shift_right
from metaphrase.training.checkpoints import checkpoints_in, step_of

EACH_STEP = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 6}
EACH_STEP |= {"generation_max_length": 4}


@pytest.mark.parametrize(("family", "r_drop_alpha"), [("ours", 0.0), ("ours", 1.0), ("other", 0.0)])
def test_a_filler_adds_nothing_to_a_step(family, r_drop_alpha, model, pairs, tmp_path):
    model = tiny_bart() if family == "other" else model
    trainer = make_trainer(model, pairs, tmp_path, max_tokens_per_batch=40, r_drop_alpha=r_drop_alpha)
    collate = PackedCollator(0) if trainer.packs_pairs else PairCollator(0)
    batch = collate([WithFillers(pairs)[len(pairs) + 1]])
    loss = trainer.compute_loss(model.train(), batch, num_items_in_batch=torch.tensor(5))
    assert loss.item() == 0
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


def test_a_budget_counts_the_widths_that_the_collator_makes(pairs, tmp_path):
    trainer = make_trainer(tiny_bart(), pairs, tmp_path, max_tokens_per_batch=64)
    trainer.data_collator, trainer.train_dataset = PairCollator(0, 8), with_lengths(pairs * 5)
    costs = [batch["input_ids"].numel() + batch["labels"].numel() for batch in trainer.get_train_dataloader()]
    assert max(costs) <= 64
    # transformers' own rounds up to nothing, unless it is told to.
    trainer.data_collator = DataCollatorForSeq2Seq(None)
    assert len(trainer.get_train_dataloader()) > 0


@pytest.mark.parametrize(("is_packed", "length"), [(True, {"max_steps": 5}), (False, {"num_train_epochs": 2})])
def test_pairs_of_a_budget_are_counted_as_trained_on(is_packed, length, model, pairs, tmp_path, monkeypatch):
    monkeypatch.setattr(type(model), "supports_packing", is_packed)
    trainer = make_trainer(model, pairs, tmp_path, max_tokens_per_batch=40, **length)
    trainer.train_dataset = with_lengths(pairs)
    metrics = trainer.train().metrics
    samples = metrics["train_samples_per_second"] * metrics["train_runtime"]
    assert samples == pytest.approx(metrics["epoch"] * len(pairs), rel=0.02)


@pytest.mark.parametrize("make_model", [lambda: tiny_model(vocab_size=60), tiny_bart])
def test_training_loss_is_smoothed_and_that_of_an_evaluation_is_not(make_model, pairs, tmp_path):
    model = make_model()
    trainer = make_trainer(model, pairs, tmp_path, label_smoothing_factor=0.3)
    batch = PairCollator(0)(pairs[:4])
    loss = trainer.compute_loss(model.train(), dict(batch), num_items_in_batch=torch.tensor(50))
    logits = model(**batch).logits
    assert torch.allclose(loss, sequence_loss(logits, batch["labels"], 50, label_smoothing=0.3))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss_for_each_token(model, pairs), rel=1e-5)


def test_a_family_that_does_not_shift_labels_learns_them(tmp_path):
    """FSMT's class would let its decoder read the sources."""
    pair = tiny_pair()
    sides = zip(pair.encode_sources(SOURCES), pair.encode_targets(TARGETS), strict=True)
    pairs = [{"input_ids": source, "labels": target} for source, target in sides]
    model = other_model("fsmt")
    trainer = make_trainer(model, pairs, tmp_path)
    batch = PairCollator(model.config.pad_token_id)(pairs)
    shifted = shift_right(batch["labels"], model.config.pad_token_id, model.config.decoder_start_token_id)
    expected = sequence_loss(model.eval()(**batch, decoder_input_ids=shifted).logits, batch["labels"])
    assert trainer.compute_loss(model, dict(batch)).item() == pytest.approx(expected.item(), rel=1e-6)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.item(), rel=1e-5)
    trainer.train()


def test_other_families_refuse_r_drop(pairs, tmp_path):
    with pytest.raises(ValueError, match="`r_drop_alpha` must come with a Metaphrase model, got a BartForCond"):
        make_trainer(tiny_bart(), pairs, tmp_path, r_drop_alpha=1.0)


@pytest.mark.parametrize(("half", "multiple"), [({}, 1), ({"bf16": True}, 32)])
def test_packed_rows_have_few_lengths_in_half_precision(half, multiple, model, pairs, tmp_path):
    trainer = make_trainer(model, pairs, tmp_path, max_tokens_per_batch=40, **half)
    trainer.train_dataset = with_lengths(pairs)
    batches = list(trainer.get_train_dataloader())
    real = [[token for pair in pairs for token in pair[name]] for name in SIDES.values()]
    for name, tokens in zip(SIDES.values(), real, strict=True):
        rows = [batch[name][0] for batch in batches]
        assert all(len(row) % multiple == 0 for row in rows)
        kept = torch.cat(rows)
        kept = kept[(kept != IGNORED_LABEL) & (kept != model.config.pad_token_id)]
        assert sorted(kept.tolist()) == sorted(tokens)
        assert (sum(map(len, rows)) > len(tokens)) == (multiple > 1)


@pytest.mark.parametrize(
    ("scores", "options", "kept"),
    [
        ([5, 1, 9, 2, 3, 1], {"save_total_limit": 2, "num_best_kept": 2}, [1, 3, 6]),
        ([5, 1, 9, 2, 3, 1], {"save_total_limit": 2, "num_best_kept": 2, "metric_for_best_model": "ter"}, [2, 6]),
        # The last ones are kept beside the best.
        ([9, 1, 2, 3, 4, 5], {"save_total_limit": 3, "num_last_kept": 3, "num_best_kept": 1}, [1, 4, 5, 6]),
    ],
)
def test_the_best_checkpoints_are_kept_however_old(model, pairs, tmp_path, scores, options, kept):
    scores = iter(map(float, scores))
    options |= {"greater_is_better": options.get("metric_for_best_model") != "ter"}
    score = lambda *_: dict.fromkeys(("bleu", "ter"), next(scores))  # noqa: E731
    make_trainer(model, pairs, tmp_path, score=score, **EACH_STEP, **options).train()
    assert [step_of(path) for path in checkpoints_in(tmp_path)] == kept


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
        trainer = make_trainer(model, pairs, tmp_path, **options, remove_unused_columns=False)
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
        (BUDGET | {"train": Dataset.from_dict({"input_ids": [[5]], "labels": [[6]]})}, "columns source_length and"),
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
