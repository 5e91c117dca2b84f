"""Tests of initialization: nothing stays as memory left it, and every weight has the size that it should."""

import pytest
import torch
from tiny_models import DESIGNS, tiny_config
from weights import assert_same_tensors, assert_std, every_tensor

from metaphrase.modeling import MetaphraseConfig, MetaphraseEncoderModel, MetaphraseForConditionalGeneration


@pytest.mark.parametrize("model_class", [MetaphraseForConditionalGeneration, MetaphraseEncoderModel])
@pytest.mark.parametrize("design", DESIGNS)
def test_missing_weights_are_initialized_under_the_seed(model_class, design):
    config = tiny_config(**DESIGNS[design])

    def load(seed):
        torch.manual_seed(seed)
        return model_class.from_pretrained(None, config=config, state_dict={})

    model, again, other = load(0), load(0), load(1)
    assert_same_tensors(again, model)
    usual_tensors = every_tensor(model_class(config))
    for name, tensor in every_tensor(model).items():
        assert tensor.isfinite().all(), name
        if name.endswith(("slopes", "inv_freq", "table")) or tensor.ndim == 1:
            assert torch.equal(tensor, usual_tensors[name]), name
        else:
            assert_std(tensor, config.initializer_range, name)
    tensors, others = every_tensor(model), every_tensor(other)
    assert not any(torch.equal(tensor, others[name]) for name, tensor in tensors.items() if "proj.weight" in name)


@pytest.mark.parametrize("design", DESIGNS)
def test_initialization_by_shape(design):
    config = tiny_config(**(DESIGNS[design] | {"initializer_range": None, "hidden_size": 64, "head_dim": 16}))
    model = MetaphraseForConditionalGeneration(config)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            std = (2 / (module.in_features + module.out_features)) ** 0.5
            if module is model.lm_head:
                std = module.in_features**-0.5 / config.logits_scale
            elif name.endswith("q_proj") and config.attention_scale is not None:
                std *= 16**-0.5 / config.attention_scale
            assert_std(module.weight, std, name)
            assert module.bias is None or not module.bias.any()
        elif isinstance(module, torch.nn.Embedding):
            std = (module.embedding_dim if name.endswith("embed_tokens") else 64) ** -0.5
            if name.endswith("embed_tokens") and config.tie_word_embeddings:
                std /= config.logits_scale
            elif name.endswith("embed_tokens") and not config.scale_embedding:
                std = 1.0
            assert_std(module.weight, std, name)
        elif "norm" in name and hasattr(module, "weight"):
            assert torch.equal(module.weight, torch.full_like(module.weight, 1 - config.norm_plus_one)), name


@pytest.mark.parametrize("preset", ["t5-small", "t5-v1.1-small", "transformer-iwslt", "metaphrase-tiny"])
def test_logits_begin_with_a_variance_of_about_one(preset):
    sizes = {"vocab_size": 1000, "encoder_layers": 1, "decoder_layers": 1}
    model = MetaphraseForConditionalGeneration(MetaphraseConfig.from_preset(preset, **sizes)).eval()
    ids = torch.randint(10, 1000, (4, 20))
    with torch.no_grad():
        logits = model(input_ids=ids, decoder_input_ids=ids).logits
    assert 0.7 < logits.std() < 1.4
