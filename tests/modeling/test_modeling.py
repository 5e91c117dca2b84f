"""Tests of `metaphrase.modeling.modeling_metaphrase`: padding, large activations, the head, and what is computed how often."""

from collections import Counter

import pytest
import torch
from tiny_models import DESIGNS, POSITIONS, random_batch, tiny_model

EVERY_DESIGN = pytest.mark.parametrize("design", list(DESIGNS))
EVERY_POSITION = pytest.mark.parametrize("kind", list(POSITIONS))
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}


@pytest.mark.parametrize(
    ("dtype", "attn_implementation"), [(torch.float32, "sdpa"), (torch.bfloat16, "sdpa"), (torch.float16, "eager")]
)
@EVERY_DESIGN
def test_a_row_of_padding_alone_stays_finite_and_leaves_the_others_alone(dtype, design, attn_implementation):
    if "attn_logit_softcapping" in DESIGNS[design]:
        # Torch's kernel has no softcap.
        attn_implementation = "eager"
    model = tiny_model(attn_implementation=attn_implementation, **DESIGNS[design]).to(dtype)
    inputs = random_batch(model.config, with_labels=True)
    inputs["decoder_attention_mask"] = torch.ones_like(inputs["labels"])
    inputs["attention_mask"][1] = inputs["decoder_attention_mask"][1] = 0
    inputs["labels"][1] = -100
    outputs = model(**inputs)
    assert outputs.logits.isfinite().all()
    assert outputs.encoder_last_hidden_state.isfinite().all()
    outputs.loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)
    if dtype == torch.float32:
        rest = model(**{name: value[[0, 2]] for name, value in inputs.items()})
        torch.testing.assert_close(outputs.logits[[0, 2]], rest.logits, **TOLERANCE)
        torch.testing.assert_close(outputs.loss, rest.loss, **TOLERANCE)


@torch.no_grad()
@EVERY_POSITION
def test_given_positions_count_up_by_default_and_do_not_depend_on_the_cache(kind):
    model = tiny_model(**POSITIONS[kind])
    inputs = random_batch(model.config, padding=None)
    explicit = {"position_ids": torch.arange(7)[None], "decoder_position_ids": torch.arange(5)[None]}
    torch.testing.assert_close(model(**inputs, **explicit).logits, model(**inputs).logits)
    positions = torch.tensor([[0, 2, 5, 7, 11]]).expand(3, 5)
    inputs |= {"decoder_position_ids": positions}
    logits = [model(**inputs, use_cache=use_cache).logits for use_cache in (False, True)]
    del inputs["decoder_position_ids"]
    torch.testing.assert_close(*logits, **TOLERANCE)
    if kind != "none":
        assert not torch.allclose(logits[0], model(**inputs).logits, atol=1e-2)


@EVERY_POSITION
@pytest.mark.parametrize(("kernel", "norm_position", "gated_mlp"), [("eager", "pre", True), ("sdpa", "post", False)])
@pytest.mark.parametrize("initializer_range", [4.0, 40.0])
def test_large_activations_stay_finite_in_float16(kind, kernel, norm_position, gated_mlp, initializer_range):
    fields = {"norm_position": norm_position, "gated_mlp": gated_mlp, "initializer_range": initializer_range}
    model = tiny_model(attn_implementation=kernel, **fields, **POSITIONS[kind]).half()
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
@pytest.mark.parametrize(("kernel", "norm_position"), [("eager", "post"), ("sdpa", "pre")])
def test_large_activations_in_float16_stay_hidden_where_they_are_masked(kind, kernel, norm_position):
    fields = POSITIONS[kind] | {"norm_position": norm_position, "initializer_range": 20.0}
    model = tiny_model(attn_implementation=kernel, **fields).half()
    inputs = random_batch(model.config)
    expected = model(**inputs).logits
    changed = dict(inputs)
    other = torch.randint(3, 37, inputs["input_ids"].shape)
    changed["input_ids"] = torch.where(inputs["attention_mask"].bool(), inputs["input_ids"], other)
    torch.testing.assert_close(model(**changed).logits, expected, atol=0, rtol=0, msg="padding is seen")
    changed = dict(inputs)
    changed["decoder_input_ids"] = inputs["decoder_input_ids"].clone()
    changed["decoder_input_ids"][:, 3:] = 7
    torch.testing.assert_close(model(**changed).logits[:, :3], expected[:, :3], atol=0, rtol=0, msg="sees the future")


@pytest.mark.parametrize("num_beams", [1, 3])
def test_source_is_encoded_and_projected_once_per_generation(num_beams):
    model = tiny_model()
    layer, calls = model.get_decoder().layers[1], []
    for module in (model.get_encoder(), layer.cross_attn.k_proj, layer.cross_attn.v_proj, layer.self_attn.k_proj):
        module.register_forward_hook(lambda called, *_: calls.append(called))
    inputs = random_batch(model.config)
    inputs.pop("decoder_input_ids")
    model.generate(**inputs, max_new_tokens=6, min_new_tokens=6, num_beams=num_beams, do_sample=False)
    assert sorted(Counter(calls).values()) == [1, 1, 1, 6]


def test_forward_refuses_to_decode_nothing():
    model, ids = tiny_model(), torch.tensor([[3, 4]])
    with pytest.raises(ValueError, match="`decoder_input_ids`"):
        model(input_ids=ids)
    # The model without a head then reads the source alone.
    outputs = model.model(input_ids=ids)
    assert outputs.last_hidden_state.equal(model.get_encoder()(ids).last_hidden_state)


@torch.no_grad()
@pytest.mark.parametrize("use_cache", [False, True])
def test_use_cache_decides_whether_a_cache_comes_back(use_cache):
    model = tiny_model(use_cache=use_cache)
    inputs = random_batch(model.config)
    assert (model(**inputs).past_key_values is not None) == use_cache
    assert (model(**inputs, use_cache=not use_cache).past_key_values is None) == use_cache
    # Training by teacher forcing has no next step.
    assert model(**random_batch(model.config, with_labels=True)).past_key_values is None
