"""Tests of `DecoderState` and `BeamState`: steps over a state are the decoder's forward pass over each target alone."""

import itertools

import pytest
import torch
from decoder_states import assert_near, fill_new_tensors_with_nan, make_state, setting, step_through, whole
from tiny_models import CROSSED, DESIGNS

from metaphrase.decoding.beam_search import BeamState
from metaphrase.decoding.decoder_state import DecoderState


@pytest.mark.parametrize("kind", [DecoderState, BeamState])
@pytest.mark.parametrize(
    ("padding", "fields"), [("left", {"attention_bias": False}), (None, {"num_key_value_heads": 1})], ids=str
)
@pytest.mark.parametrize("design", DESIGNS)
def test_projections_are_absorbed_into_a_single_source(design, padding, fields, kind):
    model, *batch = setting(padding, **DESIGNS[design] | fields)
    # The second source has padding, if any has.
    encoder_output, mask, targets = (part[1:2] for part in batch)
    state = make_state(kind, model, encoder_output, mask)
    config = model.config
    assert (state._absorbed is None) == (config.qk_norm or config.norm_position == "both")
    expected = whole(model, encoder_output, mask, targets)
    assert_near(step_through(state, targets), expected)
    # Without absorbed projections, the output differs by rounding only.
    state = make_state(kind, model, encoder_output, mask)
    state._absorbed = None
    assert_near(step_through(state, targets), expected)


@pytest.mark.parametrize("design", DESIGNS)
def test_bfloat16_has_the_error_of_the_forward_pass(design):
    model, encoder_output, mask, targets = setting(**DESIGNS[design])
    exact = whole(model, encoder_output, mask, targets)
    half = model.to(torch.bfloat16), encoder_output.bfloat16(), mask, targets
    outputs = step_through(make_state(DecoderState, *half[:3]), targets)
    assert outputs.dtype == torch.bfloat16
    error = (outputs - exact).abs().mean()
    assert error < 1.5 * (whole(*half) - exact).abs().mean() + 1e-3


# Targets that continue one another

COPIES = 4
# The target of its source that each target continues: itself, mostly others, one for all.
MOVES = [[0, 1, 2, 3], [3, 3, 0, 1], [1, 1, 2, 3], [2, 2, 2, 2]]


def walk(setup, turns, leaving=None):
    """Extend and reorder targets at random, and compare each step with a forward pass over each target alone.

    The second source leaves after step `leaving`. Return the state, and how many tokens it kept of each source at each step.
    """
    model, encoder_output, mask = setup
    generator = torch.Generator().manual_seed(3)

    def draw(high, *shape, low=0):
        return torch.randint(low, high, shape, generator=generator)

    with torch.inference_mode():
        state = make_state(BeamState, model, encoder_output, mask)
        paths, sources, kept = draw(model.config.decoder_vocab_size, 3, 2, low=3), torch.arange(3), []
        step_through(state, paths)
        state.expand_beams(COPIES)
        paths, sources = paths.repeat_interleave(COPIES, dim=0), sources.repeat_interleave(COPIES)
        for turn in range(turns):
            tokens = draw(model.config.decoder_vocab_size, len(paths), 1, low=3)
            paths = torch.cat((paths, tokens), dim=1)
            outputs = state.step(tokens[:, 0])
            kept.append(state._token_positions.shape[1])
            assert_near(outputs, whole(model, encoder_output[sources], mask[sources], paths)[:, -1])
            if turn == leaving:
                state.select_sources(torch.tensor([0, 2]))
                paths, sources = paths[sources != 1], sources[sources != 1]
            # Each source moves in its own way.
            moves = torch.tensor(MOVES)[draw(len(MOVES), len(paths) // COPIES)]
            rows = (moves + COPIES * torch.arange(len(moves))[:, None]).flatten()
            state.reorder(rows)
            paths = paths[rows]
    assert (state.copies, state.length) == (COPIES, 2 + turns)
    return state, kept


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("design", CROSSED)
def test_targets_are_as_if_alone(design, groups):
    state, kept = walk(setting(**CROSSED[design], num_key_value_heads=4 // groups)[:3], turns=6, leaving=3)
    # The prompt is stored once.
    assert len(state._token_positions) == 2 and state.groups == groups and kept[0] == 2 + COPIES


@pytest.mark.parametrize("design", DESIGNS)
def test_unused_tokens_are_dropped(design):
    """More steps than there is room for at first, and than tokens are left alone."""
    state, kept = walk(setting("right", **DESIGNS[design])[:3], turns=30)
    # Each step adds a token for each target. A token that few targets hold is soon held by none.
    assert max(kept) < 2 * state.length and state._target_cache.keys.shape[4] < 4 * state.length
    assert any(later < earlier for earlier, later in itertools.pairwise(kept))


def test_unwritten_entries_may_be_nan(monkeypatch):
    setup = setting(**DESIGNS["relative"])[:3]
    fill_new_tensors_with_nan(monkeypatch)
    state, _ = walk(setup, turns=20, leaving=9)
    assert state._target_cache.keys[..., state._token_positions.shape[1] :].isnan().any()
