import math

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from small_trainers import loss_for_each_token, make_trainer, tiny_bart, with_lengths
from torch.utils.data import DataLoader
from transformers import Seq2SeqTrainingArguments

from metaphrase.data.collators import PairCollator
from metaphrase.modeling import IGNORED_LABEL


def test_evaluation_loss_is_per_token_and_not_smoothed(model, pairs, tmp_path):
    metrics = make_trainer(model, pairs, tmp_path, label_smoothing_factor=0.3).evaluate()
    expected = loss_for_each_token(model, pairs)
    assert metrics["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics["eval_perplexity"] == pytest.approx(math.exp(expected), rel=1e-4)


def evaluated_by(trainer, processes, loader_of, monkeypatch):
    """The sum of the losses and the number of tokens that several processes come to, one after the other in this one."""
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
@pytest.mark.parametrize(
    ("family", "processes", "count"),
    [("ours", 2, 12), ("other", 2, 12), ("ours", 3, 2)],
)
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
    """Whether it is decoded as well or not: without `compute_metrics`, the loss alone is asked for, and no logits."""
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
