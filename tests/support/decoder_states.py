import torch
from tiny_models import random_batch, tiny_model

LENGTH = 19  # more than the state has room for at first


def setting(padding="left", **fields):
    """Return a model, its encoder output of three sources, their mask and targets."""
    model = tiny_model(**fields)
    batch = random_batch(model.config, target=LENGTH, padding=padding)
    with torch.inference_mode():
        encoder_output = model.get_encoder()(batch["input_ids"], batch["attention_mask"]).last_hidden_state
    return model, encoder_output, batch["attention_mask"], batch["decoder_input_ids"]


def make_state(state_class, model, encoder_output, mask):
    with torch.inference_mode():
        return state_class(model.get_decoder(), encoder_output, mask)


def whole(model, encoder_output, mask, targets):
    with torch.inference_mode():
        return model.get_decoder()(
            targets, encoder_hidden_states=encoder_output, encoder_attention_mask=mask, use_cache=False
        ).last_hidden_state


def assert_near(outputs, expected):
    """Within 1e-4 of the largest value: without a norm at its end a stack's output is large."""
    assert outputs.shape == expected.shape
    assert (outputs - expected).abs().max() <= 1e-4 * expected.abs().max()


def step_through(state, targets):
    with torch.inference_mode():
        return torch.stack([state.step(tokens) for tokens in targets.unbind(1)], dim=1)


def fill_new_tensors_with_nan(monkeypatch):
    """Memory that is not written yet may hold anything."""

    def new_empty(self, *shape):
        return self.new_full(shape[0] if len(shape) == 1 else shape, torch.nan)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
