"""Tests of `metaphrase.decoding.prepacked_weights`: outputs are those with padding, which is not computed."""

import pytest
import torch
from tiny_models import DESIGNS, padding_mask, tiny_model

from metaphrase.decoding import prepacked_weights as module
from metaphrase.modeling.stacks import MetaphraseEncoder

LENGTHS = [9, 4, 1, 6]


@pytest.fixture(autouse=True)
def skips_in_tiny_models(monkeypatch):
    monkeypatch.setattr(module, "LEAST_HIDDEN_SIZE", 0)


@pytest.fixture
def skipped(monkeypatch):
    """The lengths of the sources that were encoded without their padding."""
    calls, original = [], MetaphraseEncoder.encode_packed

    def recorded(self, embeddings, segments, **kwargs):
        calls.append(segments.lengths.tolist())
        return original(self, embeddings, segments, **kwargs)

    monkeypatch.setattr(MetaphraseEncoder, "encode_packed", recorded)
    return calls


def make_batch(config, side="right"):
    ids = torch.randint(3, config.vocab_size, (len(LENGTHS), 11), generator=torch.Generator().manual_seed(0))
    mask = padding_mask(LENGTHS, 11, side)
    return ids.masked_fill(mask == 0, config.pad_token_id), mask


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", list(DESIGNS))
def test_output_is_that_of_padded_rows(name, side, skipped):
    encoder = tiny_model(**DESIGNS[name]).get_encoder()
    ids, mask = make_batch(encoder.config, side)
    with torch.no_grad():
        output = encoder(ids, mask).last_hidden_state
    assert skipped == [LENGTHS]
    # With gradients it computes the padding too.
    expected = encoder(ids, mask).last_hidden_state
    assert skipped == [LENGTHS]
    torch.testing.assert_close(output[mask == 1], expected[mask == 1], rtol=1e-4, atol=5e-5)
    assert (output[mask == 0] == 0).all()


OBSTACLES = {
    "hole": lambda encoder, mask: mask[0, 4].zero_(),
    "empty row": lambda encoder, mask: mask[2].zero_(),
    "little padding": lambda encoder, mask: mask.fill_(1)[0, -1].zero_(),
    "training": lambda encoder, mask: encoder.train(),
    "another kernel": lambda encoder, mask: encoder.set_attn_implementation("eager"),
    "hook": lambda encoder, mask: encoder.layers[1].mlp.register_forward_hook(lambda *_: None),
    "small model": lambda encoder, mask: setattr(module, "LEAST_HIDDEN_SIZE", 256),
}


@pytest.mark.parametrize("obstacle", OBSTACLES.values(), ids=OBSTACLES)
@torch.no_grad()
def test_padding_is_computed(obstacle, skipped):
    encoder = tiny_model().get_encoder()
    ids, mask = make_batch(encoder.config)
    obstacle(encoder, mask)
    assert encoder(ids, mask).last_hidden_state.shape == (*ids.shape, encoder.config.hidden_size)
    assert skipped == []


@torch.no_grad()
def test_padding_is_computed_where_positions_are_given_or_outputs_recorded(skipped):
    encoder = tiny_model().get_encoder()
    ids, mask = make_batch(encoder.config)
    encoder(ids, mask, position_ids=torch.arange(ids.shape[1])[None])
    recorded = encoder(ids, mask, output_hidden_states=True).hidden_states
    assert [states.shape for states in recorded] == [(*ids.shape, encoder.config.hidden_size)] * 3
    assert skipped == []
