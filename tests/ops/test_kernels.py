"""Tests that the kernels agree: eager is the reference for sdpa, for flex attention and for compiled models."""

import functools

import pytest
import torch
from tiny_models import CROSSED, DESIGNS, padding_mask, random_batch, tiny_model
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

# The weights are large, so that rounding grows from layer to layer; what a mistake does is far larger still.
CLOSE = {"atol": 1e-3, "rtol": 1e-3}


def with_kernel(model, kernel):
    model.set_attn_implementation(kernel)
    assert model.config._attn_implementation == model.get_decoder().config._attn_implementation == kernel
    return model


def padded_batch(config, side, with_labels=False):
    inputs = random_batch(config, padding=side, with_labels=with_labels)
    if side is not None:
        inputs["decoder_attention_mask"] = padding_mask([5, 3, 2], 5, side)
    return inputs


def run(model, inputs):
    with torch.no_grad():
        logits = model(**inputs).logits
    mask = inputs.get("decoder_attention_mask")
    return logits if mask is None else logits * mask[:, :, None]


# Torch's kernel has no softcap.
WITH_SDPA = [design for design in DESIGNS if "attn_logit_softcapping" not in DESIGNS[design]]


@pytest.mark.parametrize("design", CROSSED)
@pytest.mark.parametrize("side", ["left", "right"])
def test_sdpa_equals_eager(design, side):
    model = tiny_model(**CROSSED[design], encoder_layers=1, num_key_value_heads=2, attn_implementation="eager")
    inputs = padded_batch(model.config, side)
    expected = run(model, inputs)
    assert expected.isfinite().all()
    torch.testing.assert_close(run(with_kernel(model, "sdpa"), inputs), expected, **CLOSE)


@pytest.mark.parametrize("design", WITH_SDPA)
@pytest.mark.parametrize("side", ["left", None])
def test_sdpa_equals_eager_backward(design, side):
    model = tiny_model(**DESIGNS[design], attn_implementation="eager").train()
    inputs = padded_batch(model.config, side, with_labels=True)
    inputs["labels"] = inputs["labels"].masked_fill(inputs.get("decoder_attention_mask", torch.ones(3, 5)) == 0, -100)
    results = []
    for kernel in ("eager", "sdpa"):
        model.zero_grad()
        outputs = with_kernel(model, kernel)(**inputs)
        outputs.loss.backward()
        results.append((outputs.loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}))
    (loss, gradients), (other_loss, other_gradients) = results
    torch.testing.assert_close(other_loss, loss)
    for name, gradient in gradients.items():
        assert gradient.isfinite().all(), name
        difference = (other_gradients[name] - gradient).abs().max()
        assert difference < 1e-3 * max(1.0, gradient.abs().max()), name


@pytest.mark.parametrize("design", ["learned", "rotary"])
def test_flex_equals_eager(design, uncompiled_flex):
    model = tiny_model(**DESIGNS[design], attn_implementation="eager")
    for side in ("left", "right"):
        inputs = padded_batch(model.config, side)
        expected = run(with_kernel(model, "eager"), inputs)
        torch.testing.assert_close(run(with_kernel(model, "flex_attention"), inputs), expected, **CLOSE)


@pytest.fixture
def compiler():
    torch.compiler.reset()
    yield functools.partial(torch.compile, fullgraph=True)
    torch.compiler.reset()


def shallow_model(design):
    fields = DESIGNS[design] | {"encoder_layers": 1, "decoder_layers": 1}
    if "encoder_layer_types" in fields:
        fields["encoder_layer_types"] = ["sliding_attention"]
    return tiny_model(**fields)


@pytest.mark.slow
@pytest.mark.parametrize("design", DESIGNS)
def test_compiled_training_has_the_same_gradients(design, compiler):
    model = shallow_model(design).train()
    inputs = random_batch(model.config, with_labels=True)
    loss = model(**inputs).loss
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    compiled_loss = compiler(model, backend="aot_eager")(**inputs).loss
    compiled_loss.backward()
    torch.testing.assert_close(compiled_loss, loss)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], **CLOSE, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("design", DESIGNS)
def test_compiled_step_with_a_static_cache(design, compiler):
    """The step of generation that is repeated is one graph, compiled once for all positions."""
    model = shallow_model(design)
    inputs = random_batch(model.config)
    targets = inputs.pop("decoder_input_ids")
    expected = run(model, inputs | {"decoder_input_ids": targets})
    with torch.no_grad():
        memory = model.get_encoder()(**inputs)
        cache = EncoderDecoderCache(StaticCache(config=model.config, max_cache_len=8), DynamicCache())
        inputs = {"attention_mask": inputs["attention_mask"], "encoder_outputs": memory, "past_key_values": cache}
        model(decoder_input_ids=targets[:, :2], **inputs)
        step = compiler(model, backend="aot_eager")
        with torch.compiler.set_stance(skip_guard_eval_unsafe=False):
            for index in range(2, 5):
                logits = step(decoder_input_ids=targets[:, index : index + 1], **inputs).logits
                torch.testing.assert_close(logits[:, 0], expected[:, index], **CLOSE)
