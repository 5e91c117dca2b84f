"""Tests of `metaphrase.decoding.decoder_state`: steps over a state are the decoder's forward pass."""

import pytest
import torch
from decoder_states import assert_near, make_state, setting, step_through, whole
from tiny_models import CROSSED, DESIGNS, tiny_model

from metaphrase.decoding.beam_search import BeamState
from metaphrase.decoding.decoder_state import DecoderState


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("design", CROSSED)
def test_steps_are_one_pass(design, groups):
    setup = setting(**CROSSED[design], num_key_value_heads=4 // groups)
    assert_near(step_through(make_state(DecoderState, *setup[:3]), setup[3]), whole(*setup))


@pytest.mark.parametrize("padding", ["right", None])
@pytest.mark.parametrize("design", DESIGNS)
def test_padding_is_hidden(design, padding):
    setup = setting(padding, **DESIGNS[design])
    assert_near(step_through(make_state(DecoderState, *setup[:3]), setup[3]), whole(*setup))


@pytest.mark.parametrize("kind", [DecoderState, BeamState])
@pytest.mark.parametrize("fields", [{"attention_bias": False}, {"num_key_value_heads": 1}], ids=str)
@pytest.mark.parametrize("padding", ["left", None])
@pytest.mark.parametrize("design", DESIGNS)
def test_projections_are_absorbed_into_a_single_source(design, padding, fields, kind):
    model, *batch = setting(padding, **DESIGNS[design] | fields)
    # The second source has padding, if any has.
    encoder_output, mask, targets = (part[1:2] for part in batch)
    state = make_state(kind, model, encoder_output, mask)
    assert (state._absorbed is None) == model.config.qk_norm
    expected = whole(model, encoder_output, mask, targets)
    assert_near(step_through(state, targets), expected)
    # Without absorbed projections, the output differs by rounding only.
    state = make_state(kind, model, encoder_output, mask)
    state._absorbed = None
    assert_near(step_through(state, targets), expected)


@pytest.mark.parametrize("kind", [DecoderState, BeamState])
def test_projections_are_absorbed_for_short_sources_and_few_targets(kind):
    wide = tiny_model(**DESIGNS["sinusoidal"], hidden_size=512, encoder_attention_heads=8, decoder_attention_heads=8)
    tiny = tiny_model(**DESIGNS["sinusoidal"])
    for model, length, copies, is_absorbed in (
        (wide, 32, 1, True),
        (wide, 32, 50, True),
        (wide, 33, 1, False),
        (tiny, 30, 8, True),
        (tiny, 30, 9, False),
    ):
        state = make_state(kind, model, torch.randn(1, length, model.config.hidden_size), None)
        with torch.inference_mode():
            state.spread(copies)
        assert (state._absorbed is not None) == is_absorbed
    assert make_state(kind, tiny, torch.randn(2, 5, 32), None)._absorbed is None


@pytest.mark.parametrize("design", DESIGNS)
def test_bfloat16_has_the_error_of_the_forward_pass(design):
    model, encoder_output, mask, targets = setting(**DESIGNS[design])
    exact = whole(model, encoder_output, mask, targets)
    half = model.to(torch.bfloat16), encoder_output.bfloat16(), mask, targets
    outputs = step_through(make_state(DecoderState, *half[:3]), targets)
    assert outputs.dtype == torch.bfloat16
    error = (outputs - exact).abs().mean()
    assert error < 1.5 * (whole(*half) - exact).abs().mean() + 1e-3


@pytest.mark.parametrize("design", DESIGNS)
def test_targets_of_a_source_differ_and_sources_leave(design):
    model, encoder_output, mask, _ = setting(**DESIGNS[design])
    generator = torch.Generator().manual_seed(5)
    state = make_state(DecoderState, model, encoder_output, mask)

    def draw(rows, tokens):
        return torch.randint(3, model.config.decoder_vocab_size, (rows, tokens), generator=generator)

    paths, sources = draw(3, 2), torch.arange(3)
    step_through(state, paths)
    state.spread(4)
    paths, sources = torch.cat((paths.repeat_interleave(4, dim=0), draw(12, 3)), dim=1), sources.repeat_interleave(4)
    outputs = step_through(state, paths[:, 2:])
    assert_near(outputs, whole(model, encoder_output[sources], mask[sources], paths)[:, 2:])
    state.select_sources(torch.tensor([0, 2]))
    is_kept = sources != 1
    paths, sources = torch.cat((paths[is_kept], draw(8, 2)), dim=1), sources[is_kept]
    outputs = step_through(state, paths[:, 5:])
    assert_near(outputs, whole(model, encoder_output[sources], mask[sources], paths)[:, 5:])
    assert (state.rows, state.copies, state.length) == (8, 4, 7)
