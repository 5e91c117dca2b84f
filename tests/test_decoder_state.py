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
def test_rows_go_on_from_others_and_sources_leave(design):
    """Hypotheses are spread, change places and leave: each is at the end as if it had been alone from the start."""
    model, memory, mask, _ = setting(**DESIGNS[design])
    generator = torch.Generator().manual_seed(3)
    state = make_state(model, memory, mask)

    def draw(rows):
        return torch.randint(3, model.config.decoder_vocab_size, (rows,), generator=generator)

    paths, sources = draw(3)[:, None], torch.arange(3)
    step_through(state, paths)
    state.spread(4)
    paths, sources = paths.repeat_interleave(4, dim=0), sources.repeat_interleave(4)
    moves = [[0, 1, 2, 3], [3, 3, 0, 1], [1, 1, 2, 3], [2, 2, 2, 2]]
    for turn, move in enumerate(moves):
        paths = torch.cat((paths, draw(len(paths))[:, None]), dim=1)
        outputs = step_through(state, paths[:, -1:])[:, 0]
        expected = whole(model, memory[sources], mask[sources], paths)[:, -1]
        assert_near(outputs, expected)
        if turn == 1:
            kept = torch.tensor([0, 2])
            state.keep(kept)
            is_kept = torch.isin(sources, kept)
            paths, sources = paths[is_kept], sources[is_kept]
        rows = (torch.arange(len(paths)).view(-1, 4)[:, move]).flatten()
        state.reorder(rows)
        paths = paths[rows]
    assert (state.rows, state.copies, state.length) == (8, 4, 5)


def test_what_is_unchanged_is_so_among_rows_that_were_chosen_before():
    model, memory, mask, _ = setting(**DESIGNS["learned"])
    paths = torch.randint(3, model.config.decoder_vocab_size, (3, 5), generator=torch.Generator().manual_seed(4))
    state = make_state(model, memory, mask)
    step_through(state, paths[:, :4])
    # All go on from the first one, and then, alike as they are, from one another.
    state.reorder(torch.tensor([0, 0, 0]))
    state.reorder(torch.tensor([1, 2, 0]), unchanged=4)
    outputs = step_through(state, paths[:, 4:])
    assert_near(
        outputs[:, 0], whole(model, memory, mask, torch.cat((paths[[0, 0, 0], :4], paths[:, 4:]), dim=1))[:, -1]
    )


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
