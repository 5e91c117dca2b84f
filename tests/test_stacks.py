"""Tests of `metaphrase.modeling.stacks`: sizes, embeddings, positions, norms, masks and initialization of each stack."""

import math

import pytest
import torch
from tiny_models import DESIGNS, POSITIONS, padding_mask, random_batch, tiny_config, tiny_model
from torch import nn
from transformers.models.t5.modeling_t5 import T5Attention

from metaphrase.modeling import (
    MetaphraseEncoderModel,
    MetaphraseForConditionalGeneration,
    MetaphraseModel,
    stacks,
)
from metaphrase.modeling.attention import MetaphraseAttention
from metaphrase.modeling.positions import sinusoidal_table


def first_layer_input(stack, run):
    """What the first layer of a stack reads while `run()` runs."""
    seen = []
    handle = stack.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    run()
    handle.remove()
    return seen[0]


def run_model(model, **inputs):
    with torch.no_grad():
        return model(**(random_batch(model.config, padding=None) | inputs))


def stack_and_ids(model, name):
    inputs = random_batch(model.config, padding=None)
    return (model.encoder, inputs["input_ids"]) if name == "encoder" else (model.decoder, inputs["decoder_input_ids"])


# --- sizes ---------------------------------------------------------------------------------------------------------


def test_layers_are_those_of_the_stack():
    model = tiny_model(MetaphraseModel, encoder_layers=3, decoder_layers=1)
    assert (len(model.encoder.layers), len(model.decoder.layers)) == (3, 1)
    outputs = run_model(model, output_hidden_states=True)
    assert (len(outputs.encoder_hidden_states), len(outputs.decoder_hidden_states)) == (4, 2)


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


@pytest.mark.parametrize(("given", "expected"), [(None, 37), (23, 23)])
def test_vocabularies_of_the_stacks_may_differ(given, expected):
    model = tiny_model(vocab_size=37, decoder_vocab_size=given, share_embeddings=False)
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
    places = stack.embed_positions.weight[: ids.shape[1]]
    torch.testing.assert_close(entered, stack.embed_tokens.weight[ids] * factor + places)


@torch.no_grad()
def test_given_embeddings_are_not_scaled_again():
    model = tiny_model(MetaphraseModel, position_embedding_type="none")
    inputs = random_batch(model.config, padding=None)
    given = {"input_ids": None, "inputs_embeds": model.encoder.embed_tokens(inputs["input_ids"])}
    given |= {
        "decoder_input_ids": None,
        "decoder_inputs_embeds": model.decoder.embed_tokens(inputs["decoder_input_ids"]),
    }
    torch.testing.assert_close(run_model(model, **given).last_hidden_state, run_model(model).last_hidden_state)


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
    seen = []
    stack.layers[-1].register_forward_hook(lambda _module, _args, output: seen.append(output))
    outputs = run_model(model)
    last = outputs.last_hidden_state if name == "decoder" else outputs.encoder_last_hidden_state
    if is_normed:
        centered = seen[0] - seen[0].mean(-1, keepdim=True) if norm_type == "layernorm" else seen[0]
        normed = centered / (centered.square().mean(-1, keepdim=True) + 1e-6).sqrt() * stack.norm.weight
        torch.testing.assert_close(last, normed + getattr(stack.norm, "bias", 0), atol=1e-5, rtol=1e-5)
    else:
        torch.testing.assert_close(last, seen[0], atol=0, rtol=0)
        assert not list(stack.norm.parameters())


@torch.no_grad()
@pytest.mark.parametrize("norm_type", ["layernorm", "rmsnorm"])
def test_norm_eps_reaches_every_norm(norm_type):
    model = tiny_model(MetaphraseModel, norm_type=norm_type, norm_eps=0.125, embedding_norm=True, qk_norm=True)
    norms = [module for module in model.modules() if hasattr(module, "eps")]
    # Two stacks with two norms of their own; layers with two or three norms and one or two pairs in attention.
    assert len(norms) == 2 * 2 + 2 * (2 + 2) + 2 * (3 + 4)
    assert {norm.eps for norm in norms} == {0.125}


# --- positions -----------------------------------------------------------------------------------------------------


def with_positions(kind, **fields):
    """A model with positions and one without that has the same weights, for `kind` of `POSITIONS`."""
    model = tiny_model(MetaphraseModel, attn_implementation="eager", **(POSITIONS[kind] | fields))
    plain = tiny_model(MetaphraseModel, attn_implementation="eager", position_embedding_type="none", **fields)
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if name in plain.state_dict()})
    return model, plain


@torch.no_grad()
@pytest.mark.parametrize("kind", ["sinusoidal", "half_split", "learned"])
def test_added_positions_are_a_table_on_the_embeddings(kind):
    model, plain = with_positions(kind)
    inputs = random_batch(model.config, padding=None)
    given = {}
    for stack, ids, field in (
        (model.encoder, inputs["input_ids"], "inputs_embeds"),
        (model.decoder, inputs["decoder_input_ids"], "decoder_inputs_embeds"),
    ):
        length = ids.shape[1]
        if kind == "learned":
            table = stack.embed_positions.weight[:length]
        else:
            table = sinusoidal_table(length, 32, model.config.sinusoidal_layout)
        given[field] = stack.embed_tokens(ids) + table
    expected = plain(**given).last_hidden_state
    torch.testing.assert_close(run_model(model).last_hidden_state, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["relative", "alibi"])
@pytest.mark.parametrize("name", ["encoder", "decoder"])
def test_biases_are_added_to_the_scores_of_self_attention(kind, name):
    """A model without positions that gets the bias as a mask must say the same."""
    model, plain = with_positions(kind)
    length = {"encoder": 7, "decoder": 5}[name]
    distance = torch.arange(length)[None, :] - torch.arange(length)[:, None]
    stack = getattr(model, name)
    if kind == "alibi":
        bias = -distance.abs() * torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256])[:, None, None]
    else:
        bias = stack.position_bias.embedding.weight[stack.position_bias.bucket(distance)].permute(2, 0, 1)
    if name == "decoder":
        bias = bias.masked_fill(distance > 0, -1e9)
    inputs = random_batch(model.config, padding=None)
    masks = {"attention_mask" if name == "encoder" else "decoder_attention_mask": bias[None]}
    if name == "encoder":
        outputs = [
            model.encoder(inputs["input_ids"]),
            plain.encoder(inputs["input_ids"], attention_mask=masks["attention_mask"]),
        ]
    else:
        memory = torch.randn(3, 7, 32)
        ids = inputs["decoder_input_ids"]
        outputs = [
            model.decoder(ids, encoder_hidden_states=memory),
            plain.decoder(ids, encoder_hidden_states=memory, attention_mask=masks["decoder_attention_mask"]),
        ]
    torch.testing.assert_close(*(output.last_hidden_state for output in outputs), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_rotary_turns_queries_and_keys_by_their_place():
    model, _ = with_positions("rotary", attention_bias=False)
    ids = random_batch(model.config, padding=None)["input_ids"]
    layer = model.encoder.layers[0]
    states = layer.self_attn_norm(model.encoder.embed_tokens(ids))
    angles = torch.arange(7.0)[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])
    turns = torch.polar(torch.ones(()), angles)

    def turned(projected):
        heads = projected.view(3, 7, 4, 8).transpose(1, 2)
        return torch.complex(heads[..., :4], heads[..., 4:]) * turns

    query, key = turned(layer.self_attn.q_proj(states)), turned(layer.self_attn.k_proj(states))
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key.conj()).real * 8**-0.5
    weights = model.encoder(ids, output_attentions=True).attentions[0]
    torch.testing.assert_close(weights, scores.softmax(-1), atol=1e-5, rtol=0)


@torch.no_grad()
def test_rotary_parameters_reach_both_stacks():
    models = []
    for parameters in (None, {"rope_type": "default", "rope_theta": 20.0}):
        models.append(tiny_model(MetaphraseModel, rope_parameters=parameters))
    expected = [20.0 ** (-index / 4) for index in range(4)]
    for stack in (models[1].encoder, models[1].decoder):
        torch.testing.assert_close(stack.rotary_emb.inv_freq, torch.tensor(expected))
    models[1].load_state_dict(models[0].state_dict())
    plain, other = (run_model(model) for model in models)
    assert not torch.allclose(plain.encoder_last_hidden_state, other.encoder_last_hidden_state, atol=1e-2)
    assert not torch.allclose(plain.last_hidden_state, other.last_hidden_state, atol=1e-2)


@torch.no_grad()
@pytest.mark.parametrize("kind", list(POSITIONS))
def test_only_positions_tell_the_encoder_an_order(kind):
    """Every `position_embedding_type` but `none` tells a shuffled source from a straight one."""
    model = tiny_model(MetaphraseEncoderModel, **POSITIONS[kind])
    ids = random_batch(model.config, padding=None)["input_ids"]
    order = torch.tensor([3, 6, 0, 2, 5, 1, 4])
    straight, permuted = model(ids).last_hidden_state[:, order], model(ids[:, order]).last_hidden_state
    is_equal = torch.allclose(straight, permuted, atol=1e-4)
    assert is_equal == (kind == "none")


@torch.no_grad()
def test_relative_bias_is_shared_by_the_layers_or_is_not():
    """What `relative_attention_shared` decides."""
    shared = tiny_model(MetaphraseModel, **POSITIONS["relative"])
    single = tiny_model(MetaphraseModel, **POSITIONS["relative_per_layer"])
    names = [name for name in shared.state_dict() if "bias.embedding" in name]
    assert names == ["encoder.position_bias.embedding.weight", "decoder.position_bias.embedding.weight"]
    own = [name for name in single.state_dict() if "bias.embedding" in name]
    assert own == [
        f"{stack}.layers.{layer}.self_attn.relative_position_bias.embedding.weight"
        for stack in ("encoder", "decoder")
        for layer in (0, 1)
    ]
    # With the shared bias in each layer the two are one; each layer reads its own.
    state = {name: value for name, value in shared.state_dict().items() if name not in names}
    for name in own:
        state[name] = shared.state_dict()[f"{name.split('.')[0]}.position_bias.embedding.weight"]
    single.load_state_dict(state)
    expected = run_model(shared).last_hidden_state
    torch.testing.assert_close(run_model(single).last_hidden_state, expected, atol=1e-5, rtol=1e-5)
    for name in own:
        changed = dict(state)
        changed[name] = torch.randn(state[name].shape) * 3
        single.load_state_dict(changed)
        assert not torch.allclose(run_model(single).last_hidden_state, expected, atol=1e-2)


@torch.no_grad()
def test_relative_bucket_options_reach_both_stacks():
    fields = {"relative_attention_num_buckets": 12, "relative_attention_max_distance": 9}
    model = tiny_model(MetaphraseModel, **POSITIONS["relative"], **fields)
    for stack, is_bidirectional in ((model.encoder, True), (model.decoder, False)):
        assert stack.position_bias.embedding.weight.shape == (12, 4)
        distance = torch.arange(-20, 21)
        expected = T5Attention._relative_position_bucket(distance, is_bidirectional, 12, 9)
        assert stack.position_bias.bucket(distance).tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["source", "target"])
def test_learned_positions_refuse_what_is_longer(name):
    model = tiny_model(position_embedding_type="learned", max_position_embeddings=6)
    lengths = {"source": 6, "target": 6}
    model(**random_batch(model.config, padding=None, **lengths))
    with pytest.raises(ValueError, match=r"`max_position_embeddings`.*got 7 tokens and 6 positions"):
        model(**random_batch(model.config, padding=None, **(lengths | {name: 7})))


@pytest.mark.parametrize("max_new_tokens", [4, 9])
def test_learned_positions_refuse_to_generate_past_the_table(max_new_tokens):
    model = tiny_model(position_embedding_type="learned", max_position_embeddings=6, eos_token_id=None)
    inputs = random_batch(model.config, source=5)
    inputs.pop("decoder_input_ids")
    options = {"max_new_tokens": max_new_tokens, "do_sample": False}
    if max_new_tokens == 4:
        assert model.generate(**inputs, **options).shape == (3, 5)
    else:
        with pytest.raises(ValueError, match="`max_position_embeddings`"):
            model.generate(**inputs, **options)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["sinusoidal", "half_split"])
def test_sinusoidal_positions_have_no_limit(kind):
    fields = POSITIONS[kind] | {"max_position_embeddings": 4}
    model = tiny_model(MetaphraseModel, **fields)
    roomy = tiny_model(MetaphraseModel, **(fields | {"max_position_embeddings": 200}))
    inputs = random_batch(model.config, source=90, target=70, padding=None)
    torch.testing.assert_close(model(**inputs).last_hidden_state, roomy(**inputs).last_hidden_state)
    place, entry = 80, 10
    value = model.encoder.embed_positions.table[place, entry]
    index = entry // 2 if model.config.sinusoidal_layout == "interleaved" else entry
    assert math.isclose(value, math.sin(place / 10_000 ** (2 * index / 32)), abs_tol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["sinusoidal", "half_split", "learned"])
@pytest.mark.parametrize("name", ["position_ids", "decoder_position_ids"])
def test_given_positions_may_lie_past_the_table(kind, name):
    """Three tokens at far places: sinusoids are made for them, of learned positions there are none."""
    fields = POSITIONS[kind] | {"max_position_embeddings": 8}
    model = tiny_model(MetaphraseModel, **fields)
    inputs = random_batch(model.config, source=3, target=3, padding=None)
    inputs[name] = torch.tensor([[0, 8, 30]])
    if kind == "learned":
        with pytest.raises(ValueError, match="`max_position_embeddings`"):
            model(**inputs)
    else:
        roomy = tiny_model(MetaphraseModel, **(fields | {"max_position_embeddings": 64}))
        torch.testing.assert_close(model(**inputs).last_hidden_state, roomy(**inputs).last_hidden_state)


@torch.no_grad()
def test_scaled_rotary_uses_max_position_embeddings():
    parameters = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    inputs = random_batch(tiny_config(), source=20, padding=None)
    outputs = []
    for limit in (8, 64):
        model = tiny_model(MetaphraseModel, rope_parameters=dict(parameters), max_position_embeddings=limit)
        outputs.append(model(**inputs).encoder_last_hidden_state)
    plain = tiny_model(MetaphraseModel)(**inputs).encoder_last_hidden_state
    torch.testing.assert_close(outputs[1], plain)
    assert not torch.allclose(outputs[0], plain, atol=1e-2)


# --- masks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(POSITIONS))
@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
def test_masks_are_built_once_per_stack(kind, attn_implementation, monkeypatch):
    calls = []
    for name in ("create_causal_mask", "create_bidirectional_mask"):
        original = getattr(stacks, name)

        def counted(*args, name=name, original=original, **kwargs):
            calls.append((name, kwargs.get("encoder_hidden_states") is not None))
            return original(*args, **kwargs)

        monkeypatch.setattr(stacks, name, counted)
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
    for place in range(1, 5):
        changed = inputs["decoder_input_ids"].clone()
        changed[:, place] = (changed[:, place] + 1) % model.config.decoder_vocab_size
        logits = model(**(inputs | {"decoder_input_ids": changed})).logits
        torch.testing.assert_close(logits[:, :place], expected[:, :place], atol=1e-5, rtol=1e-5)
        assert not torch.allclose(logits[:, place:], expected[:, place:], atol=1e-2)


# --- errors --------------------------------------------------------------------------------------------------------


def test_stacks_refuse_both_and_neither_of_ids_and_embeddings():
    model = tiny_model(MetaphraseModel)
    ids = torch.tensor([[3, 4]])
    embeds, memory = torch.randn(1, 2, 32), torch.randn(1, 3, 32)
    for stack, extra in ((model.encoder, {}), (model.decoder, {"encoder_hidden_states": memory})):
        with pytest.raises(ValueError, match="Exactly one of `input_ids` and `inputs_embeds` must be given, got both"):
            stack(input_ids=ids, inputs_embeds=embeds, **extra)
        with pytest.raises(
            ValueError, match="Exactly one of `input_ids` and `inputs_embeds` must be given, got neither"
        ):
            stack(**extra)


def test_decoder_refuses_to_run_without_memory():
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


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_recorded_attention_is_zero_on_padding(side):
    model = tiny_model(attn_implementation="eager")
    inputs = random_batch(model.config, padding=side)
    outputs = model(**inputs, output_attentions=True)
    padding = padding_mask([7, 5, 3], 7, side) == 0
    for weights in (*outputs.encoder_attentions, *outputs.cross_attentions):
        assert (weights.transpose(1, 3)[padding] == 0).all()
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    assert (outputs.decoder_attentions[0].triu(1) == 0).all()
