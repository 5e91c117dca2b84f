"""Tests of `metaphrase.decoding.decoder_state`: steps over a state are the decoder's forward pass."""

import pytest
import torch
from decoder_states import assert_near, setting, step_through, whole
from tiny_models import CROSSED, DESIGNS, tiny_model

from metaphrase.decoding.beam_state import BeamState
from metaphrase.decoding.decoder_state import DecoderState
from metaphrase.decoding.ragged_state import RaggedDecoderState


def make_state(model, encoder_output, mask):
    with torch.inference_mode():
        return DecoderState(model.get_decoder(), encoder_output, mask)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("design", CROSSED)
def test_steps_are_one_pass(design, groups):
    setup = setting(**CROSSED[design], num_key_value_heads=4 // groups)
    model, encoder_output, mask, targets = setup
    outputs = step_through(make_state(model, encoder_output, mask), targets)
    assert_near(outputs, whole(*setup))


@pytest.mark.parametrize("kind", [DecoderState, BeamState, RaggedDecoderState])
@pytest.mark.parametrize("fields", [{"attention_bias": False}, {"num_key_value_heads": 1}], ids=str)
@pytest.mark.parametrize("padding", ["left", None])
@pytest.mark.parametrize("design", DESIGNS)
def test_projections_are_absorbed_into_a_single_source(design, padding, fields, kind):
    model, *batch = setting(padding, **DESIGNS[design] | fields)
    # The first of them has no padding.
    encoder_output, mask, targets = (part[1:2] for part in batch)
    with torch.inference_mode():
        state = kind(model.get_decoder(), encoder_output, mask)
    assert (state._absorbed is None) == model.config.qk_norm
    expected = whole(model, encoder_output, mask, targets)
    assert_near(step_through(state, targets), expected)
    # Without, it is the same but for rounding.
    with torch.inference_mode():
        state = kind(model.get_decoder(), encoder_output, mask)
    state._absorbed = None
    assert_near(step_through(state, targets), expected)


def test_absorbed_attention_reads_several_tokens():
    model, *batch = setting(**DESIGNS["sinusoidal"])
    encoder_output, mask, targets = (part[:1] for part in batch)
    with torch.inference_mode():
        state = RaggedDecoderState(model.get_decoder(), encoder_output, mask)
        assert state._absorbed is not None
        outputs = torch.cat([state.read(part) for part in targets.split(5, dim=1)], dim=1)
    assert_near(outputs, whole(model, encoder_output, mask, targets))


def test_projections_are_absorbed_for_short_sources_and_few_targets():
    model = tiny_model(**DESIGNS["sinusoidal"], hidden_size=512, encoder_attention_heads=8, decoder_attention_heads=8)
    for length, copies, is_absorbed in ((32, 1, True), (32, 50, True), (33, 1, False)):
        state = make_state(model, torch.randn(1, length, 512), None)
        with torch.inference_mode():
            state.spread(copies)
        assert (state._absorbed is not None) == is_absorbed
    model = tiny_model(**DESIGNS["sinusoidal"])
    for copies, is_absorbed in ((8, True), (9, False)):
        for kind in (DecoderState, BeamState):
            with torch.inference_mode():
                state = kind(model.get_decoder(), torch.randn(1, 30, 32), None)
                state.spread(copies)
            assert (state._absorbed is not None) == is_absorbed
    assert make_state(model, torch.randn(2, 5, 32), None)._absorbed is None


@pytest.mark.parametrize("padding", ["right", None])
@pytest.mark.parametrize("design", DESIGNS)
def test_padding_is_hidden(design, padding):
    """`test_steps_are_one_pass` pads on the left."""
    setup = setting(padding, **DESIGNS[design])
    assert_near(step_through(make_state(*setup[:3]), setup[3]), whole(*setup))


@pytest.mark.parametrize("design", DESIGNS)
def test_bfloat16_has_the_error_of_the_forward_pass(design):
    model, encoder_output, mask, targets = setting(**DESIGNS[design])
    exact = whole(model, encoder_output, mask, targets)
    half = model.to(torch.bfloat16), encoder_output.bfloat16(), mask, targets
    outputs = step_through(make_state(*half[:3]), targets)
    assert outputs.dtype == torch.bfloat16
    error = (outputs - exact).abs().mean()
    assert error < 1.5 * (whole(*half) - exact).abs().mean() + 1e-3


@pytest.mark.parametrize("design", DESIGNS)
def test_targets_of_a_source_differ_and_sources_leave(design):
    model, encoder_output, mask, _ = setting(**DESIGNS[design])
    generator = torch.Generator().manual_seed(5)
    state = make_state(model, encoder_output, mask)

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


def test_sources_and_biases_are_computed_once(monkeypatch):
    model, encoder_output, mask, targets = setting(position_embedding_type="relative")
    calls, project = [], DecoderState._project_source
    monkeypatch.setattr(DecoderState, "_project_source", lambda *given: calls.append("source") or project(*given))
    decoder = model.get_decoder()
    decoder.position_bias.register_forward_hook(lambda *_: calls.append("bias"))
    step_through(make_state(model, encoder_output, mask), targets)
    # Once more where the state grew.
    assert (calls.count("source"), calls.count("bias")) == (2, 2)
