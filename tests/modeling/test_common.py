"""Tests that every model of transformers passes: its signatures and its outputs."""

import inspect
from typing import get_args

import pytest
import torch
from tiny_models import CROSSED, DESIGNS, RECURRENT, padding_mask, random_batch, tiny_model
from transformers.utils.generic import TransformersKwargs

from metaphrase.modeling import MetaphraseEncoderModel, MetaphraseForConditionalGeneration, MetaphraseModel

MODEL_CLASSES = [MetaphraseForConditionalGeneration, MetaphraseModel, MetaphraseEncoderModel]
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


def run(model, **inputs):
    with torch.no_grad():
        return model(**inputs)


def batch_for(model, **options):
    """A batch with what the model takes."""
    inputs = random_batch(model.config, **options)
    if isinstance(model, MetaphraseEncoderModel):
        del inputs["decoder_input_ids"]
    return inputs


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_signature(model_class):
    names = list(inspect.signature(model_class.forward).parameters)
    assert model_class.main_input_name == names[1] == "input_ids" and names[2] == "attention_mask"
    assert "inputs_embeds" in names
    if model_class is not MetaphraseEncoderModel:
        assert names[3:7] == ["decoder_input_ids", "decoder_attention_mask", "encoder_outputs", "past_key_values"]
        # transformers reads from it which outputs a model can be asked for.
        assert get_args(inspect.signature(model_class.forward).parameters["kwargs"].annotation) == (TransformersKwargs,)


def shapes(tensors):
    return [tuple(tensor.shape) for tensor in tensors]


@pytest.mark.parametrize("design", CROSSED)
def test_attentions_and_hidden_states(design):
    encoder_layers, decoder_layers = 1, 2
    sizes = {"encoder_layers": encoder_layers, "decoder_layers": decoder_layers}
    sizes |= {"encoder_attention_heads": 2, "num_key_value_heads": 2}
    model = tiny_model(**CROSSED[design], **sizes, attn_implementation="eager")
    inputs = random_batch(model.config)
    inputs["decoder_attention_mask"] = padding_mask([5, 4, 2], 5, "right")
    plain = run(model, **inputs)
    assert plain.decoder_attentions is plain.encoder_attentions is plain.cross_attentions is None
    assert plain.decoder_hidden_states is plain.encoder_hidden_states is None
    outputs = run(model, **inputs, output_attentions=True, output_hidden_states=True)
    torch.testing.assert_close(outputs.logits, plain.logits, rtol=0, atol=0)

    assert shapes(outputs.encoder_attentions) == [(3, 2, 7, 7)] * encoder_layers
    assert shapes(outputs.decoder_attentions) == [(3, 4, 5, 5)] * decoder_layers
    assert shapes(outputs.cross_attentions) == [(3, 4, 5, 7)] * decoder_layers
    for weights in (*outputs.encoder_attentions, *outputs.decoder_attentions, *outputs.cross_attentions):
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    is_padding = inputs["attention_mask"][:, None, None, :] == 0
    for weights in (*outputs.encoder_attentions, *outputs.cross_attentions):
        assert not weights.masked_select(is_padding).any()
        assert (weights.masked_select(~is_padding) > 0).float().mean() > 0.9
    hidden = torch.ones(5, 5).triu(1).bool() | (inputs["decoder_attention_mask"][:, None, None, :] == 0)
    for weights in outputs.decoder_attentions:
        assert not weights.masked_select(hidden).any()

    assert shapes(outputs.encoder_hidden_states) == [(3, 7, 32)] * (encoder_layers + 1)
    assert shapes(outputs.decoder_hidden_states) == [(3, 5, 32)] * (decoder_layers + 1)
    assert torch.equal(outputs.encoder_last_hidden_state, outputs.encoder_hidden_states[-1])
    projected = model.lm_head(outputs.decoder_hidden_states[-1]) * model.config.logits_scale
    torch.testing.assert_close(projected, outputs.logits)


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_flags_of_the_configuration_and_tuples(model_class):
    model = tiny_model(model_class, attn_implementation="eager")
    inputs = batch_for(model)
    outputs = run(model, **inputs, output_attentions=True, output_hidden_states=True)
    as_tuple = run(model, **inputs, output_attentions=True, output_hidden_states=True, return_dict=False)
    model.config.output_attentions = model.config.output_hidden_states = True
    assert list(run(model, **inputs)) == list(outputs)
    refused = run(model, **inputs, output_attentions=False, output_hidden_states=False)
    assert {name for name in outputs if "attentions" in name or "hidden_states" in name}.isdisjoint(refused)
    model.config.return_dict = False
    assert type(run(model, **inputs, return_dict=True)) is type(outputs)
    for other in (as_tuple, run(model, **inputs)):
        assert isinstance(other, tuple) and len(other) == len(outputs)
        assert all(map(torch.equal, other[-1], outputs.to_tuple()[-1])) and torch.equal(other[0], outputs[0])


@pytest.mark.parametrize("design", DESIGNS)
def test_embeddings_equal_ids(design):
    model = tiny_model(**DESIGNS[design])
    inputs = random_batch(model.config, with_labels=True)
    expected = run(model, **inputs)
    ids, table = inputs.pop("input_ids"), model.get_input_embeddings()
    embeddings = table(ids)
    assert torch.equal(embeddings, table.weight[ids] * (32**0.5 if model.config.scale_embedding else 1.0))
    outputs = run(model, inputs_embeds=embeddings, **inputs)
    assert torch.equal(outputs.logits, expected.logits)
    decoder_ids = model.prepare_decoder_input_ids_from_labels(inputs["labels"])
    decoder_embeddings = model.get_decoder().embed_tokens(decoder_ids)
    outputs = run(model, inputs_embeds=embeddings, decoder_inputs_embeds=decoder_embeddings, **inputs)
    assert torch.equal(outputs.logits, expected.logits) and torch.equal(outputs.loss, expected.loss)


@pytest.mark.parametrize("design", CROSSED | RECURRENT)
@pytest.mark.parametrize("padding", ["left", "right"])
def test_batched_equals_alone(design, padding):
    model = tiny_model(**(CROSSED | RECURRENT)[design] | {"encoder_layers": 1, "decoder_layers": 2})
    inputs = random_batch(model.config, padding=padding)
    # Padding has random ids. No token may see them.
    inputs["input_ids"] = random_batch(model.config, padding=None)["input_ids"]
    decoder_mask = padding_mask([5, 3, 2], 5, padding)
    targets = inputs["decoder_input_ids"]
    outputs = run(model, **inputs, decoder_attention_mask=decoder_mask)
    for row in range(3):
        is_source, is_target = inputs["attention_mask"][row].bool(), decoder_mask[row].bool()
        source, target = inputs["input_ids"][row, is_source], targets[row, is_target]
        alone = run(model, input_ids=source[None], decoder_input_ids=target[None])
        torch.testing.assert_close(outputs.logits[row, is_target], alone.logits[0], **CLOSE)
        encoded = outputs.encoder_last_hidden_state[row, is_source]
        torch.testing.assert_close(encoded, alone.encoder_last_hidden_state[0], **CLOSE)
    # Without an order of the source, wrong positions would change nothing.
    inputs["input_ids"] = inputs["input_ids"].roll(2, -1)
    turned = run(model, **inputs, decoder_attention_mask=decoder_mask)
    assert ((turned.logits - outputs.logits)[0].abs().max() > 0.1) == (not design.startswith("none"))


@pytest.mark.parametrize("design", DESIGNS)
def test_masks_ready_for_the_kernel(design):
    """Two-dimensional masks and those that a caller has already brought to four dimensions are the same."""
    model = tiny_model(**DESIGNS[design])
    inputs = random_batch(model.config)
    mask = inputs["attention_mask"]
    decoder_mask = padding_mask([5, 4, 2], 5, "right")
    expected = run(model, **inputs, decoder_attention_mask=decoder_mask).logits
    square = mask[:, None, None, :].bool().expand(-1, 1, 7, -1)
    encoder_output = run(model.get_encoder(), input_ids=inputs["input_ids"], attention_mask=square)
    causal = torch.ones(5, 5).tril().bool() & decoder_mask[:, None, None, :].bool()
    for encoder_outputs in (encoder_output, encoder_output.to_tuple(), tuple(encoder_output.last_hidden_state[None])):
        target = {"decoder_input_ids": inputs["decoder_input_ids"], "decoder_attention_mask": causal}
        outputs = run(model, encoder_outputs=encoder_outputs, attention_mask=mask, **target)
        # Padding stands elsewhere, since a mask for the kernel does not say where it is.
        is_token = decoder_mask.bool()
        torch.testing.assert_close(outputs.logits[is_token], expected[is_token], **CLOSE)


@pytest.mark.parametrize("design", DESIGNS)
def test_logits_to_keep(design):
    model = tiny_model(**DESIGNS[design])
    inputs = random_batch(model.config)
    logits = run(model, **inputs).logits
    hidden_states = run(model.model, **inputs).last_hidden_state
    assert (model.lm_head.bias is not None) == model.config.logits_bias
    if model.config.head_transform:
        head = model.head_transform
        hidden_states = head.norm(torch.nn.functional.silu(head.dense(hidden_states)))
    config, expected = model.config, model.lm_head(hidden_states * model.config.logits_scale)
    if config.final_logit_softcapping is not None:
        expected = config.final_logit_softcapping * torch.tanh(expected / config.final_logit_softcapping)
    torch.testing.assert_close(expected, logits)
    torch.testing.assert_close(run(model, **inputs, logits_to_keep=2).logits, logits[:, -2:])
    chosen = torch.tensor([0, 3])
    torch.testing.assert_close(run(model, **inputs, logits_to_keep=chosen).logits, logits[:, chosen])
