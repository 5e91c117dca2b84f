"""Positions in each stack: where they enter, how far they reach, and which options reach them."""

import pytest
import torch
from tiny_models import POSITIONS, random_batch, run_model, tiny_config, tiny_model
from transformers.models.t5.modeling_t5 import T5Attention

from metaphrase.modeling import MetaphraseEncoderModel, MetaphraseModel
from metaphrase.modeling.positions import sinusoidal_table


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
    embeddings = {}
    for stack, ids, field in (
        (model.encoder, inputs["input_ids"], "inputs_embeds"),
        (model.decoder, inputs["decoder_input_ids"], "decoder_inputs_embeds"),
    ):
        length = ids.shape[1]
        if kind == "learned":
            table = stack.embed_positions.weight[2 : length + 2]
        else:
            table = sinusoidal_table(length, 32, model.config.sinusoidal_layout)
        embeddings[field] = stack.embed_tokens(ids) + table
    expected = plain(**embeddings).last_hidden_state
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
        encoder_output = torch.randn(3, 7, 32)
        ids = inputs["decoder_input_ids"]
        outputs = [
            model.decoder(ids, encoder_hidden_states=encoder_output),
            plain.decoder(ids, encoder_hidden_states=encoder_output, attention_mask=masks["decoder_attention_mask"]),
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
    """Check `relative_attention_shared`."""
    shared = tiny_model(MetaphraseModel, **POSITIONS["relative"])
    single = tiny_model(MetaphraseModel, **POSITIONS["relative_per_layer"])
    names = [name for name in shared.state_dict() if "bias.embedding" in name]
    assert names == ["encoder.position_bias.embedding.weight", "decoder.position_bias.embedding.weight"]
    single_names = [name for name in single.state_dict() if "bias.embedding" in name]
    assert single_names == [
        f"{stack}.layers.{layer}.self_attn.relative_position_bias.embedding.weight"
        for stack in ("encoder", "decoder")
        for layer in (0, 1)
    ]
    # With the shared bias in each layer the two are one; each layer reads its own.
    state = {name: value for name, value in shared.state_dict().items() if name not in names}
    for name in single_names:
        state[name] = shared.state_dict()[f"{name.split('.')[0]}.position_bias.embedding.weight"]
    single.load_state_dict(state)
    expected = run_model(shared).last_hidden_state
    torch.testing.assert_close(run_model(single).last_hidden_state, expected, atol=1e-5, rtol=1e-5)
    for name in single_names:
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
