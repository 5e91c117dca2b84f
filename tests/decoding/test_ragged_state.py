"""Tests of `decoding.ragged_state`: rows of different lengths equal rows decoded alone."""

import pytest
import torch
from decoder_states import setting
from tiny_models import CROSSED, DESIGNS, random_batch

from metaphrase.decoding.decoder_state import DecoderState
from metaphrase.decoding.ragged_state import RaggedDecoderState


def assert_is_alone(outputs, model, memory, mask, paths):
    """The outputs for the last tokens of each path, `(rows, width, hidden)`, are those of a pass over this path alone."""
    decoder, width = model.get_decoder(), outputs.shape[1]
    for row, path in enumerate(paths):
        with torch.inference_mode():
            expected = decoder(
                torch.tensor([path]),
                encoder_hidden_states=memory[row : row + 1],
                encoder_attention_mask=mask[row : row + 1],
                use_cache=False,
            ).last_hidden_state[0, -width:]
        # Without a norm at its end a stack's output is large.
        assert (outputs[row] - expected).abs().max() <= 1e-4 * expected.abs().max()


def walk(state, model, memory, mask, copies=1, turns=6, seed=0):
    """Rows read blocks of random tokens and take some of them back; once some leave.

    What comes out of each block is compared. Returns the tokens of each row that is left.
    """
    draws = torch.Generator().manual_seed(seed)

    def draw(high, *shape, low=0):
        return torch.randint(low, high, shape, generator=draws)

    state.spread(copies)
    memory, mask = memory.repeat_interleave(copies, dim=0), mask.repeat_interleave(copies, dim=0)
    paths = [[] for _ in range(len(memory))]
    for turn in range(turns):
        tokens = draw(model.config.decoder_vocab_size, len(paths), int(draw(6, 1, low=1)), low=3)
        outputs = state.read(tokens)
        paths = [path + row for path, row in zip(paths, tokens.tolist(), strict=True)]
        assert state.lengths.tolist() == [len(path) for path in paths] and state.length == max(map(len, paths))
        assert_is_alone(outputs, model, memory, mask, paths)
        lengths = torch.tensor([len(path) - int(draw(min(len(path), 4), 1)) for path in paths])
        state.go_back(lengths)
        paths = [path[:length] for path, length in zip(paths, lengths.tolist(), strict=True)]
        if turn == 3:
            state.select_sources(torch.tensor([0, 2]))
            kept = [row for row in range(len(paths)) if row // copies != 1]
            paths, memory, mask = [paths[row] for row in kept], memory[kept], mask[kept]
    return paths


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("design", DESIGNS)
def test_rows_are_as_if_alone(design, copies):
    model, memory, mask, _ = setting(**DESIGNS[design])
    with torch.inference_mode():
        paths = walk(RaggedDecoderState(model.get_decoder(), memory, mask), model, memory, mask, copies)
    # They came to differ, and are longer than the state has room for at first.
    assert len({len(path) for path in paths}) > 1


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("design", ["relative_per_layer-rmsnorm-pre", "rotary-layernorm-post", "none-rmsnorm-pre"])
def test_groups_of_heads(design, groups):
    model, memory, mask, _ = setting("right", **CROSSED[design], num_key_value_heads=4 // groups)
    with torch.inference_mode():
        paths = walk(RaggedDecoderState(model.get_decoder(), memory, mask), model, memory, mask, turns=8, seed=1)
    assert len({len(path) for path in paths}) > 1


@pytest.mark.parametrize("design", ["sinusoidal", "alibi", "rotary"])
def test_what_lies_behind_the_ends_need_not_be_numbers(design, monkeypatch):
    """Memory that nobody has written may hold anything."""
    model, memory, mask, _ = setting(**DESIGNS[design])
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda self, *shape: self.new_full(shape[0] if len(shape) == 1 else shape, torch.nan)
    )
    with torch.inference_mode():
        paths = walk(RaggedDecoderState(model.get_decoder(), memory, mask), model, memory, mask, turns=10, seed=2)
    assert len({len(path) for path in paths}) > 1


@pytest.mark.parametrize("design", DESIGNS)
def test_bfloat16_is_as_close_as_single_steps(design):
    model, memory, mask, _ = setting(**DESIGNS[design])
    tokens = random_batch(model.config, target=7)["decoder_input_ids"]
    with torch.inference_mode():
        exact = RaggedDecoderState(model.get_decoder(), memory, mask).read(tokens)
        decoder = model.to(torch.bfloat16).get_decoder()
        ragged, plain = (kind(decoder, memory.bfloat16(), mask) for kind in (RaggedDecoderState, DecoderState))
        block = ragged.read(tokens)
        steps = torch.stack([plain.step(column) for column in tokens.unbind(1)], dim=1)
    assert block.dtype == torch.bfloat16
    assert (block - exact).abs().mean() < 1.5 * (steps - exact).abs().mean() + 1e-3
