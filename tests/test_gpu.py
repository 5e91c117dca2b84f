"""Tests that need a GPU (`pytest -m gpu`): it gives what the CPU gives."""

import pytest
import torch
from packed_rows import gradients, packed
from tiny_generator import SOURCES, tiny_generator
from tiny_models import DESIGNS, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]


@pytest.mark.parametrize("design", DESIGNS)
def test_packed_rows_have_the_loss_and_the_gradients_of_the_cpu(design):
    model = tiny_model(**DESIGNS[design] | {"initializer_range": 0.2})
    batch = packed(model.config)
    expected, expected_gradients = gradients(model, batch)
    on_gpu = {name: value.to("cuda") if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    output, actual_gradients = gradients(model.to("cuda"), on_gpu)
    torch.testing.assert_close(output.loss.cpu(), expected.loss, rtol=1e-4, atol=1e-4)
    for name, gradient in expected_gradients.items():
        atol = 1e-4 * max(1, float(gradient.abs().max()))
        torch.testing.assert_close(actual_gradients[name].cpu(), gradient, rtol=1e-3, atol=atol, msg=name)


@pytest.mark.parametrize("num_beams", [1, 4])
def test_targets_are_those_of_the_cpu(num_beams):
    generator = tiny_generator()
    expected = generator.generate(SOURCES, num_beams=num_beams)
    generator.model.to("cuda")
    assert generator.generate(SOURCES, num_beams=num_beams) == expected
