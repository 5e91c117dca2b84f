"""Tests of `metaphrase.modeling.decoder_state`: steps over a state are the decoder's forward pass."""

import pytest
import torch
from tiny_models import CROSSED, DESIGNS, random_batch, tiny_model

from metaphrase.modeling.decoder_state import DecoderState

LENGTH = 19  # more than the state has room for at first


def setting(padding="left", **fields):
    """A model, its memory of three sources, their mask and targets."""
    model = tiny_model(**fields)
    batch = random_batch(model.config, target=LENGTH, padding=padding)
    with torch.inference_mode():
        memory = model.get_encoder()(batch["input_ids"], batch["attention_mask"]).last_hidden_state
    return model, memory, batch["attention_mask"], batch["decoder_input_ids"]


def whole(model, memory, mask, targets):
    """What the forward pass makes of all tokens at once."""
    with torch.inference_mode():
        return model.get_decoder()(
            targets, encoder_hidden_states=memory, encoder_attention_mask=mask, use_cache=False
        ).last_hidden_state


def assert_near(outputs, expected):
    """Within 1e-4 of the largest value: without a norm at its end a stack's output is large."""
    assert outputs.shape == expected.shape
    assert (outputs - expected).abs().max() <= 1e-4 * expected.abs().max()


def make_state(model, memory, mask):
    with torch.inference_mode():
        return DecoderState(model.get_decoder(), memory, mask)


def step_through(state, targets):
    with torch.inference_mode():
        return torch.stack([state.step(tokens) for tokens in targets.unbind(1)], dim=1)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("design", CROSSED)
def test_steps_are_one_pass(design, groups):
    setup = setting(**CROSSED[design], num_key_value_heads=4 // groups)
    model, memory, mask, targets = setup
    outputs = step_through(make_state(model, memory, mask), targets)
    assert_near(outputs, whole(*setup))


@pytest.mark.parametrize("padding", ["left", "right", None])
@pytest.mark.parametrize("design", DESIGNS)
def test_padding_of_the_source_is_not_seen(design, padding):
    setup = setting(padding, **DESIGNS[design])
    model, memory, mask, targets = setup
    outputs = step_through(make_state(model, memory, mask), targets)
    assert_near(outputs, whole(*setup))


@pytest.mark.parametrize("design", DESIGNS)
def test_bfloat16_is_as_close_as_it_is_precise(design):
    model, memory, mask, targets = setting(**DESIGNS[design])
    exact = whole(model, memory, mask, targets)
    half = model.to(torch.bfloat16), memory.bfloat16(), mask, targets
    outputs = step_through(make_state(*half[:3]), targets)
    assert outputs.dtype == torch.bfloat16
    error = (outputs - exact).abs().mean()
    assert error < 1.5 * (whole(*half) - exact).abs().mean() + 1e-3


@pytest.mark.parametrize("design", DESIGNS)
def test_targets_of_a_source_go_their_own_ways_and_sources_leave(design):
    model, memory, mask, _ = setting(**DESIGNS[design])
    generator = torch.Generator().manual_seed(5)
    state = make_state(model, memory, mask)

    def draw(rows, tokens):
        return torch.randint(3, model.config.decoder_vocab_size, (rows, tokens), generator=generator)

    paths, sources = draw(3, 2), torch.arange(3)
    step_through(state, paths)
    state.spread(4)
    paths, sources = torch.cat((paths.repeat_interleave(4, dim=0), draw(12, 3)), dim=1), sources.repeat_interleave(4)
    outputs = step_through(state, paths[:, 2:])
    assert_near(outputs, whole(model, memory[sources], mask[sources], paths)[:, 2:])
    state.keep(torch.tensor([0, 2]))
    is_kept = sources != 1
    paths, sources = torch.cat((paths[is_kept], draw(8, 2)), dim=1), sources[is_kept]
    outputs = step_through(state, paths[:, 5:])
    assert_near(outputs, whole(model, memory[sources], mask[sources], paths)[:, 5:])
    assert (state.rows, state.copies, state.length) == (8, 4, 7)


def test_what_does_not_change_is_made_once():
    model, memory, mask, targets = setting(position_embedding_type="relative")
    calls = []
    decoder = model.get_decoder()
    for layer in decoder.layers:
        layer.cross_attn.k_proj.register_forward_hook(lambda *_: calls.append("source"))
    decoder.position_bias.register_forward_hook(lambda *_: calls.append("bias"))
    step_through(make_state(model, memory, mask), targets)
    # Once more where the state grew.
    assert (calls.count("source"), calls.count("bias")) == (2, 2)
