"""Tests of `metaphrase.modeling.modeling_metaphrase`: padding, large activations, the head, and what is computed how often."""

import itertools

import pytest
import torch
from tiny_models import DESIGNS, NORM_POSITIONS, POSITIONS, random_batch, tiny_model
from torch import nn
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.modeling_outputs import BaseModelOutput

from metaphrase.modeling import (
    MetaphraseEncoderModel,
    MetaphraseForConditionalGeneration,
    MetaphraseModel,
    sequence_loss,
)

EVERY_DESIGN = pytest.mark.parametrize("design", list(DESIGNS))
EVERY_POSITION = pytest.mark.parametrize("kind", list(POSITIONS))
BOTH_KERNELS = pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}


def pad(tensor, count, side, value):
    """Widens `(batch, length)` by columns of one value, or of random ids where none is given."""
    shape = (tensor.shape[0], count)
    columns = torch.randint(3, 20, shape) if value is None else torch.full(shape, value)
    return torch.cat((tensor, columns) if side == "right" else (columns, tensor), dim=1)


# --- padding -------------------------------------------------------------------------------------------------------


@torch.no_grad()
@EVERY_DESIGN
@BOTH_KERNELS
def test_padding_of_the_source_changes_no_logit(design, attn_implementation):
    # In float64, but for the positions: rounding of float32 adds up to a tolerance of 1e-4 on some processors.
    model = tiny_model(attn_implementation=attn_implementation, **DESIGNS[design]).double()
    inputs = random_batch(model.config, padding=None)
    expected = model(**inputs).logits
    assert expected.std() > 0.1
    for count, side in itertools.product((0, 1, 17), ("left", "right")):
        # The padding has ids of its own, of which nothing may be seen.
        padded = inputs | {
            "input_ids": pad(inputs["input_ids"], count, side, None),
            "attention_mask": pad(inputs["attention_mask"], count, side, 0),
        }
        torch.testing.assert_close(model(**padded).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@EVERY_DESIGN
@BOTH_KERNELS
def test_a_row_of_padding_alone_stays_finite_and_leaves_the_others_alone(dtype, design, attn_implementation):
    model = tiny_model(attn_implementation=attn_implementation, **DESIGNS[design]).to(dtype)
    inputs = random_batch(model.config, with_labels=True)
    inputs["attention_mask"][1] = 0
    outputs = model(**inputs)
    assert outputs.logits.isfinite().all()
    assert outputs.encoder_last_hidden_state.isfinite().all()
    outputs.loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)
    if dtype == torch.float32:
        rest = {name: value[[0, 2]] for name, value in inputs.items()}
        torch.testing.assert_close(outputs.logits[[0, 2]], model(**rest).logits, **TOLERANCE)


@torch.no_grad()
@EVERY_DESIGN
@BOTH_KERNELS
def test_padding_of_the_target_changes_no_logit(design, attn_implementation):
    model = tiny_model(attn_implementation=attn_implementation, **DESIGNS[design])
    inputs = random_batch(model.config)
    expected = model(**inputs).logits
    mask = torch.ones_like(inputs["decoder_input_ids"])
    for count in (1, 17):
        right = inputs | {"decoder_input_ids": pad(inputs["decoder_input_ids"], count, "right", None)}
        # No token sees what comes after it: on this side the mask makes no difference.
        torch.testing.assert_close(model(**right).logits[:, :5], expected, **TOLERANCE)
        right["decoder_attention_mask"] = pad(mask, count, "right", 0)
        torch.testing.assert_close(model(**right).logits[:, :5], expected, **TOLERANCE)
        left = inputs | {
            "decoder_input_ids": pad(inputs["decoder_input_ids"], count, "left", None),
            "decoder_attention_mask": pad(mask, count, "left", 0),
        }
        torch.testing.assert_close(model(**left).logits[:, -5:], expected, **TOLERANCE)


# --- positions -----------------------------------------------------------------------------------------------------


@torch.no_grad()
@EVERY_POSITION
@BOTH_KERNELS
def test_cross_attention_knows_no_positions(kind, attn_implementation):
    """A source whose tokens are shuffled together with their positions is the same source."""
    model = tiny_model(attn_implementation=attn_implementation, **POSITIONS[kind])
    inputs = random_batch(model.config)
    positions = torch.arange(7).expand(3, 7)
    order = torch.tensor([4, 0, 6, 2, 1, 5, 3])
    expected = model(**inputs, position_ids=positions).logits
    shuffled = inputs | {name: inputs[name][:, order] for name in ("input_ids", "attention_mask")}
    torch.testing.assert_close(model(**shuffled, position_ids=positions[:, order]).logits, expected, **TOLERANCE)
    if kind != "none":
        assert not torch.allclose(model(**shuffled, position_ids=positions).logits, expected, atol=1e-2)


@torch.no_grad()
@EVERY_POSITION
def test_given_positions_that_count_up_are_the_default(kind):
    model = tiny_model(**POSITIONS[kind])
    inputs = random_batch(model.config, padding=None)
    explicit = {"position_ids": torch.arange(7)[None], "decoder_position_ids": torch.arange(5)[None]}
    torch.testing.assert_close(model(**inputs, **explicit).logits, model(**inputs).logits)


@torch.no_grad()
@EVERY_POSITION
def test_given_target_positions_do_not_depend_on_the_cache(kind):
    model = tiny_model(**POSITIONS[kind])
    inputs = random_batch(model.config)
    positions = torch.tensor([[0, 2, 5, 7, 11]]).expand(3, 5)
    logits = [
        model(**inputs, decoder_position_ids=positions, use_cache=use_cache).logits for use_cache in (False, True)
    ]
    torch.testing.assert_close(*logits, **TOLERANCE)
    if kind != "none":
        assert not torch.allclose(logits[0], model(**inputs).logits, atol=1e-2)


# --- float16 -------------------------------------------------------------------------------------------------------


@EVERY_POSITION
@BOTH_KERNELS
@pytest.mark.parametrize(("norm_position", "gated_mlp"), [("pre", True), ("post", False)])
@pytest.mark.parametrize("initializer_range", [4.0, 40.0])
def test_large_activations_stay_finite_in_float16(
    kind, attn_implementation, norm_position, gated_mlp, initializer_range
):
    model = tiny_model(
        attn_implementation=attn_implementation,
        norm_position=norm_position,
        gated_mlp=gated_mlp,
        initializer_range=initializer_range,
        **POSITIONS[kind],
    ).half()
    inputs = random_batch(model.config, with_labels=True)
    outputs = model(**inputs)
    assert outputs.logits.isfinite().all()
    assert outputs.encoder_last_hidden_state.isfinite().all()
    assert outputs.loss.isfinite()
    if initializer_range == 4.0:
        # Beyond it a gradient overflows by itself, which loss scaling is for.
        outputs.loss.backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@torch.no_grad()
@EVERY_POSITION
@BOTH_KERNELS
@pytest.mark.parametrize("norm_position", NORM_POSITIONS)
def test_large_activations_in_float16_stay_hidden_where_they_are_masked(kind, attn_implementation, norm_position):
    model = tiny_model(
        attn_implementation=attn_implementation, norm_position=norm_position, initializer_range=20.0, **POSITIONS[kind]
    ).half()
    inputs = random_batch(model.config)
    expected = model(**inputs).logits
    changed = dict(inputs)
    other = torch.randint(3, 37, inputs["input_ids"].shape)
    changed["input_ids"] = torch.where(inputs["attention_mask"].bool(), inputs["input_ids"], other)
    torch.testing.assert_close(model(**changed).logits, expected, atol=0, rtol=0, msg="padding is seen")
    changed = dict(inputs)
    changed["decoder_input_ids"] = inputs["decoder_input_ids"].clone()
    changed["decoder_input_ids"][:, 3:] = 7
    torch.testing.assert_close(
        model(**changed).logits[:, :3], expected[:, :3], atol=0, rtol=0, msg="the future is seen"
    )


# --- what is computed how often ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_beams", [1, 3])
@EVERY_DESIGN
def test_source_is_encoded_and_projected_once_per_generation(design, num_beams):
    model = tiny_model(**DESIGNS[design])
    calls = {}

    def count(name):
        calls[name] = 0

        def hook(*_):
            calls[name] += 1

        return hook

    model.model.encoder.register_forward_hook(count("encoder"))
    for index, layer in enumerate(model.model.decoder.layers):
        for name in ("k_proj", "v_proj"):
            getattr(layer.cross_attn, name).register_forward_hook(count(f"cross {name} {index}"))
        layer.self_attn.k_proj.register_forward_hook(count(f"self {index}"))
    inputs = random_batch(model.config)
    inputs.pop("decoder_input_ids")
    model.generate(**inputs, max_new_tokens=6, min_new_tokens=6, num_beams=num_beams, do_sample=False)
    for name, number in calls.items():
        assert number == (6 if name.startswith("self") else 1), name


# --- the head ------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("logits_bias", [False, True])
def test_logits_bias_is_added_to_the_logits(logits_bias):
    model = tiny_model(logits_bias=logits_bias)
    inputs = random_batch(model.config)
    hidden_states = model.model(**inputs).last_hidden_state
    expected = hidden_states @ model.lm_head.weight.T
    assert (model.lm_head.bias is not None) == logits_bias
    if logits_bias:
        assert model.lm_head.bias.std() > 0.1
        expected = expected + model.lm_head.bias
    torch.testing.assert_close(model(**inputs).logits, expected, **TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("logits_scale", [1, 0.25, 32**-0.5])
def test_logits_scale_multiplies_what_the_projection_reads(logits_scale):
    model = tiny_model(logits_scale=logits_scale, logits_bias=True)
    inputs = random_batch(model.config)
    expected = model.lm_head(model.model(**inputs).last_hidden_state * logits_scale)
    torch.testing.assert_close(model(**inputs).logits, expected, **TOLERANCE)


@pytest.mark.parametrize("tie_word_embeddings", [False, True])
@pytest.mark.parametrize("share_embeddings", [False, True])
def test_ties_are_those_of_the_configuration(tie_word_embeddings, share_embeddings):
    model = tiny_model(tie_word_embeddings=tie_word_embeddings, share_embeddings=share_embeddings)
    source, target = model.model.encoder.embed_tokens.weight, model.model.decoder.embed_tokens.weight
    assert (source is target) == share_embeddings
    assert (model.lm_head.weight is target) == tie_word_embeddings
    model(**random_batch(model.config, with_labels=True)).loss.backward()
    # Only an output projection gives a gradient to ids that occur nowhere.
    unused = 2
    assert bool(target.grad[unused].any()) == tie_word_embeddings
    assert bool(source.grad[unused].any()) == (tie_word_embeddings and share_embeddings)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("num_items_in_batch", [None, 30])
def test_loss_is_that_of_teacher_forcing(smoothing, num_items_in_batch):
    model = tiny_model()
    inputs = random_batch(model.config, with_labels=True)
    outputs = model(**inputs, smoothing=smoothing, num_items_in_batch=num_items_in_batch)
    expected = sequence_loss(outputs.logits, inputs["labels"], num_items_in_batch, label_smoothing=smoothing)
    torch.testing.assert_close(outputs.loss, expected)


@torch.no_grad()
def test_labels_are_shifted_with_the_ids_of_the_configuration():
    model = tiny_model(pad_token_id=5, decoder_start_token_id=9)
    source = random_batch(model.config, padding=None)["input_ids"]
    labels = torch.tensor([[10, 11, 12, 13], [14, -100, 15, -100], [16, 17, -100, -100]])
    shifted = torch.tensor([[9, 10, 11, 12], [9, 14, 5, 15], [9, 16, 17, 5]])
    assert torch.equal(model.prepare_decoder_input_ids_from_labels(labels), shifted)
    expected = model(input_ids=source, decoder_input_ids=shifted).logits
    torch.testing.assert_close(model(input_ids=source, labels=labels).logits, expected)


@torch.no_grad()
def test_given_decoder_input_is_not_replaced_by_labels():
    model = tiny_model()
    inputs = random_batch(model.config)
    labels = torch.randint(3, 37, (3, 5))
    torch.testing.assert_close(model(**inputs, labels=labels).logits, model(**inputs).logits)
    embeds = model.model.decoder.embed_tokens(inputs.pop("decoder_input_ids"))
    outputs = model(**inputs, decoder_inputs_embeds=embeds, labels=labels)
    torch.testing.assert_close(outputs.logits, model(**inputs, decoder_inputs_embeds=embeds).logits)


def test_forward_refuses_to_decode_nothing():
    model = tiny_model()
    message = (
        r"`decoder_input_ids` or `decoder_inputs_embeds` \(or `labels`.*got none.*data collator the model \(`model=`\)"
    )
    for network in (model, model.model):
        with pytest.raises(ValueError, match=message):
            network(input_ids=torch.tensor([[3, 4]]))


@torch.no_grad()
@pytest.mark.parametrize("form", ["tuple", "output", "return_dict=False"])
def test_an_encoded_source_is_not_encoded_again(form):
    model = tiny_model()
    inputs = random_batch(model.config)
    expected = model(**inputs).logits
    source, mask = inputs.pop("input_ids"), inputs["attention_mask"]
    encoder = model.get_encoder()
    if form == "output":
        encoder_output = encoder(source, attention_mask=mask)
        assert isinstance(encoder_output, BaseModelOutput)
    elif form == "tuple":
        encoder_output = (encoder(source, attention_mask=mask).last_hidden_state,)
    else:
        encoder_output = encoder(source, attention_mask=mask, return_dict=False)
        assert isinstance(encoder_output, tuple)
    encoder.register_forward_hook(lambda *_: pytest.fail("encoded again"))
    torch.testing.assert_close(model(**inputs, encoder_outputs=encoder_output).logits, expected)


@torch.no_grad()
@EVERY_DESIGN
def test_encoder_model_is_the_encoder(design):
    model = tiny_model(MetaphraseModel, **DESIGNS[design])
    encoder = tiny_model(MetaphraseEncoderModel, seed=1, **DESIGNS[design])
    encoder.encoder.load_state_dict(model.encoder.state_dict())
    inputs = random_batch(model.config)
    expected = model(**inputs).encoder_last_hidden_state
    output = encoder(inputs["input_ids"], attention_mask=inputs["attention_mask"]).last_hidden_state
    torch.testing.assert_close(output, expected)


# --- caches and special ids ----------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("use_cache", [False, True])
def test_use_cache_decides_whether_a_cache_comes_back(use_cache):
    model = tiny_model(use_cache=use_cache)
    inputs = random_batch(model.config)
    assert (model(**inputs).past_key_values is not None) == use_cache
    assert (model(**inputs, use_cache=not use_cache).past_key_values is None) == use_cache
    # Training by teacher forcing has no next step.
    assert model(**random_batch(model.config, with_labels=True)).past_key_values is None


class EndsAfter(LogitsProcessor):
    """Makes each row end after so many tokens."""

    def __init__(self, end, lengths):
        self.end = end
        self.lengths = lengths

    def __call__(self, input_ids, scores):
        for row, length in enumerate(self.lengths):
            is_last = input_ids.shape[1] - 1 == length
            scores[row, self.end] = 1e9 if is_last else -1e9
        return scores


def generate_rows(model, end, lengths):
    source = torch.randint(10, 37, (len(lengths), 7))
    processors = LogitsProcessorList([EndsAfter(end, lengths)])
    return model.generate(source, logits_processor=processors, max_new_tokens=9, do_sample=False)


def test_generation_starts_with_the_start_token_and_ends_with_the_end_token():
    """Check `is_encoder_decoder`, `decoder_start_token_id`, `eos_token_id` and `pad_token_id`."""
    model = tiny_model(pad_token_id=5, eos_token_id=7, decoder_start_token_id=9)
    # A model that does not stop at 7 would go on to nine tokens.
    output = generate_rows(model, 7, (1, 4, 2))
    assert output.shape == (3, 6)
    assert output[:, 0].tolist() == [9, 9, 9]
    assert output[0, 2:].tolist() == [7, 5, 5, 5]
    assert output[1, 5:].tolist() == [7]
    assert output[2, 3:].tolist() == [7, 5, 5]


def test_generation_may_end_with_one_of_several_tokens():
    model = tiny_model(pad_token_id=5, eos_token_id=[7, 8])
    assert generate_rows(model, 8, (0, 2)).shape == (2, 4)
    assert generate_rows(model, 7, (0, 2)).shape == (2, 4)


def test_generation_takes_the_special_ids_of_the_configuration():
    """Without a start token `bos_token_id` stands in for it."""
    model = tiny_model(pad_token_id=5, bos_token_id=6, eos_token_id=7, decoder_start_token_id=9)
    settings = model.generation_config
    ids = (settings.pad_token_id, settings.bos_token_id, settings.eos_token_id, settings.decoder_start_token_id)
    assert ids == (5, 6, 7, 9)
    model = tiny_model(bos_token_id=6, decoder_start_token_id=None)
    assert generate_rows(model, 2, (1, 1))[:, 0].tolist() == [6, 6]


# --- training ------------------------------------------------------------------------------------------------------


def test_a_tiny_model_learns_to_copy():
    """Two tokens swapped: teacher forcing, masks and positions together suffice to learn it by heart."""
    model = tiny_model(initializer_range=None).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    source = torch.randint(3, 37, (8, 4))
    labels = torch.cat((source[:, [1, 0, 3, 2]], torch.full((8, 1), 2)), dim=1)
    for _ in range(30):
        loss = model(input_ids=source, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert loss < 0.1
    generated = model.eval().generate(input_ids=source, max_new_tokens=6, do_sample=False)
    assert torch.equal(generated[:, 1:], labels)


def test_model_with_a_head_is_the_model_and_the_head():
    model = tiny_model(MetaphraseForConditionalGeneration)
    assert isinstance(model.model, MetaphraseModel)
    assert model.get_encoder() is model.model.encoder
    assert model.get_decoder() is model.model.decoder
    assert model.get_input_embeddings() is model.model.encoder.embed_tokens
    assert model.get_output_embeddings() is model.lm_head
