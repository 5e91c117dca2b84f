"""Presets: published encoder-decoder Transformers, and the designs that Metaphrase recommends.

A preset lists the fields that differ from the defaults of `MetaphraseConfig`.

Source:
- T5: Raffel et al. 2020, section 3.1 and appendix, arXiv 1910.10683.
- T5 v1.1: Shazeer 2020, arXiv 2002.05202, and the released configurations.
- Transformer base and big: Vaswani et al. 2017, table 3, arXiv 1706.03762. Its IWSLT size is fairseq's.
- Transformer tiny: Wu et al. 2021, arXiv 2105.14462.
- BART: Lewis et al. 2020, arXiv 1910.13461.
- Marian: Junczys-Dowmunt et al. 2018, arXiv 1804.00344.
- Students: the widths and depths of Bogoychev et al. 2020, Edinburgh's Submissions to the 2020 Machine Translation Efficiency
  Task, https://aclanthology.org/2020.ngt-1.26.
"""


def _stacks(layers: int, heads: int, ffn_dim: int) -> dict[str, int]:
    """Return the fields of two stacks of equal depth and width."""
    sizes = {"layers": layers, "attention_heads": heads, "ffn_dim": ffn_dim}
    return {f"{stack}_{name}": size for stack in ("encoder", "decoder") for name, size in sizes.items()}


_T5 = {
    "vocab_size": 32128,
    "activation_function": "relu",
    "gated_mlp": False,
    "position_embedding_type": "relative",
    "attention_scale": 1.0,
    "scale_embedding": False,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}


def _t5(hidden_size: int, layers: int, heads: int, head_dim: int, ffn_dim: int) -> dict:
    """Return the fields of a T5, which scales the decoder's output, not the embeddings."""
    fields = _T5 | _stacks(layers, heads, ffn_dim)
    return fields | {"hidden_size": hidden_size, "head_dim": head_dim, "logits_scale": hidden_size**-0.5}


def _t5_v1_1(hidden_size: int, layers: int, heads: int, ffn_dim: int) -> dict:
    """Return the fields of a T5 v1.1, with a gated GELU and an untied output projection."""
    fields = _t5(hidden_size, layers, heads, 64, ffn_dim)
    return fields | {
        "gated_mlp": True,
        "activation_function": "gelu_new",
        "tie_word_embeddings": False,
        "logits_scale": 1.0,
    }


def _vaswani(hidden_size: int, layers: int, heads: int, ffn_dim: int, dropout: float, **fields) -> dict:
    """Return the fields of the Transformer of 2017: post-norm, sinusoids, ReLU, biases and shared embeddings."""
    vaswani = {
        "hidden_size": hidden_size,
        "activation_function": "relu",
        "gated_mlp": False,
        "position_embedding_type": "sinusoidal",
        "sinusoidal_layout": "half_split",
        "norm_type": "layernorm",
        "norm_position": "post",
        "norm_eps": 1e-5,
        "attention_bias": True,
        "mlp_bias": True,
        "dropout": dropout,
    }
    return vaswani | _stacks(layers, heads, ffn_dim) | fields


def _bart(hidden_size: int, layers: int, heads: int, ffn_dim: int) -> dict:
    fields = _vaswani(hidden_size, layers, heads, ffn_dim, dropout=0.1)
    return fields | {
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


def _metaphrase(hidden_size: int, encoder_layers: int, decoder_layers: int, ffn_dim: int) -> dict:
    """Return the fields of a recommended design: the defaults, with a shallower decoder in larger sizes.

    A shallow decoder saves decoding time, and a deep encoder keeps the quality (Kasai et al. 2021, arXiv 2006.10369).
    """
    fields = _stacks(encoder_layers, max(1, hidden_size // 64), ffn_dim)
    return fields | {"hidden_size": hidden_size, "decoder_layers": decoder_layers}


PRESETS: dict[str, dict] = {
    "t5-small": _t5(512, 6, 8, 64, 2048),
    "t5-base": _t5(768, 12, 12, 64, 3072),
    "t5-large": _t5(1024, 24, 16, 64, 4096),
    "t5-3b": _t5(1024, 24, 32, 128, 16384),
    "t5-11b": _t5(1024, 24, 128, 128, 65536),
    "t5-v1.1-small": _t5_v1_1(512, 8, 6, 1024),
    "t5-v1.1-base": _t5_v1_1(768, 12, 12, 2048),
    "t5-v1.1-large": _t5_v1_1(1024, 24, 16, 2816),
    "t5-v1.1-xl": _t5_v1_1(2048, 24, 32, 5120),
    "t5-v1.1-xxl": _t5_v1_1(4096, 24, 64, 10240),
    "transformer-base": _vaswani(512, 6, 8, 2048, dropout=0.1, vocab_size=37000, sinusoidal_layout="interleaved"),
    "transformer-big": _vaswani(1024, 6, 16, 4096, dropout=0.3, vocab_size=37000, sinusoidal_layout="interleaved"),
    "transformer-iwslt": _vaswani(512, 6, 4, 1024, dropout=0.3, vocab_size=10000),
    "transformer-tiny": _vaswani(128, 4, 4, 256, dropout=0.3, vocab_size=10000),
    "bart-base": _bart(768, 6, 12, 3072),
    "bart-large": _bart(1024, 12, 16, 4096),
    "marian": _vaswani(
        512,
        6,
        8,
        2048,
        dropout=0.1,
        vocab_size=58101,
        activation_function="silu",
        logits_bias=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=58100,
        decoder_start_token_id=58100,
    ),
    "metaphrase-tiny": _metaphrase(256, 4, 4, 512),
    "metaphrase-small": _metaphrase(512, 6, 3, 1408),
    "metaphrase-base": _metaphrase(768, 12, 6, 2048),
    "metaphrase-large": _metaphrase(1024, 24, 8, 2816),
    "student-tiny": _metaphrase(256, 6, 2, 1024),
    "student-base": _metaphrase(512, 6, 2, 1408),
}
