"""Tests of `metaphrase.modeling.stacks` and of what both stacks do: dropout, norms, masks, and positions."""

import pytest
import torch
from tiny_models import DESIGNS, POSITIONS, padding_mask, random_batch, run_model, tiny_model

from metaphrase.modeling import MetaphraseModel


def first_layer_input(stack, run):
    """Return the input of a stack's first layer during `run()`."""
    inputs = []
    handle = stack.layers[0].register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    run()
    handle.remove()
    return inputs[0]


@torch.no_grad()
@pytest.mark.parametrize("name", ["encoder", "decoder"])
@pytest.mark.parametrize("embedding_norm", [False, True])
def test_dropout_falls_on_the_embeddings(name, embedding_norm):
    model = tiny_model(
        MetaphraseModel, dropout=0.25, position_embedding_type="sinusoidal", embedding_norm=embedding_norm
    )
    stack = getattr(model, name)
    exact = first_layer_input(stack, lambda: run_model(model))
    model.train()
    entered = first_layer_input(stack, lambda: run_model(model))
    dropped = entered == 0
    assert 0.15 < dropped.float().mean() < 0.35
    torch.testing.assert_close(entered[~dropped], exact[~dropped] / 0.75)


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


def test_stacks_refuse_missing_inputs():
    model = tiny_model(MetaphraseModel)
    ids, embeds, encoder_output = torch.tensor([[3, 4]]), torch.randn(1, 2, 32), torch.randn(1, 3, 32)
    for stack, extra in ((model.encoder, {}), (model.decoder, {"encoder_hidden_states": encoder_output})):
        for inputs in ({"input_ids": ids, "inputs_embeds": embeds}, {}):
            with pytest.raises(ValueError, match="`input_ids` and `inputs_embeds`"):
                stack(**inputs, **extra)


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


@torch.no_grad()
@pytest.mark.parametrize("kind", ["relative", "alibi"])
@pytest.mark.parametrize("name", ["encoder", "decoder"])
def test_biases_are_added_to_the_scores_of_self_attention(kind, name):
    # A model with positions, and one without that has the same weights.
    model = tiny_model(MetaphraseModel, attn_implementation="eager", **POSITIONS[kind])
    plain = tiny_model(MetaphraseModel, attn_implementation="eager", position_embedding_type="none")
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if name in plain.state_dict()})
    stack, length = getattr(model, name), {"encoder": 7, "decoder": 5}[name]
    distance = torch.arange(length)[None, :] - torch.arange(length)[:, None]
    if kind == "alibi":
        bias = -distance.abs() * torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256])[:, None, None]
    else:
        bias = stack.position_bias.embedding.weight[stack.position_bias.bucket(distance)].permute(2, 0, 1)
    ids, inputs = torch.randint(3, 37, (3, length)), {}
    if name == "decoder":
        bias, inputs = bias.masked_fill(distance > 0, -1e9), {"encoder_hidden_states": torch.randn(3, 7, 32)}
    actual = stack(ids, **inputs).last_hidden_state
    expected = getattr(plain, name)(ids, attention_mask=bias[None], **inputs).last_hidden_state
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["source", "target"])
def test_learned_positions_refuse_what_is_longer(name):
    model = tiny_model(position_embedding_type="learned", max_position_embeddings=6)
    lengths = {"source": 6, "target": 6}
    model(**random_batch(model.config, padding=None, **lengths))
    with pytest.raises(ValueError, match=r"`max_position_embeddings`.*got 7 tokens and 6 positions"):
        model(**random_batch(model.config, padding=None, **(lengths | {name: 7})))


# Several targets of a source

CLOSE = {"atol": 1e-4, "rtol": 1e-4}
COPIES = 3


def shared_and_repeated(model, target=4):
    """Arguments with each source once, and with each as often as it has targets."""
    batch = random_batch(model.config, source=7, padding="left")
    mask = batch["attention_mask"]
    generator = torch.Generator().manual_seed(1)
    rows = COPIES * mask.shape[0]
    targets = torch.randint(3, model.config.decoder_vocab_size, (rows, target), generator=generator)
    given = {
        "decoder_input_ids": targets,
        "decoder_attention_mask": padding_mask([target - row % 2 for row in range(rows)], target, "right"),
    }
    with torch.no_grad():
        encoder_output = model.get_encoder()(batch["input_ids"], mask).last_hidden_state
    repeated = [tensor.repeat_interleave(COPIES, dim=0) for tensor in (encoder_output, mask)]
    return tuple(
        {"encoder_outputs": (encoder_output,), "attention_mask": mask} | given
        for encoder_output, mask in ((encoder_output, mask), repeated)
    )


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("design", DESIGNS)
def test_shared_and_repeated_sources_give_the_same(design, kernel):
    if (design, kernel) == ("soft_caps", "sdpa"):
        kernel = None
    model = tiny_model(**DESIGNS[design] | {"attn_implementation": kernel, "num_key_value_heads": 2})
    shared, repeated = shared_and_repeated(model)
    outputs, expected = (model(**given, output_attentions=kernel == "eager") for given in (shared, repeated))
    torch.testing.assert_close(outputs.logits, expected.logits, **CLOSE)
    if kernel == "eager":
        torch.testing.assert_close(outputs.cross_attentions, expected.cross_attentions, **CLOSE)
    gradients = [
        torch.autograd.grad(result.logits.square().mean(), model.get_decoder().layers.parameters())
        for result in (outputs, expected)
    ]
    torch.testing.assert_close(*gradients, **CLOSE)
