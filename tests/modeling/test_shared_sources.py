"""Tests of the decoder: several targets of a source attend to one row of its encoder output."""

import pytest
import torch
from tiny_models import DESIGNS, padding_mask, random_batch, tiny_model

CLOSE = {"atol": 1e-4, "rtol": 1e-4}
COPIES = 3


def shared_and_repeated(model, target=4):
    """Arguments with each source once, and with each as often as it has targets."""
    batch = random_batch(model.config, source=7, padding="left")
    mask = batch["attention_mask"]
    generator = torch.Generator().manual_seed(1)
    rows = COPIES * mask.shape[0]
    targets = torch.randint(3, model.config.decoder_vocab_size, (rows, target), generator=generator)
    given = {
        "decoder_input_ids": targets,
        "decoder_attention_mask": padding_mask([target - row % 2 for row in range(rows)], target, "right"),
    }
    with torch.no_grad():
        encoder_output = model.get_encoder()(batch["input_ids"], mask).last_hidden_state
    repeated = [tensor.repeat_interleave(COPIES, dim=0) for tensor in (encoder_output, mask)]
    return tuple(
        {"encoder_outputs": (encoder_output,), "attention_mask": mask} | given
        for encoder_output, mask in ((encoder_output, mask), repeated)
    )


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("design", DESIGNS)
def test_shared_and_repeated_sources_give_the_same(design, kernel):
    model = tiny_model(**DESIGNS[design] | {"attn_implementation": kernel, "num_key_value_heads": 2})
    shared, repeated = shared_and_repeated(model)
    outputs, expected = (model(**given, output_attentions=kernel == "eager") for given in (shared, repeated))
    torch.testing.assert_close(outputs.logits, expected.logits, **CLOSE)
    if kernel == "eager":
        torch.testing.assert_close(outputs.cross_attentions, expected.cross_attentions, **CLOSE)
    gradients = [
        torch.autograd.grad(result.logits.square().mean(), model.parameters(), allow_unused=True)
        for result in (outputs, expected)
    ]
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours is None) is (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, **CLOSE)


def test_targets_must_be_a_multiple_of_the_sources():
    model = tiny_model()
    shared, _ = shared_and_repeated(model)
    for name in ("decoder_input_ids", "decoder_attention_mask"):
        shared[name] = shared[name][:-1]
    with pytest.raises(ValueError, match="as many as sources, or a multiple of them, got 8 and 3"):
        model(**shared)
