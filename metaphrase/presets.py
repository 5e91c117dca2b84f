"""Presets: published encoder-decoder Transformers, and the designs that Metaphrase recommends.

A preset lists the fields that differ from the defaults of `MetaphraseConfig`.

Source:
- T5: Raffel et al. 2020, section 3.1 and appendix, arXiv 1910.10683.
- T5 v1.1: Shazeer 2020, arXiv 2002.05202, and the released configurations.
- Transformer base and big: Vaswani et al. 2017, table 3, arXiv 1706.03762. Its IWSLT size is fairseq's.
- Transformer tiny: Wu et al. 2021, arXiv 2105.14462.
- BART: Lewis et al. 2020, arXiv 1910.13461.
- Marian: Junczys-Dowmunt et al. 2018, arXiv 1804.00344.
- Metaphrase: a shallow decoder saves decoding time, and a deep encoder keeps the quality (Kasai et al. 2021, arXiv 2006.10369).
- Students: the widths and depths of Bogoychev et al. 2020, Edinburgh's Submissions to the 2020 Machine Translation Efficiency
  Task, https://aclanthology.org/2020.ngt-1.26.
- Metaphrase long: local attention with the radius of LongT5 (Guo et al. 2022, section 3.1, arXiv 2112.07916).
"""

import copy
from typing import TYPE_CHECKING, Any

from metaphrase.errors import MetaphraseError

if TYPE_CHECKING:
    from metaphrase.modeling import MetaphraseConfig

_ANY_T5 = {
    "vocab_size": 32128,
    "position_embedding_type": "relative",
    "head_dim": 64,
    "attention_scale": 1.0,
    "scale_embedding": False,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
# `from_preset` computes the scale from the width.
_T5 = _ANY_T5 | {"activation_function": "relu", "gated_mlp": False, "logits_scale": None}
_T5_V1_1 = _ANY_T5 | {"activation_function": "gelu_new", "tie_word_embeddings": False}
_VASWANI = {
    "activation_function": "relu",
    "gated_mlp": False,
    "position_embedding_type": "sinusoidal",
    "sinusoidal_layout": "half_split",
    "norm_type": "layernorm",
    "norm_position": "post",
    "norm_eps": 1e-5,
    "attention_bias": True,
    "mlp_bias": True,
}
_BASE = {"vocab_size": 37000, "sinusoidal_layout": "interleaved"}
_SMALL = {"vocab_size": 10000, "dropout": 0.3}
_BART = _VASWANI | {
    "vocab_size": 50265,
    "activation_function": "gelu",
    "position_embedding_type": "learned",
    "embedding_norm": True,
    "scale_embedding": False,
    "initializer_range": 0.02,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "decoder_start_token_id": 2,
}
_MARIAN = _VASWANI | {
    "vocab_size": 58101,
    "activation_function": "silu",
    "logits_bias": True,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 58100,
    "decoder_start_token_id": 58100,
}
# Marian's own files have these fields. transformers' Marian has other positions and another `norm_eps`.
_MARIAN_FILE = _VASWANI | {"sinusoidal_layout": "fairseq", "norm_eps": 1e-6, "logits_bias": True}
_MARIAN_FILE |= {"train_padding_embedding": False, "decoder_self_attention": "ssru"}
# The decoder reads all of the source in any case, so that no encoder layer needs full attention.
_LONG = {
    "max_position_embeddings": 16384,
    "encoder_layer_types": ["sliding_attention"] * 6,
    "encoder_window": [127, 127],
}

# Width, layers of the encoder, layers of the decoder, heads, width of the feed-forward network, and other fields.
_SIZES: dict[str, tuple[int, int, int, int, int, dict]] = {
    "t5-small": (512, 6, 6, 8, 2048, _T5),
    "t5-base": (768, 12, 12, 12, 3072, _T5),
    "t5-large": (1024, 24, 24, 16, 4096, _T5),
    "t5-3b": (1024, 24, 24, 32, 16384, _T5 | {"head_dim": 128}),
    "t5-11b": (1024, 24, 24, 128, 65536, _T5 | {"head_dim": 128}),
    "t5-v1.1-small": (512, 8, 8, 6, 1024, _T5_V1_1),
    "t5-v1.1-base": (768, 12, 12, 12, 2048, _T5_V1_1),
    "t5-v1.1-large": (1024, 24, 24, 16, 2816, _T5_V1_1),
    "t5-v1.1-xl": (2048, 24, 24, 32, 5120, _T5_V1_1),
    "t5-v1.1-xxl": (4096, 24, 24, 64, 10240, _T5_V1_1),
    "transformer-base": (512, 6, 6, 8, 2048, _VASWANI | _BASE),
    "transformer-big": (1024, 6, 6, 16, 4096, _VASWANI | _BASE | {"dropout": 0.3}),
    "transformer-iwslt": (512, 6, 6, 4, 1024, _VASWANI | _SMALL),
    "transformer-tiny": (128, 4, 4, 4, 256, _VASWANI | _SMALL),
    "bart-base": (768, 6, 6, 12, 3072, _BART),
    "bart-large": (1024, 12, 12, 16, 4096, _BART),
    "marian": (512, 6, 6, 8, 2048, _MARIAN),
    "metaphrase-tiny": (256, 4, 4, 4, 512, {}),
    "metaphrase-small": (512, 6, 3, 8, 1408, {}),
    "metaphrase-base": (768, 12, 6, 12, 2048, {}),
    "metaphrase-large": (1024, 24, 8, 16, 2816, {}),
    "metaphrase-long": (256, 6, 3, 4, 704, _LONG),
    "student-tiny": (256, 6, 2, 4, 1024, {}),
    "student-ssru": (256, 6, 2, 4, 1024, {"decoder_self_attention": "ssru"}),
    "student-marian": (256, 6, 2, 8, 1536, _MARIAN_FILE),
    "student-base": (512, 6, 2, 8, 1408, {}),
}

PRESETS: dict[str, dict] = {
    name: {
        "hidden_size": hidden_size,
        "encoder_layers": encoder_layers,
        "decoder_layers": decoder_layers,
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_ffn_dim": ffn_dim,
        "decoder_ffn_dim": ffn_dim,
        **fields,
    }
    for name, (hidden_size, encoder_layers, decoder_layers, heads, ffn_dim, fields) in _SIZES.items()
}


def preset_names() -> list[str]:
    """Return the names of all presets."""
    return list(PRESETS)


def from_preset(cls: "type[MetaphraseConfig]", name: str, **overrides: Any) -> "MetaphraseConfig":
    """Return the configuration of a preset.

    In T5's presets, `logits_scale` follows the final `hidden_size` and `tie_word_embeddings`.

    Args:
        name: One of `presets()`.
        **overrides: Fields that replace those of the preset, such as `vocab_size`.

    Raises:
        MetaphraseError: If the preset or a field is unknown.
    """
    if name not in PRESETS:
        raise MetaphraseError(f"`preset` must be one of {', '.join(PRESETS)}, got {name!r}.")
    overrides = {cls.attribute_map.get(field, field): value for field, value in overrides.items()}
    # A configuration itself takes any name. The types of most fields of the base class are not checked.
    if unknown := overrides.keys() - {*cls.__annotations__, "dtype"}:
        raise MetaphraseError(f"`{min(unknown)}` is not a field of MetaphraseConfig.")
    fields = copy.deepcopy(PRESETS[name]) | overrides
    if fields.get("logits_scale", 1.0) is None:
        is_tied = fields.get("tie_word_embeddings", True)
        fields["logits_scale"] = fields["hidden_size"] ** -0.5 if is_tied else 1.0
    # Marian's decoder starts with zeros, which are the embedding of padding.
    if not PRESETS[name].get("train_padding_embedding", True):
        fields |= {"bos_token_id": None, "decoder_start_token_id": fields.get("pad_token_id", cls.pad_token_id)}
    return cls(**fields)
