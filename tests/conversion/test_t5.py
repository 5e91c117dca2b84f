"""Tests of `conversion.t5`: converted models equal transformers' own classes, for random variants."""

import pytest
import torch
from converted_models import VARIANTS, check_conversion, draw, fill_randomly, save_and_convert
from torch import nn
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from metaphrase.conversion.family import HEAD


def t5_like(family, rng):
    """Return a model of random dimensions, plain or gated, with tied or untied head."""
    is_gated, has_own_head = rng.random() < 0.5, rng.random() < 0.5
    activation = rng.choice(("relu", "gelu", "silu", "gelu_new"))
    buckets = rng.choice((4, 8, 10, 32))
    fields = {
        "vocab_size": rng.randint(29, 61),
        "d_model": rng.randint(17, 48),
        "d_kv": rng.randint(3, 11),
        "d_ff": rng.randint(17, 60),
        "num_layers": rng.randint(1, 3),
        "num_decoder_layers": rng.randint(1, 3),
        "num_heads": rng.randint(1, 5),
        "relative_attention_num_buckets": buckets,
        "relative_attention_max_distance": rng.randint(buckets // 2 + 1, buckets // 2 + 20),
        "layer_norm_epsilon": rng.choice((1e-6, 1e-5)),
        "feed_forward_proj": f"gated-{activation}" if is_gated else activation,
        "decoder_start_token_id": 0,
        "tie_word_embeddings": rng.random() < 0.5,
    }
    config = AutoConfig.for_model(family, **fields)
    theirs = AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager")
    if has_own_head:
        # transformers unties the projection only while it loads a checkpoint that has one.
        theirs.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        del theirs.all_tied_weights_keys[HEAD]
    fill_randomly(theirs, rng.randrange(2**31))
    # T5 does not divide its scores by the root of the heads' width: as where it is initialized, queries are that much smaller.
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith(".q.weight"):
                parameter.mul_(config.d_kv**-0.5)
    return theirs


@pytest.mark.parametrize("family", ["t5", "mt5", "umt5"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_converted_t5_equals_its_own_class(family, variant, tmp_path):
    rng = draw(family, variant)
    check_conversion(t5_like(family, rng), family, rng, tmp_path)


def test_t5_has_one_probability_for_all_dropout(tmp_path):
    theirs = t5_like("t5", draw("t5", 100))
    theirs.config.dropout_rate = 0.25
    config = save_and_convert(theirs, tmp_path).config
    assert (config.dropout, config.attention_dropout, config.activation_dropout) == (0.25, 0.25, 0.25)
