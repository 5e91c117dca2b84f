import numpy as np
import pytest
import torch
from small_trainers import pairs_of_eight_lengths
from tiny_models import tiny_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerFast, Seq2SeqTrainer, Seq2SeqTrainingArguments


@pytest.fixture
def tokenizer():
    tokens = ["<pad>", "<s>", "</s>"] + [str(number) for number in range(34)]
    backend = Tokenizer(WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<pad>"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokens = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="right", **tokens)


def make_trainer(model, tokenizer, folder, collator_model=None, **arguments):
    defaults = {"output_dir": str(folder), "use_cpu": True, "report_to": [], "save_strategy": "no", "seed": 0}
    defaults |= {"disable_tqdm": True, "lr_scheduler_type": "constant", "logging_steps": 1}
    parts = dict.fromkeys(("train_dataset", "eval_dataset"), pairs_of_eight_lengths()) | {"processing_class": tokenizer}
    parts |= {"data_collator": DataCollatorForSeq2Seq(tokenizer, model=collator_model)}
    return Seq2SeqTrainer(model=model, args=Seq2SeqTrainingArguments(**(defaults | arguments)), **parts)


def test_one_step_of_eight_batches_equals_one_step_of_one(tokenizer, tmp_path):
    steps, options = {}, {"max_steps": 1, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0}
    for accumulated in (1, 8):
        model = tiny_model(initializer_range=0.2)
        options |= {"per_device_train_batch_size": 8 // accumulated, "gradient_accumulation_steps": accumulated}
        trainer = make_trainer(model, tokenizer, tmp_path, model, label_smoothing_factor=0.1, **options)
        loss = trainer.train().training_loss
        steps[accumulated] = (loss, {name: value.detach().clone() for name, value in model.named_parameters()})
    assert steps[8][0] == pytest.approx(steps[1][0], abs=1e-5)
    torch.testing.assert_close(steps[8][1], steps[1][1], atol=1e-6, rtol=1e-5)
    start = dict(tiny_model(initializer_range=0.2).named_parameters())
    moved = max((steps[1][1][name] - start[name]).abs().max().item() for name in start)
    assert moved > 1e-2


def test_fine_tuning_lowers_the_loss_and_evaluation_generates(tokenizer, tmp_path):
    model = tiny_model(initializer_range=None)

    def compute_metrics(prediction):
        labels = np.where(prediction.label_ids == -100, tokenizer.pad_token_id, prediction.label_ids)
        predictions = np.where(prediction.predictions == -100, tokenizer.pad_token_id, prediction.predictions)
        texts = [tokenizer.batch_decode(ids, skip_special_tokens=True) for ids in (predictions, labels)]
        assert len(texts[1]) == 8
        return {"exact": float(np.mean([ours == theirs for ours, theirs in zip(*texts, strict=True)]))}

    options = {"max_steps": 60, "per_device_train_batch_size": 8, "per_device_eval_batch_size": 3, "logging_steps": 5}
    options |= {"learning_rate": 1e-2, "predict_with_generate": True, "generation_max_length": 12}
    trainer = make_trainer(model, tokenizer, tmp_path, model, **options)
    trainer.compute_metrics = compute_metrics
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert before["eval_exact"] == 0
    assert after["eval_loss"] < 0.1 * before["eval_loss"]
    assert after["eval_exact"] > 0.5
