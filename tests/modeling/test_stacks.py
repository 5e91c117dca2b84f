"""Tests of `metaphrase.modeling.stacks` and of what both stacks do: sizes, embeddings, norms, masks, initialization."""

import math

import pytest
import torch
from tiny_models import DESIGNS, POSITIONS, random_batch, run_model, tiny_config, tiny_model
from torch import nn

from metaphrase.modeling import (
    MetaphraseForConditionalGeneration,
    MetaphraseModel,
    decoder,
    encoder,
)
from metaphrase.modeling.attention import MetaphraseAttention


def first_layer_input(stack, run):
    """Return the input of a stack's first layer during `run()`."""
    inputs = []
    handle = stack.layers[0].register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    run()
    handle.remove()
    return inputs[0]


def stack_and_ids(model, name):
    inputs = random_batch(model.config, padding=None)
    return (model.encoder, inputs["input_ids"]) if name == "encoder" else (model.decoder, inputs["decoder_input_ids"])


# --- sizes ---------------------------------------------------------------------------------------------------------


def test_hidden_size_is_the_width_of_everything_between_sublayers():
    model = tiny_model(MetaphraseModel, hidden_size=24, position_embedding_type="learned")
    for stack in (model.encoder, model.decoder):
        assert stack.embed_tokens.weight.shape[1] == stack.embed_positions.weight.shape[1] == 24
        assert stack.norm.weight.shape == (24,)
    outputs = run_model(model)
    assert outputs.last_hidden_state.shape == (3, 5, 24)
    assert outputs.encoder_last_hidden_state.shape == (3, 7, 24)


def test_heads_of_the_stacks_may_differ():
    model = tiny_model(attn_implementation="eager", encoder_attention_heads=8, decoder_attention_heads=2)
    outputs = run_model(model, output_attentions=True)
    shapes = [tuple(weights[0].shape) for weights in (outputs.encoder_attentions, outputs.decoder_attentions)]
    assert shapes == [(3, 8, 7, 7), (3, 2, 5, 5)]
    assert outputs.cross_attentions[0].shape == (3, 2, 5, 7)


def test_feed_forward_widths_of_the_stacks_may_differ():
    model = tiny_model(MetaphraseModel, encoder_ffn_dim=20, decoder_ffn_dim=28)
    widths = [stack.layers[1].mlp.down_proj.in_features for stack in (model.encoder, model.decoder)]
    assert widths == [20, 28]
    run_model(model)


@pytest.mark.parametrize(("value", "expected"), [(None, 37), (23, 23)])
def test_vocabularies_of_the_stacks_may_differ(value, expected):
    model = tiny_model(vocab_size=37, decoder_vocab_size=value, share_embeddings=False)
    assert model.config.decoder_vocab_size == expected
    assert model.model.encoder.embed_tokens.weight.shape == (37, 32)
    assert model.model.decoder.embed_tokens.weight.shape == (expected, 32)
    assert run_model(model).logits.shape == (3, 5, expected)


@pytest.mark.parametrize("name", ["encoder", "decoder"])
@pytest.mark.parametrize("key_value_heads", [None, 1, 2])
def test_num_key_value_heads_holds_in_every_attention(name, key_value_heads):
    model = tiny_model(MetaphraseModel, num_key_value_heads=key_value_heads)
    attentions = [module for module in getattr(model, name).modules() if isinstance(module, MetaphraseAttention)]
    assert len(attentions) == {"encoder": 2, "decoder": 4}[name]
    assert {attention.k_proj.out_features for attention in attentions} == {8 * (key_value_heads or 4)}
    assert run_model(model, use_cache=True).past_key_values is not None


# --- embeddings ----------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("name", ["encoder", "decoder"])
@pytest.mark.parametrize(("scale_embedding", "factor"), [(True, 32**0.5), (False, 1.0)])
def test_scale_embedding_multiplies_the_tokens_alone(name, scale_embedding, factor):
    model = tiny_model(MetaphraseModel, scale_embedding=scale_embedding, position_embedding_type="learned")
    stack, ids = stack_and_ids(model, name)
    entered = first_layer_input(stack, lambda: run_model(model))
    positions = stack.embed_positions.weight[: ids.shape[1]]
    torch.testing.assert_close(entered, stack.embed_tokens.weight[ids] * factor + positions)


@torch.no_grad()
def test_given_embeddings_are_not_scaled_again():
    model = tiny_model(MetaphraseModel, position_embedding_type="none")
    inputs = random_batch(model.config, padding=None)
    embeddings = {"input_ids": None, "inputs_embeds": model.encoder.embed_tokens(inputs["input_ids"])}
    embeddings |= {
        "decoder_input_ids": None,
        "decoder_inputs_embeds": model.decoder.embed_tokens(inputs["decoder_input_ids"]),
    }
    torch.testing.assert_close(run_model(model, **embeddings).last_hidden_state, run_model(model).last_hidden_state)


@torch.no_grad()
@pytest.mark.parametrize("name", ["encoder", "decoder"])
@pytest.mark.parametrize("norm_type", ["layernorm", "rmsnorm"])
def test_embedding_norm_norms_the_sum_of_embeddings_and_positions(name, norm_type):
    fields = {"norm_type": norm_type, "position_embedding_type": "learned"}
    model = tiny_model(MetaphraseModel, embedding_norm=True, **fields)
    stack, ids = stack_and_ids(model, name)
    entered = first_layer_input(stack, lambda: run_model(model))
    added = stack.embed_tokens(ids) + stack.embed_positions.weight[: ids.shape[1]]
    torch.testing.assert_close(entered, stack.embedding_norm(added))
    assert type(stack.embedding_norm) is type(stack.layers[0].mlp_norm)
    assert not list(tiny_model(MetaphraseModel, **fields).encoder.embedding_norm.parameters())


@torch.no_grad()
@pytest.mark.parametrize("name", ["encoder", "decoder"])
@pytest.mark.parametrize("embedding_norm", [False, True])
def test_dropout_falls_on_the_embeddings(name, embedding_norm):
    model = tiny_model(
        MetaphraseModel, dropout=0.25, position_embedding_type="sinusoidal", embedding_norm=embedding_norm
    )
    stack, _ = stack_and_ids(model, name)
    exact = first_layer_input(stack, lambda: run_model(model))
    model.train()
    entered = first_layer_input(stack, lambda: run_model(model))
    dropped = entered == 0
    assert 0.15 < dropped.float().mean() < 0.35
    torch.testing.assert_close(entered[~dropped], exact[~dropped] / 0.75)


# --- norms ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("name", ["encoder", "decoder"])
@pytest.mark.parametrize("norm_type", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize(
    ("norm_position", "final_norm", "is_normed"),
    [
        ("pre", None, True),
        ("post", None, False),
        ("pre", False, False),
        ("post", True, True),
    ],
)
def test_final_norm_norms_the_output_of_each_stack(name, norm_type, norm_position, final_norm, is_normed):
    model = tiny_model(MetaphraseModel, norm_position=norm_position, final_norm=final_norm, norm_type=norm_type)
    assert model.config.final_norm is is_normed
    stack = getattr(model, name)
    states = []
    stack.layers[-1].register_forward_hook(lambda _module, _args, output: states.append(output))
    outputs = run_model(model)
    last = outputs.last_hidden_state if name == "decoder" else outputs.encoder_last_hidden_state
    if is_normed:
        centered = states[0] - states[0].mean(-1, keepdim=True) if norm_type == "layernorm" else states[0]
        normed = centered / (centered.square().mean(-1, keepdim=True) + 1e-6).sqrt() * stack.norm.weight
        torch.testing.assert_close(last, normed + getattr(stack.norm, "bias", 0), atol=1e-5, rtol=1e-5)
    else:
        torch.testing.assert_close(last, states[0], atol=0, rtol=0)
        assert not list(stack.norm.parameters())


@torch.no_grad()
@pytest.mark.parametrize("norm_type", ["layernorm", "rmsnorm"])
def test_norm_eps_reaches_every_norm(norm_type):
    model = tiny_model(MetaphraseModel, norm_type=norm_type, norm_eps=0.125, embedding_norm=True, qk_norm=True)
    norms = [module for module in model.modules() if hasattr(module, "eps")]
    # Two stacks with two norms of their own; layers with two or three norms and one or two pairs in attention.
    assert len(norms) == 2 * 2 + 2 * (2 + 2) + 2 * (3 + 4)
    assert {norm.eps for norm in norms} == {0.125}


# --- masks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(POSITIONS))
@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
def test_masks_are_built_once_per_stack(kind, attn_implementation, monkeypatch):
    calls = []
    names = ("create_bidirectional_mask", "create_causal_mask", "create_bidirectional_mask")
    for stack, name in zip((encoder, decoder, decoder), names, strict=True):
        original = getattr(stack, name)

        def counted(*args, name=name, original=original, **kwargs):
            calls.append((name, kwargs.get("encoder_hidden_states") is not None))
            return original(*args, **kwargs)

        monkeypatch.setattr(stack, name, counted)
    model = tiny_model(attn_implementation=attn_implementation, encoder_layers=3, decoder_layers=3, **POSITIONS[kind])
    model(**random_batch(model.config))
    assert calls == [
        ("create_bidirectional_mask", False),
        ("create_causal_mask", False),
        ("create_bidirectional_mask", True),
    ]


@pytest.mark.parametrize("kind", ["relative", "alibi"])
def test_shared_bias_is_computed_once_per_stack(kind):
    model = tiny_model(MetaphraseModel, encoder_layers=3, decoder_layers=3, **POSITIONS[kind])
    calls = []
    for stack in (model.encoder, model.decoder):
        stack.position_bias.register_forward_hook(lambda module, *_: calls.append(module))
    run_model(model)
    assert calls == [model.encoder.position_bias, model.decoder.position_bias]


@torch.no_grad()
@pytest.mark.parametrize("kind", list(DESIGNS))
def test_decoder_sees_no_future(kind):
    model = tiny_model(**DESIGNS[kind])
    inputs = random_batch(model.config)
    expected = model(**inputs).logits
    for position in range(1, 5):
        changed = inputs["decoder_input_ids"].clone()
        changed[:, position] = (changed[:, position] + 1) % model.config.decoder_vocab_size
        logits = model(**(inputs | {"decoder_input_ids": changed})).logits
        torch.testing.assert_close(logits[:, :position], expected[:, :position], atol=1e-5, rtol=1e-5)
        assert not torch.allclose(logits[:, position:], expected[:, position:], atol=1e-2)


# --- errors --------------------------------------------------------------------------------------------------------


def test_stacks_refuse_both_and_neither_of_ids_and_embeddings():
    model = tiny_model(MetaphraseModel)
    ids = torch.tensor([[3, 4]])
    embeds, encoder_output = torch.randn(1, 2, 32), torch.randn(1, 3, 32)
    for stack, extra in ((model.encoder, {}), (model.decoder, {"encoder_hidden_states": encoder_output})):
        with pytest.raises(ValueError, match="Exactly one of `input_ids` and `inputs_embeds` must be given, got both"):
            stack(input_ids=ids, inputs_embeds=embeds, **extra)
        with pytest.raises(
            ValueError, match="Exactly one of `input_ids` and `inputs_embeds` must be given, got neither"
        ):
            stack(**extra)


def test_decoder_refuses_to_run_without_encoder_output():
    with pytest.raises(ValueError, match="`encoder_hidden_states` must be given to the decoder, got None"):
        tiny_model(MetaphraseModel).decoder(input_ids=torch.tensor([[3, 4]]))


# --- initialization ------------------------------------------------------------------------------------------------


WIDE = {
    "vocab_size": 400,
    "hidden_size": 96,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 192,
    "num_key_value_heads": 2,
    "share_embeddings": False,
    "decoder_vocab_size": 300,
    "tie_word_embeddings": False,
    "logits_bias": True,
}


def fresh_model(**fields):
    """A model as it is initialized; `tiny_model` would move its biases."""
    return MetaphraseForConditionalGeneration(tiny_config(**(WIDE | fields)))


@pytest.mark.parametrize("kind", ["learned", "relative", "rotary"])
@pytest.mark.parametrize("initializer_range", [0.02, 1])
def test_initializer_range_is_the_deviation_of_every_weight(kind, initializer_range):
    model = fresh_model(initializer_range=initializer_range, attention_scale=1.0, **POSITIONS[kind])
    checked = 0
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            checked += 1
            error = 4 / parameter.numel() ** 0.5
            assert math.isclose(parameter.std().item(), initializer_range, rel_tol=error), name
            assert abs(parameter.mean()) < initializer_range * error, name
        else:
            expected = torch.zeros_like(parameter) if name.endswith("bias") else torch.ones_like(parameter)
            assert torch.equal(parameter, expected), name
    assert checked >= 20


@pytest.mark.parametrize("attention_scale", [None, 1.0])
def test_initializer_range_none_scales_each_weight_with_its_shape(attention_scale):
    model = fresh_model(initializer_range=None, attention_scale=attention_scale, **POSITIONS["learned"])
    checked = set()
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | nn.Embedding):
            continue
        expected = 96**-0.5
        if isinstance(module, nn.Linear) and name != "lm_head":
            expected = (2 / (module.in_features + module.out_features)) ** 0.5
        if name.endswith("q_proj") and attention_scale is not None:
            # Heads are 24 wide: the scores shall vary as they would with the usual scale.
            expected *= 24**-0.5
        checked.add(name.rsplit(".", 1)[-1])
        assert math.isclose(module.weight.std().item(), expected, rel_tol=4 / module.weight.numel() ** 0.5), name
    assert checked >= {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"}
    assert checked >= {"embed_tokens", "embed_positions"}


# --- outputs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_trained", [True, False])
def test_padding_embedding_learns_where_it_is_read_or_does_not(is_trained):
    model = tiny_model(
        pad_token_id=5, decoder_start_token_id=5, train_padding_embedding=is_trained, tie_word_embeddings=False
    )
    row = model.get_input_embeddings().weight[5]
    assert bool((row == 0).all()) is not is_trained
    model(input_ids=torch.tensor([[7, 8]]), labels=torch.tensor([[9, 10]])).loss.backward()
    gradient = model.get_input_embeddings().weight.grad
    assert bool((gradient[5] != 0).any()) is is_trained
    assert (gradient[[7, 8, 9]] != 0).any(dim=1).all()
