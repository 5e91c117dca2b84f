"""Training comes to the same weights however it is arranged: accumulated, packed, checkpointed, compiled."""

import pytest
import torch
from small_runs import QUIET
from small_trainers import model_of_two_passes, small_pairs, tiny_bart, with_lengths
from tiny_models import tiny_model
from tokenizers import Tokenizer, models
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerFast, Seq2SeqTrainingArguments

from metaphrase.data.collators import PackedCollator, PairCollator
from metaphrase.techniques.partial_training import add_lora
from metaphrase.training.trainer import MetaphraseTrainer

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
COLLATORS = {"padded": PairCollator(0), "packed": PackedCollator()}

OWN = ("max_tokens_per_batch", "r_drop_alpha")


def train(folder, collator=COLLATORS["padded"], fields=None, model=None, pairs=None, **options):
    model = model or tiny_model(vocab_size=60, **{"initializer_range": 0.2, **(fields or {})})
    settings = {"optim": "sgd", "learning_rate": 0.2, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    settings |= {"num_train_epochs": 1, "logging_steps": 1, "save_strategy": "no"}
    own = {name: options.pop(name) for name in OWN if name in options} | {"data_collator": collator}
    arguments = Seq2SeqTrainingArguments(output_dir=str(folder), **QUIET | settings | options)
    dataset = with_lengths(small_pairs(24) if pairs is None else pairs)
    trainer = MetaphraseTrainer(model=model, args=arguments, train_dataset=dataset, **own)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}, losses


def assert_same(actual, expected, **tolerance):
    for name, weight in expected[0].items():
        torch.testing.assert_close(actual[0][name], weight, msg=lambda text, name=name: f"{name}: {text}", **tolerance)
    assert actual[1] == pytest.approx(expected[1], rel=1e-4)


def adapted_model():
    torch.manual_seed(0)
    return add_lora(tiny_model(vocab_size=60, initializer_range=0.2))


KINDS = {
    "padded": {},
    "packed": {"collator": COLLATORS["packed"]},
    "another family": {"model": tiny_bart},
    "adapters": {"model": adapted_model},
    "R-Drop": {"model": lambda: model_of_two_passes(vocab_size=60), "r_drop_alpha": 3.0},
}
# Losses of logits, and the collator and the removal of columns of transformers.
CAPPED = {"model": lambda: model_of_two_passes(vocab_size=60, final_logit_softcapping=30.0), "r_drop_alpha": 3.0}
TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), pad_token="<pad>")
OTHERS = {"collator": DataCollatorForSeq2Seq(TOKENIZER), "remove_unused_columns": True}
WEIGHTED = KINDS | {"capped": CAPPED, "packed and capped": KINDS["packed"] | CAPPED, "of transformers": OTHERS}


def with_weights(pairs):
    return [{**pair, "weight": float(number % 3)} for number, pair in enumerate(pairs)]


@pytest.mark.parametrize("kind", sorted(WEIGHTED.keys() - {"adapters"}))
def test_weights_of_two_and_zero_repeat_and_remove_a_pair(kind, tmp_path):
    """The steps have other divisors, for which the learning rate makes up."""
    options, pairs = {"label_smoothing_factor": 0.1, **WEIGHTED[kind]}, small_pairs(24)
    make_model = options.pop("model", lambda: None)
    weighted = with_weights(pairs)
    pairs = [pair for number, pair in enumerate(pairs) for _ in range(number % 3)]
    ratio = sum(len(pair["labels"]) for pair in pairs) / sum(len(pair["labels"]) for pair in weighted)
    repeated = options | {"learning_rate": 0.2 * ratio, "per_device_train_batch_size": 24, "pairs": pairs}
    expected, losses = train(tmp_path / "repeated", model=make_model(), **repeated)
    options |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 12, "pairs": weighted}
    actual = train(tmp_path / "weighted", model=make_model(), **options)
    assert_same(actual, (expected, [loss * ratio for loss in losses]), **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_eight_accumulated_batches_of_one_are_one_batch_of_eight(kind, tmp_path):
    options = {"label_smoothing_factor": 0.1, **KINDS[kind]}
    if kind == "adapters":
        pytest.importorskip("peft")
    make_model = options.pop("model", lambda: None)
    expected = train(tmp_path / "8", model=make_model(), per_device_train_batch_size=8, **options)
    options |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
    assert_same(train(tmp_path / "1", model=make_model(), **options), expected, **CLOSE)


def test_accumulated_token_budgets_are_one_batch_of_all_pairs(tmp_path):
    expected = train(tmp_path / "one", max_tokens_per_batch=10_000)
    actual = train(tmp_path / "many", max_tokens_per_batch=64, gradient_accumulation_steps=50)
    assert len(expected[1]) == len(actual[1]) == 1
    assert_same(actual, expected, **CLOSE)


def test_packed_training_is_padded_training(tmp_path):
    options = {"per_device_train_batch_size": 8, "label_smoothing_factor": 0.1}
    options["fields"] = {"position_embedding_type": "relative"}
    expected = train(tmp_path / "padded", COLLATORS["padded"], **options)
    assert_same(train(tmp_path / "packed", COLLATORS["packed"], **options), expected, **CLOSE)


def test_a_collator_that_shifts_the_labels_itself_changes_nothing(tmp_path):
    options = {"per_device_train_batch_size": 8, "label_smoothing_factor": 0.1, "remove_unused_columns": True}
    without = train(tmp_path / "without", DataCollatorForSeq2Seq(TOKENIZER), **options)
    shifting = DataCollatorForSeq2Seq(TOKENIZER, model=tiny_model(vocab_size=60))
    assert_same(train(tmp_path / "with", shifting, **options), without, rtol=0, atol=0)
    expected = train(tmp_path / "ours", per_device_train_batch_size=8, label_smoothing_factor=0.1)
    assert_same(without, expected, **CLOSE)


@pytest.mark.parametrize("kind", COLLATORS)
def test_gradient_checkpointing_changes_nothing_with_dropout_either(kind, tmp_path):
    options = {"collator": COLLATORS[kind], "per_device_train_batch_size": 8}
    options["fields"] = {"dropout": 0.2, "attention_dropout": 0.1, "activation_dropout": 0.1}
    expected = train(tmp_path / "off", **options)
    actual = train(tmp_path / "on", gradient_checkpointing=True, **options)
    assert_same(actual, expected, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "backend"), [("padded", "eager"), ("padded", "inductor"), ("packed", "inductor")])
def test_compiling_changes_nothing(kind, backend, tmp_path):
    options = {"collator": COLLATORS[kind], "per_device_train_batch_size": 12}
    options |= {"label_smoothing_factor": 0.1, "max_steps": 2, "pairs": with_weights(small_pairs(24))}
    expected = train(tmp_path / "off", **options)
    torch._dynamo.reset()
    actual = train(tmp_path / "on", torch_compile=True, torch_compile_backend=backend, **options)
    torch._dynamo.reset()
    assert_same(actual, expected, **CLOSE)


@pytest.mark.parametrize("kind", COLLATORS)
def test_bfloat16_is_close_to_float32(kind, tmp_path):
    options = {"collator": COLLATORS[kind], "per_device_train_batch_size": 8, "label_smoothing_factor": 0.1}
    start = tiny_model(vocab_size=60, initializer_range=0.2).state_dict()
    expected, expected_losses = train(tmp_path / "float32", **options)
    actual, losses = train(tmp_path / "bfloat16", bf16=True, **options)
    assert losses == pytest.approx(expected_losses, rel=5e-3)
    assert losses != expected_losses
    ends = (actual, expected)
    moved, moved_expected = (torch.cat([(end[name] - start[name]).flatten() for name in end]) for end in ends)
    assert torch.cosine_similarity(moved, moved_expected, dim=0) > 0.998
    assert moved.norm().item() == pytest.approx(moved_expected.norm().item(), rel=0.02)
