"""Tests of the models that classify: batches, saving, training by transformers' own Trainer, and code that travels."""

import pytest
import torch
import transformers
from tiny_models import DESIGNS, random_batch, tiny_model

from metaphrase import modeling

CLASSES = {
    modeling.MetaphraseForSequenceClassification: transformers.AutoModelForSequenceClassification,
    modeling.MetaphraseForTokenClassification: transformers.AutoModelForTokenClassification,
    modeling.MetaphraseForQuestionAnswering: transformers.AutoModelForQuestionAnswering,
}
CLOSE = {"atol": 1e-4, "rtol": 1e-4}
EVERY_HEAD = pytest.mark.parametrize("model_class", CLASSES)


def run(model, **inputs):
    with torch.no_grad():
        return model(**inputs)


def batch_for(model, **options):
    """Texts of several lengths that end with an end of sequence."""
    inputs = random_batch(model.config, **options)
    ids, mask = inputs["input_ids"].clamp(min=6), inputs["attention_mask"]
    for row, length in enumerate(mask.sum(dim=1).tolist()):
        ids[row, length - 1], ids[row, length:] = model.config.eos_token_id, model.config.pad_token_id
    return {"input_ids": ids, "attention_mask": mask}


def labels_for(model, inputs):
    rows = len(inputs["input_ids"])
    if isinstance(model, modeling.MetaphraseForQuestionAnswering):
        return {"start_positions": torch.ones(rows).long(), "end_positions": torch.full((rows,), 2)}
    is_token = isinstance(model, modeling.MetaphraseForTokenClassification)
    return {"labels": inputs["input_ids"] % 3 if is_token else torch.arange(rows) % 3}


def logits_of(outputs):
    return outputs.logits if "logits" in outputs else torch.stack([outputs.start_logits, outputs.end_logits], dim=-1)


@EVERY_HEAD
@pytest.mark.parametrize("design", DESIGNS)
def test_batched_equals_alone(model_class, design):
    # The decoder reads the vocabulary of the sources.
    fields = {name: value for name, value in DESIGNS[design].items() if name != "decoder_vocab_size"}
    model = tiny_model(model_class, **fields, num_labels=3)
    inputs = batch_for(model)
    outputs = logits_of(run(model, **inputs))
    for row, length in enumerate(inputs["attention_mask"].sum(dim=1).tolist()):
        alone = logits_of(run(model, input_ids=inputs["input_ids"][row : row + 1, :length]))
        expected = alone[0] if alone.ndim == 3 else alone
        given = outputs[row, :length] if alone.ndim == 3 else outputs[row : row + 1]
        torch.testing.assert_close(given, expected, **CLOSE)


@EVERY_HEAD
def test_flags_and_tuples(model_class):
    model = tiny_model(model_class, num_labels=3, attn_implementation="eager")
    inputs = batch_for(model)
    inputs |= labels_for(model, inputs)
    outputs = run(model, **inputs, output_attentions=True, output_hidden_states=True)
    assert outputs.loss.ndim == 0 and any("attentions" in name for name in outputs)
    as_tuple = run(model, **inputs, output_attentions=True, output_hidden_states=True, return_dict=False)
    assert len(as_tuple) == len(outputs) and torch.equal(as_tuple[1], outputs.to_tuple()[1])


@EVERY_HEAD
def test_saved_models_load_alone_and_by_the_code_that_travels(model_class, tmp_path):
    model = tiny_model(model_class, num_labels=3, **DESIGNS["relative_per_layer"])
    model.save_pretrained(tmp_path)
    loaded = CLASSES[model_class].from_pretrained(tmp_path)
    assert type(loaded) is model_class and loaded.config.num_labels == 3
    inputs = batch_for(model)
    assert torch.equal(logits_of(run(loaded.eval(), **inputs)), logits_of(run(model, **inputs)))


@EVERY_HEAD
def test_a_head_begins_with_a_trained_body_and_learns_by_the_stock_trainer(model_class, tmp_path):
    base = tiny_model(modeling.MetaphraseForConditionalGeneration)
    base.save_pretrained(tmp_path / "base")
    model = CLASSES[model_class].from_pretrained(tmp_path / "base", num_labels=3)
    assert torch.equal(
        model.get_encoder().layers[0].mlp.up_proj.weight, base.model.encoder.layers[0].mlp.up_proj.weight
    )
    inputs = batch_for(model)
    inputs |= labels_for(model, inputs)
    rows = [{name: values[row] for name, values in inputs.items()} for row in range(len(inputs["input_ids"]))]
    fields = {"per_device_train_batch_size": 3, "max_steps": 30, "learning_rate": 1e-2, "report_to": "none"}
    arguments = transformers.TrainingArguments(tmp_path, **fields, use_cpu=True, disable_tqdm=True, save_strategy="no")
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    before = run(model.eval(), **inputs).loss
    trainer.train()
    assert run(model.eval(), **inputs).loss < 0.5 * before


def test_one_label_is_a_number():
    model = tiny_model(modeling.MetaphraseForSequenceClassification, num_labels=1)
    inputs = batch_for(model)
    wanted = torch.tensor([0.5, 1.5, 2.5])
    outputs = run(model, **inputs, labels=wanted)
    torch.testing.assert_close(outputs.loss, (outputs.logits[:, 0] - wanted).square().mean())


def test_the_class_of_a_text_needs_its_ids_and_a_decoder_of_its_vocabulary():
    model = tiny_model(modeling.MetaphraseForSequenceClassification)
    with pytest.raises(ValueError, match="`input_ids` must be given"):
        model(inputs_embeds=torch.zeros(1, 2, model.config.hidden_size))
    with pytest.raises(ValueError, match=r"`decoder_vocab_size` must equal `vocab_size`, 37, .* got 31"):
        tiny_model(modeling.MetaphraseForSequenceClassification, **DESIGNS["rotary"])
