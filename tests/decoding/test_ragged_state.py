"""Tests of `RaggedDecoderState`: rows of different lengths equal rows decoded alone."""

import pytest
import torch
from decoder_states import assert_near, fill_new_tensors_with_nan, make_state, setting, step_through, whole
from tiny_models import CROSSED, DESIGNS

from metaphrase.decoding.decoder_state import DecoderState
from metaphrase.decoding.searches.speculative_decoding import RaggedDecoderState


@torch.inference_mode()
def assert_rows_equal_rows_alone(model, encoder_output, mask, copies=1, turns=6, seed=0):
    """Let rows read blocks of random tokens and forget some of them. The second source leaves after four blocks.

    The output of each block is compared with forward passes over each row alone.
    """
    draws = torch.Generator().manual_seed(seed)

    def draw(high, *shape, low=0):
        return torch.randint(low, high, shape, generator=draws)

    state = make_state(RaggedDecoderState, model, encoder_output, mask)
    state.spread(copies)
    paths, sources = [[] for _ in range(3 * copies)], [source for source in range(3) for _ in range(copies)]
    for turn in range(turns):
        tokens = draw(model.config.decoder_vocab_size, len(paths), int(draw(6, 1, low=1)), low=3)
        outputs = state.read(tokens)
        paths = [path + row for path, row in zip(paths, tokens.tolist(), strict=True)]
        assert state.lengths.tolist() == [len(path) for path in paths] and state.length == max(map(len, paths))
        for row, (path, source) in enumerate(zip(paths, sources, strict=True)):
            alone = whole(model, encoder_output[source, None], mask[source, None], torch.tensor([path]))
            assert_near(outputs[row], alone[0, -tokens.shape[1] :])
        lengths = torch.tensor([len(path) - int(draw(min(len(path), 4), 1)) for path in paths])
        state.go_back(lengths)
        paths = [path[:length] for path, length in zip(paths, lengths.tolist(), strict=True)]
        if turn == 3:
            state.select_sources(torch.tensor([0, 2]))
            paths = [path for path, source in zip(paths, sources, strict=True) if source != 1]
            sources = [source for source in sources if source != 1]
    assert len({len(path) for path in paths}) > 1


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("design", DESIGNS)
def test_rows_are_as_if_alone(design, copies):
    assert_rows_equal_rows_alone(*setting(**DESIGNS[design])[:3], copies)


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("design", ["relative_per_layer-rmsnorm-pre", "rotary-layernorm-post", "none-rmsnorm-pre"])
def test_groups_of_heads(design, groups):
    assert_rows_equal_rows_alone(
        *setting("right", **CROSSED[design], num_key_value_heads=4 // groups)[:3], turns=8, seed=1
    )


@pytest.mark.parametrize("design", ["sinusoidal", "alibi", "rotary"])
def test_unwritten_entries_may_be_nan(design, monkeypatch):
    model, encoder_output, mask, _ = setting(**DESIGNS[design])
    fill_new_tensors_with_nan(monkeypatch)
    assert_rows_equal_rows_alone(model, encoder_output, mask, turns=10, seed=2)


@pytest.mark.parametrize("design", DESIGNS)
def test_bfloat16_is_as_close_as_single_steps(design):
    model, encoder_output, mask, targets = setting(**DESIGNS[design])
    tokens, half = targets[:, :7], encoder_output.bfloat16()
    with torch.inference_mode():
        exact = make_state(RaggedDecoderState, model, encoder_output, mask).read(tokens)
        block = make_state(RaggedDecoderState, model.to(torch.bfloat16), half, mask).read(tokens)
    steps = step_through(make_state(DecoderState, model, half, mask), tokens)
    assert block.dtype == torch.bfloat16
    assert (block - exact).abs().mean() < 1.5 * (steps - exact).abs().mean() + 1e-3
