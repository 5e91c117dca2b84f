import math

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from datasets import Dataset
from other_families import other_model
from small_trainers import SIDES, loss_for_each_token, make_trainer, tiny_bart, with_lengths
from tiny_generator import SOURCES, TARGETS, tiny_pair
from tiny_models import tiny_model
from torch.utils.data import DataLoader
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainingArguments

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


def test_pairs_of_a_budget_are_counted_as_trained_on(model, pairs, tmp_path):
    trainer = make_trainer(model, pairs, tmp_path, max_tokens_per_batch=40, max_steps=5)
    trainer.train_dataset = with_lengths(pairs)
    metrics = trainer.train().metrics
    samples = metrics["train_samples_per_second"] * metrics["train_runtime"]
    assert samples == pytest.approx(metrics["epoch"] * len(pairs), rel=0.02)


@pytest.mark.parametrize("make_model", [lambda: tiny_model(vocab_size=60), tiny_bart])
def test_training_loss_is_smoothed_and_that_of_an_evaluation_is_not(make_model, pairs, tmp_path):
    model = make_model()
    weighted = [{**pair, "weight": 3.0} for pair in pairs]
    trainer = make_trainer(model, weighted, tmp_path, label_smoothing_factor=0.3)
    batch = PairCollator(0)(pairs[:4])
    loss = trainer.compute_loss(model.train(), dict(batch), num_items_in_batch=torch.tensor(50))
    logits = model(**batch).logits
    assert torch.allclose(loss, sequence_loss(logits, batch["labels"], 50, label_smoothing=0.3))
    metrics, expected = trainer.evaluate(), loss_for_each_token(model, pairs)
    assert metrics["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics["eval_perplexity"] == pytest.approx(math.exp(expected), rel=1e-4)


def test_a_family_that_does_not_shift_labels_learns_them(tmp_path):
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
    for name in SIDES.values():
        rows = [batch[name][0] for batch in batches]
        assert all(len(row) % multiple == 0 for row in rows)
        kept = [token for token in torch.cat(rows).tolist() if token not in (IGNORED_LABEL, model.config.pad_token_id)]
        assert sorted(kept) == sorted(token for pair in pairs for token in pair[name])


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
    rows = []
    for pair in pairs:
        source, target = (width - len(pair[name]) for name in ("input_ids", "labels"))
        mask = [1] * (width - source) + [0] * source
        row = {"input_ids": pair["input_ids"] + [0] * source, "attention_mask": mask, "source_length": width}
        rows.append(row | {"labels": pair["labels"] + [IGNORED_LABEL] * target, "target_length": width})
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
        trainer.eval_dataset, model = data, trainer.model
        metrics = trainer.evaluate()
        batches = [collator(0)(list(data)) for collator in (PackedCollator, PairCollator)]
        with torch.no_grad():
            losses = [trainer.compute_loss(model.train(), dict(batch)).item() for batch in batches]
        found.append([metrics["eval_loss"], metrics["eval_length"], *losses])
    assert found[1] == pytest.approx(found[0], rel=1e-5) and seen[0] == seen[1]


BUDGET = {"max_tokens_per_batch": 60}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (BUDGET | {"neftune_noise_alpha": 5.0}, "`neftune_noise_alpha` must be left out with `max_tokens_per_batch`"),
        (BUDGET | {"train_sampling_strategy": "sequential"}, "`train_sampling_strategy` must be left out"),
        ({"compute_loss_func": max}, "`compute_loss_func` must be left out"),
        ({"push_to_hub": True}, "`push_to_hub` must be left out"),
    ],
)
def test_what_would_be_ignored_is_refused(options, message, model, pairs, tmp_path):
    with pytest.raises(ValueError, match=message):
        trainer = make_trainer(model, pairs, tmp_path, max_steps=1, **options)
        trainer.train_dataset = with_lengths(pairs)
        trainer.train()


def test_a_collator_that_does_more_than_pad_is_called(model, pairs, tmp_path):
    trainer = make_trainer(model, pairs, tmp_path, **BUDGET)
    trainer.train_dataset = with_lengths(pairs)
    assert "source_lengths" in next(iter(trainer.get_train_dataloader()))
    trainer.data_collator = type("Noisy", (PairCollator,), {"__call__": lambda self, pairs: {"number": len(pairs)}})(0)
    assert sum(batch["number"] for batch in trainer.get_train_dataloader()) == len(pairs)


def evaluated_by(trainer, processes, loader_of, monkeypatch):
    total = torch.zeros(2, dtype=torch.float64)
    for rank in range(processes):
        monkeypatch.setattr(Seq2SeqTrainingArguments, "process_index", rank)
        monkeypatch.setattr(Seq2SeqTrainingArguments, "world_size", processes)
        trainer.evaluation_loop(loader_of(rank), "Evaluation", prediction_loss_only=True)
        total += trainer.evaluation_loss
    return total


def assert_same_sums(sums, expected):
    """Sums in float64 of losses in float32, whose last digit depends on the processor."""
    torch.testing.assert_close(sums, expected, rtol=1e-6, atol=0)


# With batches of 5, the last batch lacks rows, or there are fewer pairs than processes.
@pytest.mark.parametrize(("family", "processes", "count"), [("ours", 2, 12), ("other", 2, 12), ("ours", 3, 2)])
def test_several_processes_count_each_pair_once(family, processes, count, model, pairs, tmp_path, monkeypatch):
    trainer = make_trainer(model if family == "ours" else tiny_bart(), pairs[:count], tmp_path)
    trainer.evaluate()
    expected, loader = trainer.evaluation_loss.clone(), DataLoader(pairs[:count], 5, collate_fn=PairCollator(0))
    assert expected[1] == sum(len(pair["labels"]) for pair in pairs[:count])
    shares = [prepare_data_loader(loader, num_processes=processes, process_index=rank) for rank in range(processes)]
    assert len({len(share) for share in shares}) == 1
    assert_same_sums(evaluated_by(trainer, processes, shares.__getitem__, monkeypatch), expected)


# In the second case, one process has a batch less, and repeats a pair.
@pytest.mark.parametrize(("count", "budget"), [(12, 40), (11, 16)])
def test_several_processes_count_each_pair_of_a_budget_once(count, budget, model, pairs, tmp_path, monkeypatch):
    dataset = with_lengths(pairs[:count])
    trainer = make_trainer(model, pairs[:count], tmp_path, max_tokens_per_batch=budget, prediction_loss_only=True)
    trainer.evaluate()
    expected = trainer.evaluation_loss.clone()
    total = evaluated_by(trainer, 2, lambda rank: trainer.get_eval_dataloader(dataset), monkeypatch)
    assert_same_sums(total, expected)


def test_the_rest_of_what_is_evaluated_is_not_dropped(model, pairs, tmp_path):
    whole, dropping = (make_trainer(model, pairs, tmp_path, dataloader_drop_last=drops) for drops in (False, True))
    assert dropping.evaluate()["eval_loss"] == whole.evaluate()["eval_loss"]
    assert dropping.args.dataloader_drop_last
    trained = make_trainer(model, pairs, tmp_path, per_device_train_batch_size=5, dataloader_drop_last=True)
    assert len(trained.get_train_dataloader()) == 2


@pytest.mark.parametrize("decodes", [True, False])
def test_a_budget_bounds_what_is_evaluated_too(decodes, model, pairs, tmp_path):
    trainer = make_trainer(model, pairs, tmp_path, max_tokens_per_batch=40, predict_with_generate=decodes)
    trainer.eval_dataset = with_lengths(pairs)
    costs = [batch["input_ids"].numel() + batch["labels"].numel() for batch in trainer.get_eval_dataloader()]
    assert max(costs) <= 40
    made = []
    handle = model.register_forward_hook(lambda module, arguments, output: made.append(output.logits))
    loss = trainer.evaluate()["eval_loss"]
    handle.remove()
    assert made and all(logits is None for logits in made)
    assert loss == pytest.approx(make_trainer(model, pairs, tmp_path).evaluate()["eval_loss"], rel=1e-5)
    trainer.args.predict_with_generate = False
    logits = trainer.predict(pairs).predictions[0]
    assert len(logits) == len(pairs) and logits.shape[-1] == model.config.vocab_size


def test_chosen_rows_or_all_of_another_data_set_are_decoded_and_scored_in_order(model, pairs, tmp_path):
    seen, options = [], {"max_new_tokens": 6, "num_beams": 2}

    def score(decoded, labels):
        seen.append((decoded, labels))
        return {"bleu": 12.5}

    trainer = make_trainer(model, pairs, tmp_path, score=score, generation_options=options, decoded_rows=[1, 5, 7])
    assert trainer.evaluate()["eval_bleu"] == 12.5
    output = trainer.predict(pairs[:4])
    for (decoded, labels), rows in zip(seen, ([pairs[row] for row in (1, 5, 7)], pairs[:4]), strict=True):
        assert labels == [pair["labels"] for pair in rows]
        for pair, ids in zip(rows, decoded, strict=True):
            alone = model.generate(torch.tensor([pair["input_ids"]]), **options)[0, 1:].tolist()
            assert ids == alone[: alone.index(2) + 1 if 2 in alone else len(alone)]
    for array, expected in zip((output.predictions, output.label_ids), seen[1], strict=True):
        assert array.shape == (4, max(map(len, expected)))
        assert [row[row != IGNORED_LABEL].tolist() for row in array] == expected
    trainer.args.prediction_loss_only = True
    assert trainer.predict(pairs).predictions is None and "eval_loss" in trainer.evaluate() and len(seen) == 2


def test_evaluation_decodes_as_it_is_asked_to(model, pairs, tmp_path):
    lengths = {"score": lambda texts, labels: {"longest": max(map(len, texts))}, "generation_max_length": 9}
    model.generation_config.eos_token_id = None
    trainer = make_trainer(model, pairs, tmp_path, **lengths)
    # The start token is not among what is scored.
    assert trainer.evaluate()["eval_longest"] == 8
    assert trainer.evaluate(max_length=5)["eval_longest"] == 4
    assert trainer.predict(trainer.eval_dataset, max_length=4).metrics["test_longest"] == 3
    trainer.generation_options = {"max_new_tokens": 7}
    assert trainer.evaluate()["eval_longest"] == 7
    assert trainer.evaluate(max_length=5)["eval_longest"] == 4
