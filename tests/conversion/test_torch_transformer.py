"""State dicts of `torch.nn.Transformer`, in and out."""

import pytest
import torch
from tiny_models import padding_mask, tiny_model
from torch import nn

from metaphrase.conversion import from_torch_transformer, to_torch_transformer
from metaphrase.modeling import MetaphraseConfig, MetaphraseForConditionalGeneration

BOTH_NORM_POSITIONS = pytest.mark.parametrize("norm_first", [True, False])


def torch_transformer(norm_first, activation="relu"):
    torch.manual_seed(0)
    module = nn.Transformer(24, 3, 3, 2, 40, 0.1, activation, batch_first=True, norm_first=norm_first).eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, parameter.mean().item() if parameter.ndim == 1 else 0.0, 0.25)
    return module


@BOTH_NORM_POSITIONS
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_model_of_a_state_dict_says_the_same(norm_first, activation):
    module, embedding = torch_transformer(norm_first, activation), torch.randn(31, 24)
    model = from_torch_transformer(
        module.state_dict(), num_heads=3, activation=activation, norm_first=norm_first, source_embedding=embedding
    ).eval()
    source, target = torch.randint(3, 31, (3, 6)), torch.randint(3, 31, (3, 5))
    mask = padding_mask([6, 4, 1], 6, "right")
    with torch.no_grad():
        outputs = model(input_ids=source, attention_mask=mask, decoder_input_ids=target)
        masks = {"tgt_mask": torch.ones(5, 5).triu(1).bool()}
        masks |= dict.fromkeys(("src_key_padding_mask", "memory_key_padding_mask"), mask == 0)
        expected = module(embedding[source], embedding[target], **masks) @ embedding.T
    torch.testing.assert_close(outputs.logits, expected, atol=1e-5, rtol=1e-5)


@BOTH_NORM_POSITIONS
def test_out_and_in_again_is_the_same_to_the_last_bit(norm_first):
    state = torch_transformer(norm_first).state_dict()
    model = from_torch_transformer(state, num_heads=3, norm_first=norm_first, vocab_size=31)
    again = to_torch_transformer(model)
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], value) for name, value in state.items())
    torch_transformer(norm_first).load_state_dict(again)


def test_targets_may_have_an_embedding_of_their_own():
    source, target = torch.randn(31, 24), torch.randn(29, 24)
    model = from_torch_transformer(
        torch_transformer(True).state_dict(), num_heads=3, source_embedding=source, target_embedding=target
    )
    assert model.config.vocab_size == 31 and model.config.decoder_vocab_size == 29
    assert torch.equal(model.get_encoder().embed_tokens.weight, source)
    assert torch.equal(model.get_decoder().embed_tokens.weight, target)
    assert model.lm_head.weight is model.get_decoder().embed_tokens.weight


def test_what_is_no_torch_transformer_is_refused():
    state = torch_transformer(True).state_dict()
    for changed in (
        state | {"generator.weight": torch.zeros(2, 2)},
        {name: value for name, value in state.items() if name != "decoder.layers.1.norm2.bias"},
    ):
        with pytest.raises(ValueError, match="`state` must be that of a"):
            from_torch_transformer(changed, num_heads=3, vocab_size=31)
    with pytest.raises(TypeError, match="hidden_size"):
        from_torch_transformer(state, num_heads=3, hidden_size=24)


def test_options_in_the_way_are_named():
    with pytest.raises(ValueError, match=r"is no torch\.nn\.Transformer") as error:
        to_torch_transformer(tiny_model(decoder_attention_heads=2, final_norm=False, norm_position="both"))
    fields = ("norm_position", "encoder_attention_heads", "encoder_ffn_dim", "position_embedding_type", "norm_type")
    assert all(f"`{field}` must" in str(error.value) for field in (*fields, "gated_mlp", "final_norm"))


def test_positions_and_norms_of_embeddings_stay_behind():
    sizes = {"vocab_size": 31, "hidden_size": 24, "encoder_layers": 1, "decoder_layers": 1}
    model = MetaphraseForConditionalGeneration(MetaphraseConfig.from_preset("bart-base", **sizes, final_norm=True))
    state = to_torch_transformer(model)
    assert state.keys() == nn.Transformer(24, 12, 1, 1, 3072).state_dict().keys()
    assert torch.equal(state["decoder.norm.weight"], model.get_decoder().norm.weight)
    assert torch.equal(state["encoder.layers.0.linear1.bias"], model.get_encoder().layers[0].mlp.up_proj.bias)
