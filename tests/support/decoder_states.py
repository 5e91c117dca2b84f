"""Helpers shared by several tests: decoder states."""

import torch
from tiny_models import random_batch, tiny_model

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


def step_through(state, targets):
    with torch.inference_mode():
        return torch.stack([state.step(tokens) for tokens in targets.unbind(1)], dim=1)
