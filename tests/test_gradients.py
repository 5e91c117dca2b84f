import pytest
import torch
from tiny_models import DESIGNS, random_batch, run_model, tiny_model


@pytest.mark.parametrize("design", DESIGNS)
def test_gradients_reach_hidden_states_and_attentions(design):
    model = tiny_model(**DESIGNS[design], attn_implementation="eager")
    outputs = model(**random_batch(model.config), output_attentions=True, output_hidden_states=True)
    kinds = ("encoder_hidden_states", "decoder_hidden_states", "encoder_attentions", "decoder_attentions")
    tensors = [tensor for kind in (*kinds, "cross_attentions") for tensor in outputs[kind]]
    for tensor in tensors:
        tensor.retain_grad()
    outputs.logits.square().sum().backward()
    for tensor in tensors:
        assert tensor.grad is not None and tensor.grad.isfinite().all() and tensor.grad.any()


@pytest.mark.parametrize("field", ["dropout", "attention_dropout", "activation_dropout"])
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_dropout_acts_only_in_training(field, kernel):
    fields = {"dropout": 0.0, field: 0.5}
    model, without = tiny_model(**fields, attn_implementation=kernel), tiny_model(attn_implementation=kernel)
    inputs = random_batch(model.config)
    assert torch.equal(run_model(model, **inputs).logits, run_model(without, **inputs).logits)
    model.train()
    first = run_model(model, **inputs)
    torch.manual_seed(1)
    second = run_model(model, **inputs)
    for one, other in ((first.logits, second.logits), (first[-1], second[-1])):
        assert (one - other).abs().max() > 0.1
    assert torch.equal(run_model(without.train(), **inputs).logits, run_model(without.eval(), **inputs).logits)


def loss_and_gradients(model, inputs):
    """Return loss and gradients, with the same dropout in every call."""
    model.zero_grad()
    torch.manual_seed(7)
    outputs = model(**inputs)
    loss = outputs.logits.square().mean() if outputs.loss is None else outputs.loss
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("is_reentrant", "with_labels"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("design", DESIGNS)
def test_gradient_checkpointing_changes_nothing(design, with_labels, is_reentrant):
    # A hook keeps windows from packed rows, in which dropout falls elsewhere.
    kernel = {"attn_implementation": "eager"} if design == "windows" else {}
    model = tiny_model(**(DESIGNS[design] | {"dropout": 0.1, "attention_dropout": 0.1}), **kernel).train()
    inputs = random_batch(model.config, with_labels=with_labels)
    loss, gradients = loss_and_gradients(model, inputs)

    runs = []
    for layer in (*model.get_encoder().layers, *model.get_decoder().layers):
        layer.mlp.register_forward_hook(lambda *_: runs.append(1))
    model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
    assert model.is_gradient_checkpointing
    checkpointed_loss, checkpointed = loss_and_gradients(model, inputs)
    depth = model.config.encoder_layers + model.config.decoder_layers
    assert len(runs) == 2 * depth
    torch.testing.assert_close(checkpointed_loss, loss)
    for name, gradient in gradients.items():
        torch.testing.assert_close(checkpointed[name], gradient, msg=lambda text, name=name: f"{name}: {text}")

    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing
    runs.clear()
    loss_and_gradients(model, inputs)
    assert len(runs) == depth


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_frozen_model_with_an_adapter_trains_under_checkpointing(is_reentrant):
    model = tiny_model().requires_grad_(False).train()
    adapters = [model.get_encoder().layers[0].mlp.up_proj, model.get_decoder().layers[0].self_attn.q_proj]
    for adapter in adapters:
        adapter.requires_grad_(True)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
    model(**random_batch(model.config, with_labels=True)).loss.backward()
    assert all(adapter.weight.grad.any() for adapter in adapters)


@pytest.mark.parametrize("design", DESIGNS)
def test_training_reaches_every_parameter_and_lowers_the_loss(design):
    model = tiny_model(**(DESIGNS[design] | {"initializer_range": None})).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    inputs = random_batch(model.config, with_labels=True)
    losses = []
    for _ in range(5):
        loss = model(**inputs).loss
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            # The bias of a key changes all scores of a query alike, so its gradient is nearly zero.
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name
            assert parameter.grad.any() or name.endswith("k_proj.bias"), name
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
